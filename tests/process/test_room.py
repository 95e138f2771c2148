"""Memory that is too small for the slots: a cgroup, a file system, a limit that nobody tells of. Refused at attach."""

import os
import resource
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from perdure.host.memory import memory_group_of
from perdure.wire.memory import Refused
from tests.process.memory_rig import Control, Trainer, a_layout, a_server, attached, checkpoint, connect

MIB = 1 << 20


@pytest.fixture
def control() -> Iterator[Control]:
    with Control() as made:
        yield made


@pytest.fixture
def folder() -> Iterator[Path]:
    path = Path(f"/dev/shm/perdure-test-{os.getpid()}")
    yield path
    Trainer.free_all()
    subprocess.run(["rm", "-rf", path], check=True)


@pytest.fixture
def group() -> Iterator[Path]:
    """A memory cgroup of 64 MiB below ours."""
    ours = memory_group_of(os.getpid())
    if ours is None:
        pytest.skip("there is no memory cgroup here")
    made = Path(ours.path) / f"perdure-test-{os.getpid()}"
    limit = made / ("memory.max" if ours.version == 2 else "memory.limit_in_bytes")
    try:
        made.mkdir()
        limit.write_text(str(64 * MIB))
    except OSError as problem:
        if made.is_dir():
            made.rmdir()
        pytest.skip(f"no memory cgroup can be made here: {problem}")
    yield made
    made.rmdir()


def asked(folder: Path, nbytes: int) -> Trainer:
    return Trainer(folder, a_layout(nbytes=nbytes))


def test_memory_cgroup_that_is_too_small_is_refused_with_the_arithmetic(
    control: Control, folder: Path, group: Path
) -> None:
    """Thread 15 (dlrover 1046, vllm 48879): at attach, and not by the OOM killer in the middle of a save."""
    with a_server(control, folder) as server:
        connect(str(folder / "door")).close()  # it is there, and has taken what it needs for itself
        (group / "cgroup.procs").write_text(str(server.process.pid))
        answer = asked(folder, 48 * MIB).answer
        assert isinstance(answer, Refused)
        assert "2 slots of 48.0 MiB for this rank make 96.0 MiB" in answer.reason
        assert "are left below the memory cgroup's limit" in answer.reason
        assert not list(folder.glob("*.slot"))
        trainer = asked(folder, 10 * MIB)
        attached(trainer)
        trainer.write(checkpoint(1))
        control.wait_for(lambda report: bool(report.held))
        assert server.process.poll() is None


def test_limit_that_no_file_system_tells_of_is_refused_and_leaves_nothing(control: Control, folder: Path) -> None:
    """Thread 45 (Speech 12637): as a quota, it shows only when the memory is asked for."""
    with a_server(control, folder) as server:
        connect(str(folder / "door")).close()
        resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, (32 * MIB, 32 * MIB))
        answer = asked(folder, 48 * MIB).answer
        assert isinstance(answer, Refused)
        assert "2 slots of 48.0 MiB for this rank make 96.0 MiB" in answer.reason
        assert os.strerror(27).lower() in answer.reason.lower()  # EFBIG
        assert not list(folder.glob("*.slot"))
        attached(asked(folder, 10 * MIB))
        server.process.send_signal(signal.SIGTERM)
