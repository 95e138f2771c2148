"""The arithmetic in front of a reader."""

import pytest

from perdure.agent.memory.room import Need, Room, check_room
from perdure.errors import ConfigError

GIB = 1 << 30


def test_what_fits_is_no_problem() -> None:
    check_room("/dev/shm", Need(file_bytes=GIB, slots=2), Room(file_system=2 * GIB, group=None))


def test_a_small_file_system_is_refused_with_all_numbers() -> None:
    need = Need(file_bytes=GIB, slots=2, others=3, slots_each=2, replicas=8)
    with pytest.raises(ConfigError) as caught:
        check_room("/dev/shm", need, Room(file_system=2 * GIB, group=None))
    said = str(caught.value)
    for part in ("2 slots of 1.0 GiB", "3 more ranks", "8 for replicas", "make 16.0 GiB", "2.0 GiB free"):
        assert part in said


def test_a_small_cgroup_is_refused_though_the_file_system_is_large() -> None:
    with pytest.raises(ConfigError, match=r"512\.0 MiB are left below the memory cgroup's limit"):
        check_room("/dev/shm", Need(file_bytes=GIB, slots=1), Room(file_system=9 * GIB, group=GIB // 2))
