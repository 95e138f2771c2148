"""`python -m perdure.cli.control`: one job's control, started by the launcher or by `perdure control`."""

import importlib.resources
import os
import signal
import sys
from pathlib import Path

import anyio

from perdure.cli.home import ControlFile, JobDir, publish_control, withdraw_control
from perdure.cli.programs import ControlStart, forget_token, one_problem, read_start
from perdure.control.loop import Control
from perdure.errors import ConfigError, HostError, PerdureError
from perdure.host.clock import SteadyClock
from perdure.host.proc import incarnation
from perdure.playbook.parse import Catalogue, parse_catalogue
from perdure.ports import LogRecord
from perdure.store.eventlog import SqliteEventLog
from perdure.wire.channel import listen, serve, server_tls

EXIT_PORT_TAKEN = 4


def load_catalogue() -> Catalogue:
    """The catalogue that is shipped with Perdure."""
    folder = importlib.resources.files("perdure.playbook") / "catalogue"
    return parse_catalogue(file.read_text("utf-8") for file in folder.iterdir() if file.name.endswith(".toml"))


def main() -> int:
    try:
        start = read_start(sys.argv[1:], ControlStart)
        forget_token()
        with one_problem():
            return anyio.run(run_control, start)
    except PerdureError as problem:
        print(f"perdure: {problem}", file=sys.stderr, flush=True)
        if isinstance(problem, HostError):
            return EXIT_PORT_TAKEN
        return 2 if isinstance(problem, ConfigError) else 1


async def run_control(start: ControlStart) -> int:
    """Serve one job until SIGTERM, or until it is over and `until_idle` was asked for."""
    tls = start.tls
    context = server_tls(tls.cert, tls.key) if tls is not None and tls.cert and tls.key else None
    listener = await listen(start.host, start.port, context)
    job = JobDir(Path(start.job_dir))
    log = SqliteEventLog(str(job.events))
    me = incarnation(os.getpid())
    try:
        clock = SteadyClock(not_before=max((_time_of(record) for _, record in log.read()), default=0.0))
        catalogue = load_catalogue()
        control = Control(start.spec, log, clock, catalogue, version=start.version, incarnation=me, warn=_warn)
        async with anyio.create_task_group() as group:
            group.start_soon(lambda: serve(control.handle, listener, token=start.token, on_denied=_denied))
            group.start_soon(_end_on_signal, group.cancel_scope)
            group.start_soon(control.memory.run)
            ca = tls.ca if tls is not None and context is not None else None
            publish_control(job, ControlFile(address=listener.address, pid=me.pid, incarnation=me, tls=ca))
            if start.until_idle:
                print(f"perdure: control of job {job.id} at {listener.address}, state in {job.path}", file=sys.stderr)
            await control.run(until_idle=start.until_idle)
            group.cancel_scope.cancel()
    finally:
        log.close()
        withdraw_control(job)
    return 0


def _time_of(record: LogRecord) -> float:
    return record.at


def _denied(peer: str) -> None:
    _warn(f"control refused a request of {peer}: wrong or no token")


def _warn(text: str) -> None:
    print(f"perdure: {text}", file=sys.stderr, flush=True)


async def _end_on_signal(scope: anyio.CancelScope) -> None:
    with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        async for _ in signals:
            scope.cancel()
            return


if __name__ == "__main__":
    sys.exit(main())
