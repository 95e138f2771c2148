"""The event log: every Event and Decision of a job, appended once, in SQLite or in memory.

Knows how records lie on disk and what a broken medium looks like; does not know what any record means.
"""

import fcntl
import os
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from urllib.parse import quote

import msgspec

from perdure.errors import EventLogError
from perdure.ports import LogRecord

FORMAT = 1
"""`user_version` of the file; another one was written by another Perdure."""
BATCH = 500
"""Records read at once: between batches no transaction is open, so a slow reader holds no checkpoint back."""
BUSY_SECONDS = 5.0
"""Readers and the writer meet only for moments in WAL mode (recovery, the last one's clean-up)."""

# Append-only by the file itself, whoever writes to it. The insert trigger keeps numbers without gaps and stops
# INSERT OR REPLACE, which deletes without a DELETE trigger (sqlite.org/lang_conflict.html).
_SCHEMA = f"""
BEGIN IMMEDIATE;
CREATE TABLE IF NOT EXISTS records (
    number INTEGER PRIMARY KEY, kind TEXT NOT NULL, at REAL NOT NULL, body TEXT NOT NULL
) STRICT;
CREATE TRIGGER IF NOT EXISTS no_update BEFORE UPDATE ON records
    BEGIN SELECT RAISE(ABORT, 'the event log is append-only'); END;
CREATE TRIGGER IF NOT EXISTS no_delete BEFORE DELETE ON records
    BEGIN SELECT RAISE(ABORT, 'the event log is append-only'); END;
CREATE TRIGGER IF NOT EXISTS no_gap BEFORE INSERT ON records
    WHEN NEW.number <> (SELECT coalesce(max(number), 0) + 1 FROM records)
    BEGIN SELECT RAISE(ABORT, 'the event log is append-only'); END;
PRAGMA user_version = {FORMAT};
COMMIT;
"""

_decoder = msgspec.json.Decoder(LogRecord)


class MemoryEventLog:
    """For the simulator and for what need not last."""

    def __init__(self) -> None:
        self._records: list[LogRecord] = []
        self._closed = False

    def append(self, records: Sequence[LogRecord]) -> None:
        self._check_open()
        self._records.extend(records)

    def read(self, after: int = 0) -> Iterator[tuple[int, LogRecord]]:
        self._check_open()
        number = max(after, 0)
        while number < len(self._records):
            number += 1
            yield number, self._records[number - 1]

    def close(self) -> None:
        self._closed = True

    def _check_open(self) -> None:
        if self._closed:
            raise EventLogError("the event log in memory is closed; open a new one")


class EventLogReader:
    """Reads a log, also while its writer lives, and after its writer was killed. See `open_reader`."""

    def __init__(self, path: str, connection: sqlite3.Connection) -> None:
        self.path = path
        self._connection = connection

    def read(self, after: int = 0) -> Iterator[tuple[int, LogRecord]]:
        """The records after number `after`; ends at the last one that was there when its batch was read.

        Raises EventLogError at a record that is damaged or missing.
        """
        last = max(after, 0)
        while batch := self._batch(last):
            for number, body in batch:
                if number != last + 1:
                    raise EventLogError(f"the event log {self.path} is damaged: record {last + 1} is missing")
                last = number
                yield number, self._decode(number, body)

    def close(self) -> None:
        self._connection.close()

    def _batch(self, after: int) -> list[tuple[int, str]]:
        query = "SELECT number, body FROM records WHERE number > ? ORDER BY number LIMIT ?"
        with _said_plainly(self.path, "read"):
            return self._connection.execute(query, (after, BATCH)).fetchall()

    def _decode(self, number: int, body: str) -> LogRecord:
        try:
            record: LogRecord = _decoder.decode(body)
        except (msgspec.DecodeError, ValueError) as exc:
            raise EventLogError(f"the event log {self.path} is damaged at record {number}: {exc}") from exc
        return record


class SqliteEventLog(EventLogReader):
    """The one writer of a log; a second one is refused while this one lives, by a lock beside the file.

    Used by one thread at a time. A commit survives the death of this process; the last ones may be lost when the
    machine itself dies (synchronous=NORMAL: what is left is whole, sqlite.org/pragma.html#pragma_synchronous).
    """

    def __init__(self, path: str) -> None:
        """Open the log at `path`, or begin it. Raises EventLogError: has a writer, damaged, no access, no space."""
        self._lock = _lock(path)
        try:
            super().__init__(path, _open_writer(path))
            self._last = self._find_last()
        except BaseException:
            os.close(self._lock)
            raise
        self._closed = False

    def append(self, records: Sequence[LogRecord]) -> None:
        """Add `records`, all or none. Raises EventLogError (no space, I/O): nothing was added; try again then."""
        rows = [
            (number, record.__struct_config__.tag, record.at, msgspec.json.encode(record).decode())
            for number, record in enumerate(records, self._last + 1)
        ]
        with _said_plainly(self.path, "write"):
            try:
                self._connection.execute("BEGIN IMMEDIATE")
                self._connection.executemany("INSERT INTO records VALUES (?, ?, ?, ?)", rows)
                self._connection.execute("COMMIT")
            except BaseException:
                self._roll_back()
                raise
        self._last += len(rows)

    def close(self) -> None:
        """Close the file and free the lock; twice is harmless."""
        if not self._closed:
            self._closed = True
            self._connection.close()
            os.close(self._lock)

    def _roll_back(self) -> None:
        # SQLite has often rolled back by itself after a full disk (sqlite.org/lang_transaction.html).
        if not self._closed and self._connection.in_transaction:
            self._connection.execute("ROLLBACK")

    def _find_last(self) -> int:
        with _said_plainly(self.path, "read"):
            last: int = self._connection.execute("SELECT coalesce(max(number), 0) FROM records").fetchone()[0]
        return last


def open_reader(path: str) -> EventLogReader:
    """Open the log at `path` for reading, whether or not it has a writer. Raises EventLogError."""
    if not os.path.exists(path):
        raise EventLogError(f"there is no event log {path}")
    with _said_plainly(path, "read"):
        connection = _connect_reader(path)
    try:
        with _said_plainly(path, "read"):
            _check_format(path, connection)
    except BaseException:
        connection.close()
        raise
    return EventLogReader(path, connection)


def _connect_reader(path: str) -> sqlite3.Connection:
    # A WAL file needs its -shm beside it also for reading (sqlite.org/wal.html#read_only_databases). Where this user
    # may not write there, a log that was closed has no -wal, and can be read as a file that does not change.
    writable = os.access(path, os.W_OK) and os.access(os.path.dirname(os.path.abspath(path)), os.W_OK)
    still = not os.path.exists(f"{path}-wal")
    mode = "rw" if writable else "ro&immutable=1" if still else "ro"
    connection = sqlite3.connect(
        f"file:{quote(path)}?mode={mode}",
        uri=True,
        timeout=BUSY_SECONDS,
        isolation_level=None,
        check_same_thread=False,
    )
    connection.execute("PRAGMA query_only = ON")
    return connection


def _open_writer(path: str) -> sqlite3.Connection:
    with _said_plainly(path, "open"):
        connection = sqlite3.connect(path, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False)
    try:
        with _said_plainly(path, "open"):
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = NORMAL")
            if connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0] == 0:
                connection.executescript(_SCHEMA)
            _check_format(path, connection)
    except BaseException:
        connection.close()
        raise
    return connection


def _check_format(path: str, connection: sqlite3.Connection) -> None:
    found = connection.execute("PRAGMA user_version").fetchone()[0]
    tables = connection.execute("SELECT count(*) FROM sqlite_master WHERE name = 'records'").fetchone()[0]
    if found != FORMAT or tables != 1:
        raise EventLogError(f"{path} is no event log of this Perdure (format {found}, wanted {FORMAT})")


def _lock(path: str) -> int:
    """Take the lock beside `path`, without waiting. Not on the file itself: closing any descriptor of it would drop
    SQLite's own locks (sqlite.org/howtocorrupt.html, 2.2). The kernel frees it when its holder dies."""
    try:
        descriptor = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as exc:
        raise EventLogError(f"cannot open the event log {path}: {(exc.strerror or str(exc)).lower()}") from exc
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as exc:
        os.close(descriptor)
        raise EventLogError(f"the event log {path} has a writer already; end the control that runs this job") from exc
    return descriptor


@contextmanager
def _said_plainly(path: str, what: str) -> Iterator[None]:
    """Turns SQLite's errors into one sentence with the file and what to do."""
    try:
        yield
    except sqlite3.ProgrammingError as exc:
        raise EventLogError(f"cannot {what} the event log {path}: it is closed; open it again") from exc
    except sqlite3.Error as exc:
        raise EventLogError(f"cannot {what} the event log {path}: {exc}; {_advice(exc)}") from exc


def _advice(exc: sqlite3.Error) -> str:
    match getattr(exc, "sqlite_errorname", "").split("_")[1:2]:
        case ["FULL"]:
            return "free some space on its disk"
        case ["CORRUPT"] | ["NOTADB"]:
            return "the file is damaged: move it away"
        case ["BUSY"] | ["LOCKED"]:
            return "another program holds it"
        case ["CANTOPEN"] | ["READONLY"] | ["PERM"]:
            return "check its folder and permissions"
    return "check the disk"
