"""What a user can do wrong, and what can be wrong around: one clear sentence each, and no traceback of ours."""

import errno
import json
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from perdure.host.clock import SteadyClock
from perdure.vocab.event import StepsBegun
from tests.process.jobs import assert_ended, perdure, running, script, wait_until

PLAIN = (script("plain.py"), "--out", "out")
IS_ROOT = os.geteuid() == 0


def assert_one_sentence(done: subprocess.CompletedProcess[str], code: int, *words: str) -> None:
    assert done.returncode == code, done.stderr
    lines = done.stderr.splitlines()
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("perdure: ")
    for word in words:
        assert word in lines[0]
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--nproc-per-nod3", "2", "train.py"], ["no flag --nproc-per-nod3", "did you mean --nproc-per-node?"]),
        (["nope.py"], ["there is no script nope.py", "check the path"]),
        (["--nnodes", "two", "train.py"], ["--nnodes", "'two'"]),
        (["--stall-limit", "soon", "train.py"], ["--stall-limit", "'soon' is not a duration"]),
        (["--rdzv-id", "a/b", "train.py"], ["--rdzv-id", "without /"]),
        (["--spares", "1", "train.py"], ["--local-nodes 2"]),
        ([], ["no script is given"]),
    ],
)
def test_command_line_that_cannot_be_done_is_refused_in_one_sentence(
    tmp_path: Path, words: list[str], said: list[str]
) -> None:
    (tmp_path / "train.py").write_text("")
    assert_one_sentence(perdure(tmp_path, "run", *words), 2, *said)
    assert not (tmp_path / "home").exists()  # nothing was begun


def test_unknown_verb_and_unknown_job_are_refused(tmp_path: Path) -> None:
    assert perdure(tmp_path, "rnu", "x.py").returncode == 2
    assert_one_sentence(perdure(tmp_path, "why", "nope"), 2, "there is no job nope")


def test_syntax_error_is_shown_once_and_nothing_is_started(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("import os\n\ndef f(:\n    pass\n")
    done = perdure(tmp_path, "run", "--nproc-per-node", "4", "broken.py")
    assert done.returncode == 1
    assert done.stderr.count("def f(:") == 1
    assert f'File "{tmp_path}/broken.py", line 3' in done.stderr
    assert not (tmp_path / "home").exists()


@pytest.mark.parametrize("fork", [[], ["--no-fork-server"]])
def test_syntax_error_in_what_the_script_imports_is_not_tried_again(tmp_path: Path, fork: list[str]) -> None:
    (tmp_path / "broken.py").write_text("import os\n\ndef f(:\n    pass\n")
    (tmp_path / "train.py").write_text("import broken\n")
    with running(tmp_path, *fork, "train.py") as job:
        assert job.end() == 1
        assert "RestartWorkers" not in job.actions()
        assert "SyntaxError" in assert_ended(job.records(), 1).reason
        assert f'File "{tmp_path}/broken.py", line 3' in job.output


def test_port_that_is_taken_is_refused_in_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        endpoint = f"127.0.0.1:{port}"
        done = perdure(tmp_path, "run", "--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "train.py")
    assert_one_sentence(done, 1, f"port {port} on 127.0.0.1 is taken")


def test_store_port_that_is_taken_ends_the_job_with_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        done = perdure(tmp_path, "run", "--max-restarts", "0", "--master-port", str(port), "train.py")
    assert done.returncode == 1
    assert f"127.0.0.1:{port}" in done.stderr
    assert "--master-port" in done.stderr


def test_second_launcher_of_a_job_is_refused_and_the_first_unharmed(tmp_path: Path) -> None:
    with running(tmp_path, *PLAIN) as job:
        job.wait_stepping(1)
        done = perdure(tmp_path, "run", "--rdzv-id", "job", *PLAIN)
        assert_one_sentence(done, 2, "job job is run by process", str(job.process.pid), "--rdzv-id")
        job.interrupt()
        assert job.end() == 3
        assert len(job.all(StepsBegun)) == 1


def test_log_directory_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    (tmp_path / "logs").write_text("")
    assert_one_sentence(perdure(tmp_path, "run", "--log-dir", "logs", "train.py"), 2, "logs", "--log-dir")


# --- another user ----------------------------------------------------------------------------------------------------


@pytest.fixture
def powerless() -> list[str]:
    """Words that run a command as a user for whom permissions count."""
    if not IS_ROOT:
        return []
    if shutil.which("setpriv") is None:
        pytest.skip("needs setpriv, to give up what root may do")
    return ["setpriv", "--bounding-set", "-dac_override,-dac_read_search"]


def give_away(path: Path) -> None:
    """Make it belong to someone else, and to them alone."""
    if not IS_ROOT:
        pytest.skip("needs root, to give files to another user")
    for found in [path, *path.rglob("*")]:
        os.chown(found, 65534, 65534)
    path.chmod(0o700 if path.is_dir() else 0o600)


def test_folders_of_someone_else_are_refused_in_one_sentence(tmp_path: Path, powerless: list[str]) -> None:
    (tmp_path / "train.py").write_text("")
    (tmp_path / "secret.py").write_text("")
    closed = tmp_path / "closed"
    closed.mkdir()
    for path in (closed, tmp_path / "secret.py"):
        give_away(path)
    done = perdure(tmp_path, "run", "train.py", prefix=powerless, home=closed / "home")
    assert_one_sentence(done, 2, str(closed), "PERDURE_HOME")
    for logs in (closed / "logs", closed):
        done = perdure(tmp_path, "run", "--log-dir", str(logs), "train.py", prefix=powerless)
        assert_one_sentence(done, 2, str(closed), "--log-dir")
    assert_one_sentence(perdure(tmp_path, "run", "secret.py", prefix=powerless), 2, "secret.py", "chmod")


def test_job_of_someone_else_is_refused_in_one_sentence(tmp_path: Path, powerless: list[str]) -> None:
    (tmp_path / "train.py").write_text("")
    assert perdure(tmp_path, "run", "--rdzv-id", "mine", "train.py").returncode == 0
    give_away(tmp_path / "home" / "jobs" / "mine")
    for words in (("run", "--rdzv-id", "mine", "train.py"), ("why", "mine"), ("goodput", "mine"), ("jobs",)):
        done = perdure(tmp_path, *words, prefix=powerless)
        assert done.returncode in (1, 2), (words, done.stdout, done.stderr)
        assert len(done.stderr.splitlines()) == 1, (words, done.stderr)
        assert "permission denied" in done.stderr


# --- what lies in the home -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("file", "code", "words"),
    [
        ("events.db", 1, ["events.db", "move it away"]),
        ("token", 2, ["token", "holds no token"]),
    ],
)
def test_garbage_in_the_home_is_named_in_one_sentence(tmp_path: Path, file: str, code: int, words: list[str]) -> None:
    (tmp_path / "train.py").write_text("")
    folder = tmp_path / "home" / "jobs" / "job"
    folder.mkdir(parents=True)
    (folder / file).write_bytes(b"\x00garbage\xff" * 1000 if file == "events.db" else b"x\n")
    (folder / file).chmod(0o600)
    assert_one_sentence(perdure(tmp_path, "run", "--rdzv-id", "job", "train.py"), code, *words)


def test_garbage_where_control_is_published_does_not_stop_a_new_job(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    folder = tmp_path / "home" / "jobs" / "job"
    folder.mkdir(parents=True)
    (folder / "control").write_text("{")
    (folder / "lock").write_text("}")
    done = perdure(tmp_path, "run", "--rdzv-id", "job", "train.py")
    assert done.returncode == 0, done.stderr
    (folder / "control").write_text("{")
    assert perdure(tmp_path, "why", "job").returncode == 0
    assert perdure(tmp_path, "jobs").returncode == 0


# --- a full disk -----------------------------------------------------------------------------------------------------


@pytest.fixture
def tiny(tmp_path: Path) -> Iterator[Path]:
    """A file system of 400 KiB."""
    point = tmp_path / "tiny"
    point.mkdir()
    mounted = (
        IS_ROOT
        and subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=400k", "none", str(point)], capture_output=True
        ).returncode
        == 0
    )
    if not mounted:
        pytest.skip("needs root, to mount a small tmpfs")
    yield point
    subprocess.run(["umount", "--lazy", str(point)], check=True)


def fill(path: Path) -> None:
    """Write until the disk is full."""
    with path.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(b"x" * 4096)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise


def test_full_disk_stops_the_log_but_not_the_training(tmp_path: Path, tiny: Path) -> None:
    words = ("--nproc-per-node", "1", "--max-restarts", "9", "--log-dir", "logs", *PLAIN)
    trace = tmp_path / "out" / "rank-0.jsonl"
    with running(tmp_path, *words, home=tiny) as job:
        job.wait_stepping(1)
        fill(tiny / "filler")
        lives = 1
        while "training goes on" not in job.output:  # SQLite still has room in pages that it holds
            os.kill(json.loads(trace.read_text().splitlines()[-1])["pid"], 9)
            lives += 1
            wait_until(lambda count=lives: len(trace.read_text().splitlines()) >= count)
        assert lives <= 9, "the disk was never too full for the log"
        (tiny / "filler").unlink()
        wait_until(lambda: "nothing is missing from it" in job.output)
        job.wait_stepping(lives)
        assert job.output.count("training goes on") == 1
        numbers = [r for r in job.records() if isinstance(r, StepsBegun)]
        assert [e.generation for e in numbers] == list(range(1, lives + 1))
        job.interrupt()
        assert job.end() == 3
        assert_ended(job.records(), 3)


# --- the clock -------------------------------------------------------------------------------------------------------


def test_clock_that_jumps_does_not_move_time_in_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    wall = time.time()
    clock = SteadyClock()
    before = clock.now()
    for jump in (-3600.0, 7200.0):
        monkeypatch.setattr(time, "time", lambda jump=jump: wall + jump)
        after = clock.now()
        assert before <= after < before + 60
        before = after
    monkeypatch.setattr(time, "time", lambda: wall - 3600.0)
    assert SteadyClock(not_before=before).now() >= before  # one that takes over the log of another
