"""Binding, on files as in /sys: 2 sockets of 2 nodes, each with 4 cores of 2 threads and 2 GPUs."""

from pathlib import Path

import pytest

from perdure.errors import ConfigError
from perdure.host.numa import cpus_for, parse_ranges

CPUS = range(32)  # processor n and n + 16 are threads of one core; 4 cores per node


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    for gpu in range(8):
        device = tmp_path / f"bus/pci/devices/0000:{gpu + 16:02x}:00.0"
        write(device / "vendor", "0x10de")
        write(device / "class", "0x030200")
        write(device / "numa_node", str(gpu // 2))
    nic = tmp_path / "bus/pci/devices/0000:01:00.0"
    write(nic / "vendor", "0x15b3")
    write(nic / "class", "0x020000")
    write(tmp_path / "devices/system/node/possible", "0-3")
    for node in range(4):
        first = node * 4
        write(tmp_path / f"devices/system/node/node{node}/cpulist", f"{first}-{first + 3},{first + 16}-{first + 19}")
    for cpu in CPUS:
        core = cpu % 16
        folder = tmp_path / f"devices/system/cpu/cpu{cpu}"
        write(folder / "topology/thread_siblings_list", f"{core},{core + 16}")
        write(folder / "topology/physical_package_id", str(core // 8))
        pair = core // 2 * 2  # two cores share an L3
        for index, (level, kind, shared) in enumerate(
            [(1, "Instruction", f"{core}"), (2, "Unified", f"{core}"), (3, "Unified", f"{pair}-{pair + 1}")]
        ):
            write(folder / f"cache/index{index}/level", str(level))
            write(folder / f"cache/index{index}/type", kind)
            write(folder / f"cache/index{index}/shared_cpu_list", shared)
    return tmp_path


@pytest.mark.parametrize(
    ("binding", "local_rank", "expected"),
    [
        ("node", 2, "4-7,20-23"),
        ("socket", 2, "0-7,16-23"),
        ("socket", 7, "8-15,24-31"),
        ("exclusive", 2, "4-5,20-21"),
        ("exclusive", 3, "6-7,22-23"),
        ("core-complex", 2, "4-5,20-21"),
        ("core-complex", 3, "6-7,22-23"),
    ],
)
def test_cpus_for_each_way(machine: Path, binding: str, local_rank: int, expected: str) -> None:
    found = cpus_for(binding, local_rank, 8, sys_root=machine, allowed=set(CPUS))
    assert found == tuple(sorted(parse_ranges(expected)))


def test_cpus_for_shares_out_an_odd_core_to_the_first_gpu(machine: Path) -> None:
    allowed = set(CPUS) - {3, 19}  # 3 cores left on node 0
    first = cpus_for("exclusive", 0, 8, sys_root=machine, allowed=allowed)
    second = cpus_for("exclusive", 1, 8, sys_root=machine, allowed=allowed)
    assert (first, second) == ((0, 1, 16, 17), (2, 18))


def test_cpus_for_follows_the_visible_devices(machine: Path) -> None:
    found = cpus_for("node", 0, 1, visible_devices="7", sys_root=machine, allowed=set(CPUS))
    assert found == tuple(sorted(parse_ranges("12-15,28-31")))


@pytest.mark.parametrize(
    ("binding", "slots", "visible", "sentence"),
    [
        ("node", 9, None, "9 workers but 8 GPUs"),
        ("node", 1, "GPU-8f2a", "must name GPUs by number"),
        ("nod", 1, None, "take one of node, socket, exclusive, core-complex"),
    ],
)
def test_cpus_for_what_cannot_be_is_refused(
    machine: Path, binding: str, slots: int, visible: str | None, sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        cpus_for(binding, 0, slots, visible_devices=visible, sys_root=machine, allowed=set(CPUS))


def test_cpus_for_without_processors_or_gpus_is_refused(
    machine: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    with pytest.raises(ConfigError, match="may use no processor of NUMA node 0"):
        cpus_for("node", 0, 1, sys_root=machine, allowed={9})
    with pytest.raises(ConfigError, match="has 1 cores for 2 GPUs"):
        cpus_for("exclusive", 0, 2, sys_root=machine, allowed={0, 9})
    with pytest.raises(ConfigError, match="no GPU is seen"):
        cpus_for("node", 0, 1, sys_root=tmp_path_factory.mktemp("empty"))


def test_parse_ranges_of_the_kernels_lists() -> None:
    assert parse_ranges("0-2,4,6-7\n") == {0, 1, 2, 4, 6, 7}
    assert parse_ranges("") == set()
