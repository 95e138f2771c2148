"""The command `perdure`: verbs to functions, errors to one sentence and an exit code."""

import os
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version
from typing import Annotated

import anyio
import typer

from perdure.cli import run as run_verbs
from perdure.cli.goodput import render_goodput
from perdure.cli.home import Home, JobDir, find_home, read_control, resolve_token
from perdure.cli.jobs import render_jobs, summarize
from perdure.cli.why import render_why
from perdure.errors import ConfigError, PerdureError, WireError
from perdure.goodput.ledger import account
from perdure.host.proc import incarnation
from perdure.ports import LogRecord
from perdure.store.eventlog import open_reader
from perdure.vocab.event import JobEnded
from perdure.vocab.generation import Address
from perdure.vocab.ids import JobId
from perdure.wire.channel import Channel, client_tls
from perdure.wire.messages import Records

EXIT_FAILED, EXIT_USAGE = 1, 2
OWN_PARSERS = {"run": run_verbs.run, "control": run_verbs.control}
"""Verbs whose words are torchrun's, which typer does not understand."""

READERS = ("jobs", "why", "goodput")

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Keeps large-model training running.",
)


def version() -> str:
    """Of Perdure, as installed."""
    try:
        return installed_version("perdure")
    except PackageNotFoundError:
        return "0.0.0+source"


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point of the command; exits with Perdure's exit codes (docs/guides/exit-codes.md)."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        if words and words[0] in OWN_PARSERS:
            sys.exit(OWN_PARSERS[words[0]](words[1:], version()))
        if not words or words[0] not in READERS:
            _add_rare_verbs()
        app(words)
    except PerdureError as problem:
        print(f"perdure: {problem}", file=sys.stderr)
        sys.exit(EXIT_USAGE if isinstance(problem, ConfigError) else EXIT_FAILED)
    except OSError as problem:
        where = f" {problem.filename}" if problem.filename else ""
        print(f"perdure: cannot use{where}: {(problem.strerror or str(problem)).lower()}", file=sys.stderr)
        sys.exit(EXIT_FAILED)
    except KeyboardInterrupt:
        sys.exit(130)


def _add_rare_verbs() -> None:
    """Imports of the simulator and of storage are not paid by who starts a job or reads about one."""
    from perdure.cli.checkpoint import app as checkpoint_app
    from perdure.cli.sim import app as sim_app

    app.add_typer(checkpoint_app, name="checkpoint")
    app.add_typer(sim_app, name="sim")


@app.command("run", help="Run a training script: torchrun's words, and more. See `perdure run --help`.")
def _run() -> None:
    raise AssertionError("main() takes this verb")


@app.command("control", help="Run control of a job alone on this host; the same words as `perdure run`.")
def _control() -> None:
    raise AssertionError("main() takes this verb")


Job = Annotated[str | None, typer.Argument(help="Job id; default: the one that was started last.")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON document.")]
Endpoint = Annotated[
    str | None, typer.Option(help="HOST:PORT of the job's control, when its log is not on this machine.")
]
TlsCa = Annotated[str | None, typer.Option(help="With --endpoint: certificate to accept from control.")]


@app.command("jobs")
def jobs(json: AsJson = False) -> None:
    """List the jobs of this machine."""
    summaries = []
    for folder in find_home(os.environ).list_jobs():
        records = _read_log(folder)
        if records:
            summaries.append(summarize(folder.id, records, control_alive=_is_control_alive(folder)))
    _show(render_jobs(summaries, json))


@app.command("why")
def why(job: Job = None, json: AsJson = False, endpoint: Endpoint = None, tls_ca: TlsCa = None) -> None:
    """What happened to a job and why it did what it did, as a chain in plain words."""
    records, _ = _records(job, endpoint, tls_ca)
    _show(render_why(records, json))


@app.command("goodput")
def goodput(job: Job = None, json: AsJson = False, endpoint: Endpoint = None, tls_ca: TlsCa = None) -> None:
    """Where the time of a job went, in node-seconds by phase."""
    records, now = _records(job, endpoint, tls_ca)
    _show(render_goodput(account(records, now), json))


def _show(text: str) -> None:
    print(text.rstrip("\n"))


def _records(job: str | None, endpoint: str | None, tls_ca: str | None) -> tuple[list[LogRecord], float | None]:
    """The records of a job, and control's clock while it runs."""
    home = find_home(os.environ)
    folder = _find_job(home, job) if endpoint is None else None
    if folder is not None:
        control = read_control(folder) if _is_control_alive(folder) else None
        if control is None:
            return _read_log(folder), None
        token = resolve_token(home, folder, os.environ, local=folder.token.exists())
        return anyio.run(_fetch, control.address, token, control.tls)
    if endpoint is None:
        raise ConfigError(
            f"there is no job {job or ''} in {home.root}; see `perdure jobs`, or give --endpoint HOST:PORT"
        )
    host, _, port = endpoint.rpartition(":")
    if not host or not port.isdigit():
        raise ConfigError(f"--endpoint {endpoint} is not HOST:PORT")
    token = resolve_token(home, home.job_dir(JobId(job or ""), create=False), os.environ, local=False)
    return anyio.run(_fetch, Address(host.strip("[]"), int(port)), token, tls_ca)


def _find_job(home: Home, job: str | None) -> JobDir | None:
    if job is None:
        return home.newest()
    found = home.job_dir(JobId(job), create=False)
    return found if found.path.is_dir() else None


def _is_control_alive(folder: JobDir) -> bool:
    try:
        published = read_control(folder)
        return published is not None and incarnation(published.pid) == published.incarnation
    except PerdureError:
        return False


def _read_log(folder: JobDir) -> list[LogRecord]:
    if not folder.events.exists():
        return []
    reader = open_reader(str(folder.events))
    try:
        return [record for _, record in reader.read()]
    finally:
        reader.close()


async def _fetch(address: Address, token: str, ca: str | None) -> tuple[list[LogRecord], float | None]:
    channel = Channel(address, token, client_tls(ca) if ca is not None else None)
    records: list[LogRecord] = []
    try:
        while True:
            found = await channel.call("GET", f"/v1/records?after={len(records)}", None, Records)
            records.extend(found.records)
            if not found.records:
                ended = records and isinstance(records[-1], JobEnded)
                return records, None if ended else found.now
    except WireError as problem:
        raise WireError(f"control does not tell: {problem}") from None
    finally:
        await channel.aclose()


if __name__ == "__main__":
    main()
