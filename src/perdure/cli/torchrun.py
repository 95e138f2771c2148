"""Turns the command line of `perdure run`, which is torchrun's (torch 2.13), into one `RunRequest`.

The rule for every flag: what torchrun does is done; what Perdure cannot do is refused with the reason; what torchrun
accepts and does not use either is accepted with a note. Nothing is started, bound or resolved here.
"""

import os
import re
import secrets
import signal
import sys
from collections.abc import Mapping, Sequence

from perdure.agent.config import OutputConfig
from perdure.cli.command_line import HelpRequested, Values, split
from perdure.cli.devices import count_cores, workers_per_node
from perdure.cli.flags import help_text
from perdure.cli.meeting import Shape, find_meeting, nodes_here, read_shape
from perdure.cli.program import read_fork_server, read_launch, read_start_method
from perdure.cli.rdzv_conf import RdzvConf, read_conf
from perdure.cli.request import RunRequest, TlsFiles
from perdure.cli.timeouts import WHOLE_JOB, check_timeouts
from perdure.errors import ConfigError
from perdure.vocab.ids import JobId
from perdure.vocab.job import JobSpec, RecoveryRules, StallRules
from perdure.wire.messages import Entry, Launch

__all__ = ["HelpRequested", "help_text", "parse"]

_POLL_SECONDS = 0.05
NODES_PER_CORE = 4
"""More nodes than that on one machine (--local-nodes) wait for a processor while they start: their lease is longer."""
_SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"
_NUMA_MODES = ("node", "socket", "exclusive", "core-complex")  # torch.numa.binding.AffinityMode, torch 2.13
_STD = re.compile(r"[0-3]")
_STD_BY_RANK = re.compile(r"\d+:[0-3](,\d+:[0-3])*")


def parse(argv: Sequence[str], environ: Mapping[str, str]) -> RunRequest:
    """What `perdure run ARGV` asks for on this machine.

    Raises ConfigError (exit code 2), one sentence; HelpRequested for -h and --help before the script. Looks at the
    file system (script, certificates), at the devices for --nproc-per-node auto and gpu, and at the host's name.
    """
    line = split(argv)
    values = Values(line.flags, environ)
    _refuse_foreign_parts(values)
    launch = read_launch(values, line.program, environ)
    shape = read_shape(values)
    conf = read_conf(values)
    meeting = find_meeting(values, shape, conf.is_host)
    nproc = values.text("nproc_per_node")
    workers = workers_per_node("1" if nproc is None else nproc, values.source("nproc_per_node"), environ)
    job_id = _job_id(values)
    job = _job(values, job_id or JobId(f"run-{secrets.token_hex(3)}"), shape, conf, workers, launch, environ)
    explain = values.switch("explain_timeouts")
    if not explain:
        check_timeouts(job)
    fork_server, preload = read_fork_server(values, launch)
    return RunRequest(
        job=job,
        id_is_made=job_id is None,
        nodes=nodes_here(values, shape, meeting.endpoint),
        endpoint=meeting.endpoint,
        owner=meeting.owner,
        launch=launch,
        python=environ.get("PYTHON_EXEC", sys.executable),
        output=_output(values, environ),
        env={"OMP_NUM_THREADS": "1"} if workers > 1 and "OMP_NUM_THREADS" not in environ else {},
        signals=_signals(values),
        fork_server=fork_server,
        preload=preload,
        poll_seconds=values.positive("monitor_interval") or _POLL_SECONDS,
        local_addr=values.text("local_addr"),
        domain=values.text("failure_domain"),
        master_addr=meeting.master_addr,
        master_port=meeting.master_port,
        virtual_local_rank=values.switch("virtual_local_rank"),
        numa_binding=values.choice("numa_binding", _NUMA_MODES),
        tls=_tls(values),
        json=values.switch("json"),
        explain=explain,
        notes=(*meeting.notes, *read_start_method(values, fork_server)),
    )


def _refuse_foreign_parts(values: Values) -> None:
    """torchrun lets other packages replace its event log and its log files; Perdure has its own of both."""
    handler = values.text("event_log_handler")
    if handler not in (None, "null"):
        raise ConfigError(
            f"{values.source('event_log_handler')} is {handler!r}, but Perdure keeps its own event log; "
            "leave it out and read the log by `perdure why`, or use --json"
        )
    specs = values.text("logs_specs")
    if specs not in (None, "default"):
        raise ConfigError(
            f"--logs-specs is {specs!r}, but Perdure writes the log files itself; "
            "leave it out and use --log-dir, --redirects and --tee"
        )


def _job_id(values: Values) -> JobId | None:
    """None where the user gave none ("none" is torchrun's default). An id is the name of a folder too."""
    text = values.text("rdzv_id")
    if text in (None, "", "none"):
        return None
    if text in (".", "..") or "/" in text or not text.isprintable() or len(text.encode()) > 100:
        raise values.wrong("rdzv_id", "up to 100 printable characters without /, since a folder is named by it")
    return JobId(text)


def _job(
    values: Values,
    job_id: JobId,
    shape: Shape,
    conf: RdzvConf,
    workers: int,
    launch: Launch,
    environ: Mapping[str, str],
) -> JobSpec:
    word = ("-m",) if launch.entry is Entry.MODULE else ()
    return JobSpec(
        id=job_id,
        command=(*word, launch.target, *launch.args),
        min_nodes=shape.low,
        max_nodes=shape.high,
        workers_per_node=workers,
        spares=shape.spares,
        role=values.text("role") or "default",
        rules=_rules(values, conf, environ, shape.here),
        stalls=StallRules(fixed=_nonzero_duration(values, "stall_limit")),
    )


def _rules(values: Values, conf: RdzvConf, environ: Mapping[str, str], here: int) -> RecoveryRules:
    usual = RecoveryRules()
    restarts = values.integer("max_restarts", 0)
    window = _nonzero_duration(values, "restart_window")
    if window is None:
        # --max-restarts means what it means in torchrun: a total.
        window = usual.restart_window if restarts is None else WHOLE_JOB
    hold, flush = values.duration("hold"), values.duration("flush_timeout")
    return RecoveryRules(
        max_restarts=usual.max_restarts if restarts is None else restarts,
        restart_window=window,
        hold=usual.hold if hold is None else hold,
        flush=usual.flush if flush is None else flush,
        lease=conf.lease or usual.lease * max(1.0, here / (NODES_PER_CORE * count_cores())),
        join_timeout=conf.join or usual.join_timeout,
        last_call=conf.last_call or usual.last_call,
        shutdown_timeout=_shutdown_timeout(values, environ),
    )


def _nonzero_duration(values: Values, dest: str) -> float | None:
    seconds = values.duration(dest)
    if seconds == 0:
        raise values.wrong(dest, "a duration above 0, as in 30s or 10m")
    return seconds


def _shutdown_timeout(values: Values, environ: Mapping[str, str]) -> float:
    given = values.integer("shutdown_timeout", 0)
    if given is not None:
        return float(given)
    text = environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT")
    if text is None:
        return RecoveryRules().shutdown_timeout
    if not text.strip().isdecimal():
        raise ConfigError(f"TORCH_ELASTIC_SHUTDOWN_TIMEOUT is {text!r}, but must be a whole number of at least 0")
    return float(text)


def _signals(values: Values) -> tuple[str, ...]:
    text = values.text("signals_to_handle")
    names = tuple(name.strip() for name in (_SIGNALS if text is None else text).split(","))
    for name in names:
        if name in ("SIGKILL", "SIGSTOP"):
            raise ConfigError(f"{values.source('signals_to_handle')} has {name}, which no program can handle; drop it")
        if name not in signal.Signals.__members__:
            raise values.wrong("signals_to_handle", f"names as in SIGTERM,SIGUSR1; {name!r} is no signal here")
    return names


def _output(values: Values, environ: Mapping[str, str]) -> OutputConfig:
    usual = OutputConfig(log_dir="")
    log_dir = values.text("log_dir")
    return OutputConfig(
        log_dir=os.path.abspath(log_dir) if log_dir else "",
        redirects=_streams(values, "redirects"),
        tee=_streams(values, "tee"),
        ranks_filter=_ranks(values),
        stdout_filters=_filters(values.text("duplicate_stdout_filters")),
        stderr_filters=_filters(values.text("duplicate_stderr_filters")),
        prefix=environ.get("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE", usual.prefix),
    )


def _streams(values: Values, dest: str) -> dict[int, int] | int:
    text = values.text(dest)
    if text is None:
        return 0
    if _STD.fullmatch(text):
        return int(text)
    if not _STD_BY_RANK.fullmatch(text):
        raise values.wrong(dest, "0 (nothing), 1 (stdout), 2 (stderr), 3 (both), or such by local rank as in 0:3,1:2")
    return {int(rank): int(std) for rank, _, std in (item.partition(":") for item in text.split(","))}


def _ranks(values: Values) -> tuple[int, ...] | None:
    text = values.text("local_ranks_filter")
    if not text:
        return None
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise values.wrong("local_ranks_filter", "local ranks with commas between them, as in 0,1,2")
    return tuple(sorted({int(part) for part in parts}))


def _filters(text: str | None) -> tuple[str, ...]:
    """Texts with commas between them; two commas are one in a text. Empty ones, which fit every line, are dropped."""
    items = (text or "").replace(",,", "\0").split(",")
    return tuple(item.replace("\0", ",") for item in items if item)


def _tls(values: Values) -> TlsFiles | None:
    paths = {dest: values.text(dest) for dest in ("tls_cert", "tls_key", "tls_ca")}
    for dest, path in paths.items():
        if path is not None and not (os.path.isfile(path) and os.access(path, os.R_OK)):
            raise values.wrong(dest, "a file that can be read")
    cert, key, ca = (None if path is None else os.path.abspath(path) for path in paths.values())
    if (cert is None) != (key is None):
        raise ConfigError("--tls-cert and --tls-key belong together: control needs both; give the missing one")
    accepted = ca or cert
    return None if accepted is None else TlsFiles(cert=cert, key=key, ca=accepted)
