"""`perdure run` and `perdure control`: the command line understood, the machine looked at, the launcher started."""

import os
import socket
import sys
from collections.abc import Sequence
from contextlib import ExitStack

import anyio
import msgspec

from perdure.cli.control import run_control
from perdure.cli.home import Home, JobDir, find_home, hold_lock, resolve_token
from perdure.cli.launcher import Launcher, find_job
from perdure.cli.program import check_log_dir, show_syntax_error
from perdure.cli.programs import ControlStart, one_problem
from perdure.cli.request import RunRequest
from perdure.cli.timeouts import check_timeouts, explain_timeouts
from perdure.cli.torchrun import HelpRequested, help_text, parse
from perdure.errors import ConfigError, HostError
from perdure.store.eventlog import open_reader
from perdure.vocab.event import JobEnded
from perdure.vocab.generation import Address
from perdure.vocab.ids import JobId
from perdure.vocab.units import show_duration
from perdure.wire.tokens import parse_token

LOOPBACK = "127.0.0.1"


def run(argv: Sequence[str], version: str) -> int:
    """`perdure run ARGV`; gives the exit code."""
    request = _understand(argv)
    if request is None:
        return 0
    if show_syntax_error(request.launch):
        return 1
    check_log_dir(request.output.log_dir)
    home = find_home(os.environ)
    local_addresses = _local_addresses(request.endpoint)
    owner = request.runs_control(local_addresses)
    local = request.is_local(local_addresses)
    with ExitStack() as stack:
        if owner and request.endpoint is not None and _is_served(request, home, local=local):
            owner = False
        if not owner:
            request = _with_id_of_control(request, home)
        job = home.job_dir(request.job.id)
        if owner:
            stack.enter_context(hold_lock(job))
            finished = _put_away_old_log(job)
            if finished is not None:
                print(f"perdure: {finished}", file=sys.stderr)
                return 0
        token = resolve_token(home, job, os.environ, local=local)
        bind = _bind_address(request.endpoint) if owner else None
        launcher = Launcher(
            request,
            job,
            _child_environ(),
            token=token,
            version=version,
            bind=bind,
            address=request.local_addr or _address_towards(request.endpoint, local=local),
        )
        with one_problem():
            return anyio.run(launcher.run)


def control(argv: Sequence[str], version: str) -> int:
    """`perdure control ARGV`: the same words as `perdure run`, but only control runs here, until the job is over."""
    request = _understand(argv)
    if request is None:
        return 0
    if request.endpoint is None:
        raise ConfigError("perdure control needs --rdzv-endpoint HOST:PORT, at which the nodes will find it")
    home = find_home(os.environ)
    job = home.job_dir(request.job.id)
    # No node starts here, so only a loopback endpoint keeps the job on this machine.
    alone = msgspec.structs.replace(request, nodes=())
    token = resolve_token(home, job, os.environ, local=alone.is_local(_local_addresses(request.endpoint)))
    bind = _bind_address(request.endpoint)
    start = ControlStart(
        spec=request.job,
        job_dir=str(job.path),
        host=bind.host,
        port=bind.port,
        token=token,
        version=version,
        tls=request.tls,
        until_idle=True,
    )
    with hold_lock(job):
        _put_away_old_log(job)
        with one_problem():
            code = anyio.run(run_control, start)
        ended = _end_of(job)
    return ended.exit_code if ended is not None else code or 3


def _understand(argv: Sequence[str]) -> RunRequest | None:
    try:
        request = parse(argv, os.environ)
    except HelpRequested:
        print(help_text(), end="")
        return None
    for note in request.notes:
        print(f"perdure: {note}", file=sys.stderr)
    if request.explain:
        print(explain_timeouts(request.job))
        check_timeouts(request.job)
        return None
    return request


def _child_environ() -> dict[str, str]:
    environ = dict(os.environ)
    environ.pop("PERDURE_TOKEN", None)
    return environ


# --- whose control ---------------------------------------------------------------------------------------------------


def _local_addresses(endpoint: Address | None) -> frozenset[str]:
    """The names by which this machine may be meant. An address is ours if a socket can be bound to it."""
    names = {"localhost", socket.gethostname(), socket.getfqdn()}
    if endpoint is not None and _can_bind(endpoint.host):
        names.add(endpoint.host)
    return frozenset(names)


def _can_bind(host: str) -> bool:
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except OSError:
        return False
    for family, kind, protocol, _, address in found:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.bind(address)
            return True
        except OSError:
            continue
    return False


def _is_served(request: RunRequest, home: Home, *, local: bool) -> bool:
    """Whether a control of this job already answers at the endpoint: then this launcher only brings nodes."""
    endpoint = request.endpoint
    assert endpoint is not None
    with socket.socket(socket.AF_INET6 if ":" in endpoint.host else socket.AF_INET) as probe:
        probe.settimeout(1.0)
        if probe.connect_ex((endpoint.host, endpoint.port)) != 0:
            return False
    token = _known_token(request, home, local=local)
    if token is None:
        return False
    try:
        pong = anyio.run(find_job, endpoint, token, request.tls.ca if request.tls else None, 1.0)
    except ConfigError:
        return False  # someone else's; that the port is taken will be said
    return pong is not None and (request.id_is_made or pong.job == request.job.id)


def _known_token(request: RunRequest, home: Home, *, local: bool) -> str | None:
    """The token that control would have, without making one; None: there is none."""
    job = home.job_dir(request.job.id, create=False)
    try:
        if local and job.token.exists():
            return resolve_token(home, job, os.environ, local=True)
        if "PERDURE_TOKEN" in os.environ:
            return parse_token(os.environ["PERDURE_TOKEN"])
        return resolve_token(home, job, os.environ, local=False)
    except ConfigError:
        return None


def _with_id_of_control(request: RunRequest, home: Home) -> RunRequest:
    """Without --rdzv-id the job has the name that the machine with control has given it."""
    if not request.id_is_made:
        return request
    assert request.endpoint is not None
    token = resolve_token(home, home.job_dir(request.job.id, create=False), os.environ, local=False)
    ca = request.tls.ca if request.tls else None
    pong = anyio.run(find_job, request.endpoint, token, ca, request.job.rules.join_timeout)
    if pong is None:
        raise HostError(
            f"no control answers at {request.endpoint} within {show_duration(request.job.rules.join_timeout)}"
            " (--rdzv-conf join_timeout); start `perdure run` or `perdure control` there"
        )
    return msgspec.structs.replace(request, job=msgspec.structs.replace(request.job, id=JobId(pong.job)))


def _bind_address(endpoint: Address | None) -> Address:
    return Address(LOOPBACK, 0) if endpoint is None else endpoint


def _address_towards(endpoint: Address | None, *, local: bool) -> str:
    """The address of this machine's interface that faces the endpoint: other nodes reach us there."""
    if endpoint is None or local:
        return LOOPBACK if endpoint is None else endpoint.host
    try:
        family, kind, _, _, address = socket.getaddrinfo(endpoint.host, endpoint.port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)  # UDP: nothing is sent
            return str(probe.getsockname()[0])
    except OSError as problem:
        raise HostError(
            f"cannot reach {endpoint.host} ({problem}); check --rdzv-endpoint, or give this machine's --local-addr"
        ) from None


# --- a job of the same name ------------------------------------------------------------------------------------------


def _end_of(job: JobDir) -> JobEnded | None:
    if not job.events.exists():
        return None
    reader = open_reader(str(job.events))
    try:
        ends = [record for _, record in reader.read() if isinstance(record, JobEnded)]
    finally:
        reader.close()
    return ends[-1] if ends else None


def _put_away_old_log(job: JobDir) -> str | None:
    """A job that finished stays finished (the sentence that says so); one that failed begins anew, its log is kept."""
    ended = _end_of(job)
    if ended is None:
        return None
    if ended.exit_code == 0:
        advice = f"give a new job another --rdzv-id, or remove {job.path}"
        return f"job {job.id} has finished already ({ended.reason}); {advice}"
    number = 1
    while (kept := job.path / f"events-{number}.db").exists():
        number += 1
    for suffix in ("-wal", "-shm", ""):
        old = job.path / f"events.db{suffix}"
        if old.exists():
            os.replace(old, f"{kept}{suffix}")
    return None
