"""Without `perdure run`: a memory server per node, started by local rank 0, and one desk, started by rank 0.

Both are detached and outlive the trainers, so that a script that is started again finds its checkpoints in memory.
What they need goes through memory files; what the other ranks need, through torch.distributed's default store.
"""

import contextlib
import hashlib
import json
import os
import secrets
import select
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from perdure.errors import ConfigError, HostError, WireError
from perdure.host.proc import boot_id, incarnation
from perdure.trainer.checkpoint.seat import Place
from perdure.vocab.ids import Incarnation, JobId
from perdure.vocab.units import Seconds, parse_duration

LINGER: Seconds = 900.0
"""How long memory is kept for a script that has died and may be started again; PERDURE_MEMORY_LINGER changes it."""
_STARTED_WITHIN: Seconds = 60.0
_KEY = "perdure/checkpoints"
_PATH_LIMIT = 100
"""A socket's path has 107 bytes (unix(7))."""


def meet(store: str, environ: Mapping[str, str]) -> Place:
    """This process's place; starts what is not there yet. Raises HostError, WireError."""
    rank, world_size = int(environ.get("RANK", "0")), int(environ.get("WORLD_SIZE", "1"))
    local_rank = int(environ.get("LOCAL_RANK", "0"))
    told = _desk_for_all(rank, world_size, store, environ)
    folder = _folder(told["job"], environ)
    door = os.path.join(folder, "door")
    if local_rank == 0 and not _answers(door):
        _start_server(told, folder, door, rank, environ)
    return Place(
        job=JobId(told["job"]),
        attempt=told["attempt"],
        generation=1,
        rank=rank,
        world_size=world_size,
        local_world_size=int(environ.get("LOCAL_WORLD_SIZE", str(world_size))),
        socket=door,
    )


def job_name(store: str, environ: Mapping[str, str], argv: Sequence[str]) -> JobId:
    """The same when the same command is given again in the same folder: so it finds what it left in memory."""
    script = os.path.abspath(argv[0]) if argv and argv[0] else "python"
    run = environ.get("TORCHELASTIC_RUN_ID", "")
    if run.count("-") == 4 and len(run) == 36:
        run = ""  # torchrun --standalone makes up another one each time
    what = json.dumps([script, list(argv[1:]), os.getcwd(), store, environ.get("WORLD_SIZE", "1"), run])
    digest = hashlib.blake2b(what.encode(), digest_size=6).hexdigest()
    stem = "".join(c if c.isalnum() or c in "-_" else "-" for c in Path(script).stem)[:24]
    return JobId(f"alone-{stem}-{digest}")


# --- the desk, and how all ranks learn of it -------------------------------------------------------------------------


def _desk_for_all(rank: int, world_size: int, store: str, environ: Mapping[str, str]) -> dict[str, Any]:
    """{job, attempt, address, token}: from rank 0, which starts the desk."""
    if world_size == 1:
        return _own_desk(store, environ, "127.0.0.1")
    shared = _store_of_torch()
    # Torchrun's store outlives its workers: a restarted one must not read what the life before has written.
    key = f"{_KEY}/{environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    if rank == 0:
        several_nodes = int(environ.get("LOCAL_WORLD_SIZE", str(world_size))) < world_size
        host = environ.get("MASTER_ADDR", "127.0.0.1") if several_nodes else "127.0.0.1"
        told = _own_desk(store, environ, host)
        shared.set(key, json.dumps(told))
        return told
    answer: dict[str, Any] = json.loads(shared.get(key))
    return answer


def _store_of_torch() -> Any:
    import torch.distributed as dist

    if not dist.is_initialized():
        raise HostError(
            "run.checkpoint needs torch.distributed.init_process_group first, where there are several ranks"
        )
    return dist.distributed_c10d._get_default_store()


def _own_desk(store: str, environ: Mapping[str, str], host: str) -> dict[str, Any]:
    job = job_name(store, environ, sys.argv)
    folder = _folder(job, environ)
    os.makedirs(folder, mode=0o700, exist_ok=True)
    config = {
        "job": job,
        "token": secrets.token_hex(32),
        "host": "127.0.0.1" if host == "127.0.0.1" else "",
        "advertise": host,
        "linger": _linger(environ),
        "file": os.path.join(os.path.dirname(folder), "desk.json"),
    }
    found = json.loads(_start("perdure.control.desk", config, _log(folder, "desk"), answers=True))
    return {"job": job, "attempt": int(time.time()), "address": found["address"], "token": found["token"]}


# --- the memory server -----------------------------------------------------------------------------------------------


def _start_server(told: Mapping[str, Any], folder: str, door: str, rank: int, environ: Mapping[str, str]) -> None:
    own = told["address"]["host"]
    config = {
        "job": told["job"],
        "attempt": told["attempt"],
        "node": _node(environ),
        "folder": folder,
        "socket": door,
        "control": told["address"],
        "token": told["token"],
        "address": "127.0.0.1" if own == "127.0.0.1" else _address_towards(own, told["address"]["port"]),
        "linger": _linger(environ),
        "owners": [_as_json(incarnation(os.getpid()))],
    }
    os.makedirs(folder, mode=0o700, exist_ok=True)
    log = _log(folder, "server")
    _start("perdure.agent.memory", config, log, answers=False)
    until = time.monotonic() + _STARTED_WITHIN
    while not _answers(door):
        if time.monotonic() > until:
            raise HostError(f"the memory server has not started within {_STARTED_WITHIN:g} s: {_last_line(log)}")
        time.sleep(0.02)


def _start(module: str, config: Mapping[str, Any], log: str, *, answers: bool) -> bytes:
    """Start a module of ours in a session of its own; gives its first line where it `answers`. Raises HostError."""
    told = os.memfd_create("perdure-config", os.MFD_CLOEXEC)
    reader, writer = os.pipe()
    try:
        os.write(told, json.dumps(config).encode())
        os.lseek(told, 0, os.SEEK_SET)
        with open(log, "ab", opener=_private) as errors:
            child = subprocess.Popen(
                [sys.executable, "-P", "-m", module, "--config-fd", str(told)],
                stdin=subprocess.DEVNULL,
                stdout=writer if answers else errors,
                stderr=errors,
                pass_fds=(told,),
                start_new_session=True,
                cwd="/",
                env=_environment(),
            )
        os.close(writer)
        writer = -1
        line = _first_line(reader) if answers else b""
    finally:
        for fd in (told, reader, *((writer,) if writer >= 0 else ())):
            os.close(fd)
    _leave_alone(child)
    if answers and not line.endswith(b"\n"):
        raise HostError(f"{module} has not started: {_last_line(log) or 'it said nothing'}")
    return line


def _environment() -> dict[str, str]:
    """As ours, with the folder from which this package was imported; nothing of the rank."""
    root = str(Path(__file__).resolve().parents[3])
    paths = [root, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    dropped = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS")
    kept = {key: value for key, value in os.environ.items() if key not in dropped}
    return {**kept, "PYTHONPATH": os.pathsep.join(paths)}


def _first_line(reader: int) -> bytes:
    line, until = b"", time.monotonic() + _STARTED_WITHIN
    poll = select.poll()
    poll.register(reader, select.POLLIN)
    while not line.endswith(b"\n") and poll.poll(max(0.0, until - time.monotonic()) * 1000):
        more = os.read(reader, 65536)
        if not more:
            break
        line += more
    return line


def _leave_alone(child: "subprocess.Popen[bytes]") -> None:
    """It outlives us on purpose; Python would warn of it, and nobody may wait for it."""
    child.returncode = 0


def _answers(door: str) -> bool:
    """Whether a server listens there."""
    with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)) as link:
        try:
            link.settimeout(1.0)
            link.connect(door)
        except OSError:
            return False
    return True


def _folder(job: str, environ: Mapping[str, str]) -> str:
    path = f"/dev/shm/perdure-{os.getuid()}/{job}/{_node(environ)}"
    if len(path) > _PATH_LIMIT:
        raise WireError(f"the path {path} is too long for a socket; use a shorter host name")
    return path


def _node(environ: Mapping[str, str]) -> str:
    """By default the host: torchrun has one agent on each."""
    return (
        environ.get("PERDURE_NODE") or f"{socket.gethostname().partition('.')[0][:24]}-{environ.get('GROUP_RANK', '0')}"
    )


def _linger(environ: Mapping[str, str]) -> Seconds:
    text = environ.get("PERDURE_MEMORY_LINGER", "")
    try:
        return parse_duration(text) if text else LINGER
    except ConfigError as problem:
        raise ConfigError(f"PERDURE_MEMORY_LINGER: {problem}") from None


def _address_towards(host: str, port: int) -> str:
    """Of the interface by which `host` is reached."""
    with contextlib.closing(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as probe:
        probe.connect((host, port))
        return str(probe.getsockname()[0])


def _as_json(process: Incarnation) -> dict[str, Any]:
    return {"pid": process.pid, "started_ticks": process.started_ticks, "boot_id": process.boot_id or boot_id()}


def _log(folder: str, name: str) -> str:
    return os.path.join(os.path.dirname(folder), f"{name}.log")


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)


def _last_line(log: str) -> str:
    try:
        lines = Path(log).read_text(errors="replace").strip().splitlines()
    except OSError:
        return ""
    return lines[-1] if lines else ""
