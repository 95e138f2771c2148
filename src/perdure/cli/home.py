"""`$PERDURE_HOME`: the folder of each job, who runs it, where its control listens, and the token for it.

It does not know what the event log or the workers' logs hold.
"""

import fcntl
import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import msgspec

from perdure.errors import ConfigError, HostError
from perdure.vocab.generation import Address
from perdure.vocab.ids import Incarnation, JobId
from perdure.wire.tokens import make_token, parse_token, read_token, write_token


class ControlFile(msgspec.Struct, frozen=True, kw_only=True):
    """Where control of a job listens, and which process it is."""

    address: Address
    pid: int
    incarnation: Incarnation
    tls: str | None = None
    """Certificate (file) to accept from it; None: plain HTTP."""


class Holder(msgspec.Struct, frozen=True):
    """Who holds a job's lock."""

    pid: int
    host: str


class JobDir(msgspec.Struct, frozen=True):
    """The folder of one job."""

    path: Path

    @property
    def id(self) -> JobId:
        return JobId(self.path.name)

    @property
    def events(self) -> Path:
        return self.path / "events.db"

    @property
    def control(self) -> Path:
        return self.path / "control"

    @property
    def token(self) -> Path:
        return self.path / "token"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def lock(self) -> Path:
        return self.path / "lock"


class Home(msgspec.Struct, frozen=True):
    """The state folder, of this machine or shared by several."""

    root: Path

    def job_dir(self, job: JobId, *, create: bool = True) -> JobDir:
        """The folder of `job`, made (mode 0700) where it is missing unless `create` is False."""
        found = JobDir(self.root / "jobs" / job)
        if create:
            try:
                found.path.mkdir(mode=0o700, parents=True, exist_ok=True)
                found.logs.mkdir(mode=0o700, exist_ok=True)
            except OSError as error:
                raise ConfigError(
                    f"the folder {found.path} cannot be made ({_reason(error)}); "
                    "set PERDURE_HOME to a folder that you can write to"
                ) from error
        return found

    def list_jobs(self) -> tuple[JobDir, ...]:
        """All jobs, the one that was started last first."""
        try:
            found = [JobDir(Path(entry.path)) for entry in os.scandir(self.root / "jobs") if entry.is_dir()]
        except FileNotFoundError:
            return ()
        except OSError as error:
            raise ConfigError(f"the folder {self.root / 'jobs'} cannot be read: {_reason(error)}") from error
        return tuple(sorted(found, key=_started_at, reverse=True))

    def newest(self) -> JobDir | None:
        return next(iter(self.list_jobs()), None)


def find_home(environ: Mapping[str, str]) -> Home:
    """$PERDURE_HOME, else the XDG state folder's perdure. Makes nothing."""
    given = environ.get("PERDURE_HOME")
    if given:
        return Home(Path(os.path.abspath(os.path.expanduser(given))))
    state = environ.get("XDG_STATE_HOME", "")
    if os.path.isabs(state):  # the XDG specification has relative ones ignored
        return Home(Path(state) / "perdure")
    return Home(Path(environ.get("HOME") or os.path.expanduser("~")) / ".local" / "state" / "perdure")


def _started_at(job: JobDir) -> float:
    # The lock is written at each start only; the folder's own time changes when a reader opens the event log.
    for path in (job.lock, job.path):
        try:
            return path.stat().st_mtime
        except OSError:
            continue
    return 0.0


# --- where control is ------------------------------------------------------------------------------------------------


def publish_control(job: JobDir, control: ControlFile) -> None:
    """Put `control` in place of what was published before, whole or not at all. Raises HostError."""
    new = job.path / f"control.{os.getpid()}.new"
    try:
        descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with open(descriptor, "wb") as file:
            file.write(msgspec.json.encode(control))
        os.replace(new, job.control)
    except OSError as error:
        raise HostError(f"cannot write {job.control}: {_reason(error)}; free space or permissions there") from error


def read_control(job: JobDir) -> ControlFile | None:
    """What was published last; None: nothing. That control may have died since. Raises HostError for a damaged file."""
    try:
        return msgspec.json.decode(job.control.read_bytes(), type=ControlFile)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise HostError(f"cannot read {job.control}: {_reason(error)}") from error
    except msgspec.DecodeError as error:
        raise HostError(f"{job.control} is damaged ({error}); remove it, a running control writes it again") from error


def withdraw_control(job: JobDir) -> None:
    """Control has ended and is not coming back."""
    job.control.unlink(missing_ok=True)


# --- one launcher per job --------------------------------------------------------------------------------------------


@contextmanager
def hold_lock(job: JobDir) -> Iterator[None]:
    """Be the only one who runs control of `job`. Raises ConfigError, with the holder, where someone else does.

    The kernel gives the lock up when the holder ends, however it ends. Children do not inherit it (close on exec).
    """
    try:
        descriptor = os.open(job.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(f"cannot open {job.lock}: {_reason(error)}; set PERDURE_HOME to a folder of yours") from error
    with open(descriptor, "r+b", buffering=0) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise _held_by(job, file.read()) from None
        except OSError as error:
            raise HostError(f"cannot lock {job.lock}: {_reason(error)}; put PERDURE_HOME on a local disk") from error
        file.truncate(0)
        file.write(msgspec.json.encode(Holder(os.getpid(), socket.gethostname())))
        yield


def _held_by(job: JobDir, text: bytes) -> ConfigError:
    try:
        holder = msgspec.json.decode(text, type=Holder)
        who = f"process {holder.pid} on {holder.host}"
    except msgspec.DecodeError:  # the holder has the lock and has not written yet
        who = "another process"
    return ConfigError(f"job {job.id} is run by {who} already; give this one another --rdzv-id, or end that one first")


# --- the token -------------------------------------------------------------------------------------------------------

_EXPORT = "export PERDURE_TOKEN=$(python -c 'import secrets; print(secrets.token_hex(32))')"


def resolve_token(home: Home, job: JobDir, environ: Mapping[str, str], *, local: bool) -> str:
    """The token of `job`.

    `local`: made here in the job's folder (0600) at the first start, and read by whoever starts later. Else what all
    machines were given: PERDURE_TOKEN, or a 0600 file `token` in the job's folder or in `home`, if that is shared.
    Raises ConfigError with the command that helps.
    """
    if local:
        if not job.token.exists():
            write_token(str(job.token), make_token())
        return read_token(str(job.token))
    if "PERDURE_TOKEN" in environ:
        try:
            return parse_token(environ["PERDURE_TOKEN"])
        except ConfigError as error:
            raise ConfigError(f"PERDURE_TOKEN: {error}") from None
    for path in (job.token, home.root / "token"):
        if path.exists():
            return read_token(str(path))
    raise ConfigError(
        f"job {job.id} runs on several machines, which need one token; "
        f"run {_EXPORT} once and set PERDURE_TOKEN to the same value on all machines"
    )


def _reason(error: OSError) -> str:
    return (error.strerror or str(error)).lower()
