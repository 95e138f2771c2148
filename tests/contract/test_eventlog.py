"""One behaviour of event logs, on every implementation; then what only a file can suffer."""

import errno
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from perdure.errors import EventLogError
from perdure.ports import EventLog, LogRecord
from perdure.store.eventlog import BATCH, MemoryEventLog, SqliteEventLog, open_reader
from perdure.vocab.decision import Decision, Finish
from perdure.vocab.event import JobEnded, WorkerError, WorkerExited
from perdure.vocab.ids import ActionId, EventId, GenerationNumber, NodeId, Rank


def an_end(number: int, size: int = 0) -> JobEnded:
    return JobEnded(id=EventId(f"e{number}"), at=1000.5 + number, exit_code=0, reason="ü" * size)


def a_story() -> list[LogRecord]:
    error = WorkerError(type="ValueError", message="naïve\n\x00", where="train.py:7", traceback="…")
    exited = WorkerExited(
        id=EventId("a.1"),
        at=1.25,
        node=NodeId("a"),
        generation=GenerationNumber(1),
        rank=Rank(3),
        local_rank=1,
        pid=77,
        exit_code=1,
        signal=None,
        step=None,
        error=error,
    )
    actions = (Finish(id=ActionId("1.1.a.1")),)
    return [exited, Decision(at=2.5, answers=exited.id, because="all is done", actions=actions), an_end(3)]


@pytest.fixture(params=["memory", "sqlite"])
def log(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[EventLog]:
    made: EventLog = MemoryEventLog() if request.param == "memory" else SqliteEventLog(str(tmp_path / "events.db"))
    yield made
    made.close()


# --- every implementation --------------------------------------------------------------------------------------------


def test_new_log_is_empty(log: EventLog) -> None:
    assert list(log.read()) == []


def test_records_come_back_equal_in_order_and_numbered_from_one(log: EventLog) -> None:
    story = a_story()
    log.append(story[:1])
    log.append(story[1:])
    assert list(log.read()) == list(enumerate(story, 1))


def test_read_after_a_number_gives_the_rest(log: EventLog) -> None:
    log.append([an_end(n) for n in range(1, 6)])
    assert list(log.read(after=3)) == [(4, an_end(4)), (5, an_end(5))]
    assert list(log.read(after=5)) == []
    assert list(log.read(after=99)) == []


def test_append_of_nothing_changes_nothing(log: EventLog) -> None:
    log.append([])
    log.append([an_end(1)])
    assert [number for number, _ in log.read()] == [1]


def test_reading_and_appending_may_be_interleaved(log: EventLog) -> None:
    total = 2 * BATCH + 10
    log.append([an_end(n) for n in range(total)])
    seen = 0
    for number, _ in log.read():
        seen += 1
        if number in (1, BATCH, total - 1):
            log.append([an_end(0)])
    assert seen >= total
    assert [number for number, _ in log.read()] == list(range(1, total + 4))


def test_closed_log_refuses_everything_and_closes_twice(log: EventLog) -> None:
    log.append([an_end(1)])
    log.close()
    log.close()
    with pytest.raises(EventLogError, match="closed"):
        log.append([an_end(2)])
    with pytest.raises(EventLogError, match="closed"):
        list(log.read())


# --- a file ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "events?%#.db")  # characters that mean something in an SQLite URI


def written(path: str, count: int, size: int = 0) -> None:
    log = SqliteEventLog(path)
    log.append([an_end(n, size) for n in range(1, count + 1)])
    log.close()


def test_closed_log_goes_on_where_it_ended(path: str) -> None:
    written(path, 3)
    log = SqliteEventLog(path)
    log.append([an_end(4)])
    assert list(log.read()) == [(n, an_end(n)) for n in range(1, 5)]
    log.close()
    assert sorted(os.listdir(os.path.dirname(path))) == ["events?%#.db", "events?%#.db.lock"]


def test_readers_follow_a_living_writer_and_cannot_write(path: str) -> None:
    log = SqliteEventLog(path)
    readers = [open_reader(path), open_reader(path)]
    for number in (1, 2):
        log.append([an_end(number)])
        for reader in readers:
            assert list(reader.read(number - 1)) == [(number, an_end(number))]
    assert not hasattr(readers[0], "append")
    with pytest.raises(sqlite3.Error):
        readers[0]._connection.execute("INSERT INTO records VALUES (3, 'x', 1, '{}')")
    log.close()
    assert [number for number, _ in readers[0].read()] == [1, 2]
    for reader in readers:
        reader.close()
    late = open_reader(path)
    assert [number for number, _ in late.read()] == [1, 2]
    late.close()


def test_second_writer_is_refused_until_the_first_is_gone(path: str) -> None:
    first = SqliteEventLog(path)
    with pytest.raises(EventLogError, match="has a writer already"):
        SqliteEventLog(path)
    elsewhere = run_python("SqliteEventLog(path)", path)
    assert "has a writer already" in elsewhere.stderr
    first.append([an_end(1)])
    first.close()
    SqliteEventLog(path).close()


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE records SET body = '{}'",
        "DELETE FROM records",
        "INSERT OR REPLACE INTO records VALUES (1, 'x', 1.0, '{}')",
        "INSERT INTO records VALUES (9, 'x', 1.0, '{}')",
    ],
)
def test_file_itself_refuses_to_be_rewritten(path: str, statement: str) -> None:
    written(path, 2)
    connection = sqlite3.connect(path)
    with pytest.raises(sqlite3.IntegrityError, match="append-only"):
        connection.execute(statement)
    connection.close()


def run_python(code: str, path: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(code, path), capture_output=True, text=True, timeout=60, env=with_path())


def command(code: str, path: str) -> list[str]:
    start = "import sys; from perdure.store.eventlog import *; path = sys.argv[1]\n"
    return [sys.executable, "-c", start + code, path]


def with_path() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}


WRITER = """
from perdure.vocab.event import JobEnded
log = SqliteEventLog(path)
for n in range(1, 10**9, 3):
    log.append([JobEnded(id=f"e{n + i}", at=1000.5 + n + i, exit_code=0, reason="") for i in range(3)])
    print(n + 2, flush=True)
"""


def test_killed_writer_leaves_a_whole_prefix_with_all_that_it_had_committed(path: str) -> None:
    for _ in range(3):
        with subprocess.Popen(command(WRITER, path), stdout=subprocess.PIPE, text=True, env=with_path()) as child:
            assert child.stdout is not None
            acknowledged = [int(child.stdout.readline()) for _ in range(50)][-1]
            child.send_signal(signal.SIGKILL)
            child.wait()
        reader = open_reader(path)
        records = list(reader.read())
        reader.close()
        assert len(records) >= acknowledged
        assert len(records) % 3 == 0  # an append is there as a whole
        assert records == [(n, an_end(n)) for n in range(1, len(records) + 1)]
        log = SqliteEventLog(path)
        log.append([an_end(len(records) + 1)])
        assert sum(1 for _ in log.read()) == len(records) + 1
        log.close()
        os.unlink(path)


# --- a bad medium ----------------------------------------------------------------------------------------------------


@pytest.fixture
def tmpfs(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Mounts a file system of its own with the given options."""
    mounted: list[Path] = []

    def mount(options: str) -> Path:
        folder = tmp_path / f"mounted-{len(mounted)}"
        folder.mkdir()
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", folder], capture_output=True, text=True)
        if done.returncode != 0:
            pytest.skip(f"cannot mount a small file system here: {done.stderr.strip()}")
        mounted.append(folder)
        return folder

    if shutil.which("mount") is None:
        pytest.skip("no mount command here")
    yield mount
    for folder in mounted:
        subprocess.run(["umount", folder], check=True)


def fill(folder: Path) -> Path:
    """A file that takes all the space there is."""
    ballast = folder / "ballast"
    with ballast.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(b"x" * 4096)
        except OSError as exc:
            if exc.errno != errno.ENOSPC:
                raise
    return ballast


def test_full_disk_is_said_and_the_log_goes_on_when_there_is_space_again(tmpfs: Callable[[str], Path]) -> None:
    folder = tmpfs("size=512k")
    path = str(folder / "events.db")
    log = SqliteEventLog(path)
    log.append([an_end(1)])
    ballast = fill(folder)
    accepted = 1
    refusal = ""
    while not refusal:
        try:
            log.append([an_end(accepted + 1, 3000), an_end(accepted + 2, 3000)])
            accepted += 2
        except EventLogError as exc:
            refusal = str(exc)
    assert refusal == f"cannot write the event log {path}: database or disk is full; free some space on its disk"
    for _ in range(3):
        with pytest.raises(EventLogError):
            log.append([an_end(accepted + 1, 3000), an_end(accepted + 2, 3000)])
    assert [number for number, _ in log.read()] == list(range(1, accepted + 1))
    ballast.unlink()
    log.append([an_end(0), an_end(0)])
    log.close()
    reader = open_reader(path)
    assert [number for number, _ in reader.read()] == list(range(1, accepted + 3))
    reader.close()


def test_log_that_cannot_be_begun_on_a_full_disk_is_an_error(tmpfs: Callable[[str], Path]) -> None:
    folder = tmpfs("size=16k")
    (folder / "ballast").write_bytes(b"x" * 12288)
    with pytest.raises(EventLogError, match="cannot open the event log"):
        SqliteEventLog(str(folder / "events.db"))
    (folder / "ballast").unlink()
    with pytest.raises(EventLogError, match="cannot open the event log"):
        SqliteEventLog(str(folder / "missing" / "events.db"))


def test_log_on_a_read_only_file_system_can_be_read(tmpfs: Callable[[str], Path]) -> None:
    folder = tmpfs("size=1m")
    path = str(folder / "events.db")
    written(path, 2)
    subprocess.run(["mount", "-o", "remount,ro", folder], check=True)
    reader = open_reader(path)
    assert [number for number, _ in reader.read()] == [1, 2]
    reader.close()
    with pytest.raises(EventLogError):
        SqliteEventLog(path)


def test_file_that_is_no_log_is_an_error_that_says_so(path: str, tmp_path: Path) -> None:
    with pytest.raises(EventLogError, match="there is no event log"):
        open_reader(path)
    Path(path).write_bytes(b"this is not a database, and it is long enough to be looked at as one" * 100)
    for opening in (SqliteEventLog, open_reader):
        with pytest.raises(EventLogError, match="not a database; the file is damaged: move it away"):
            opening(path)
    other = str(tmp_path / "other.db")
    connection = sqlite3.connect(other)
    connection.execute("CREATE TABLE t (x)")
    connection.close()
    for opening in (SqliteEventLog, open_reader):
        with pytest.raises(EventLogError, match="is no event log of this Perdure"):
            opening(other)


def test_damage_within_the_file_is_an_error_and_what_lies_before_it_is_read(path: str) -> None:
    written(path, 400, size=100)
    size = os.path.getsize(path)
    with open(path, "r+b") as file:
        file.seek(size // 2 // 4096 * 4096)
        file.write(b"\xff" * 8192)
    for opening in (SqliteEventLog, open_reader):
        log = opening(path)
        with pytest.raises(EventLogError, match=r"damaged|malformed"):
            list(log.read())
        log.close()


def test_record_that_is_missing_or_unreadable_is_named(path: str) -> None:
    written(path, 5)
    connection = sqlite3.connect(path)
    connection.executescript("DROP TRIGGER no_delete; DROP TRIGGER no_update; DELETE FROM records WHERE number = 4")
    connection.execute("""UPDATE records SET body = '{"kind":"job_ended"}' WHERE number = 2""")
    connection.commit()
    connection.close()
    reader = open_reader(path)
    assert next(reader.read()) == (1, an_end(1))
    with pytest.raises(EventLogError, match=r"damaged at record 2: .*required field"):
        list(reader.read())
    with pytest.raises(EventLogError, match="damaged: record 4 is missing"):
        list(reader.read(after=2))
    reader.close()
