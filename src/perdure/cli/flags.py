"""The flags of `perdure run` as data, and the help made from them: names, spellings, PET_ variables, defaults in words.

It knows what may be written, not what it means: `torchrun.py` gives the values their meaning.
"""

import argparse
from enum import StrEnum

import msgspec


class Group(StrEnum):
    """Headings of the help."""

    SHAPE = "nodes and workers (torchrun's flags)"
    MEETING = "where nodes meet (torchrun's flags)"
    PROGRAM = "the program (torchrun's flags)"
    LIFE = "restarts and ends (torchrun's flags)"
    OUTPUT = "output (torchrun's flags)"
    ADDED = "added by Perdure"


class Flag(msgspec.Struct, frozen=True):
    """One flag. Every one may be written with dashes and with underscores, as in torchrun."""

    name: str
    """Long spelling with dashes, as in `--max-restarts`."""
    metavar: str
    """Name of its value; empty: a switch."""
    group: Group
    default: str
    """For the reader; empty: none or off."""
    help: str
    short: str = ""
    pet: bool = True
    """torchrun reads PET_<NAME> for it. Not so for --logs-specs, --numa-binding and Perdure's own."""

    @property
    def dest(self) -> str:
        return self.name.removeprefix("--").replace("-", "_")

    @property
    def variable(self) -> str | None:
        return f"PET_{self.dest.upper()}" if self.pet else None

    @property
    def is_switch(self) -> bool:
        return not self.metavar

    @property
    def is_added(self) -> bool:
        return self.group is Group.ADDED


def _added(name: str, metavar: str, default: str, text: str) -> Flag:
    return Flag(name, metavar, Group.ADDED, default, text, pet=False)


FLAGS: tuple[Flag, ...] = (
    Flag("--nnodes", "N|MIN:MAX", Group.SHAPE, "1", "Nodes that do the work: a number, or the fewest and the most."),
    Flag(
        "--nproc-per-node", "N|auto|gpu|cpu", Group.SHAPE, "1",
        "Workers on each node; gpu: one per GPU, cpu: one per core, auto: gpu where there are GPUs, else cpu.",
    ),
    Flag("--node-rank", "N", Group.SHAPE, "in order of arrival", "Place of this machine among the nodes, from 0."),
    Flag("--role", "NAME", Group.SHAPE, "default", "Name of the workers' role, shown before their lines."),
    Flag(
        "--local-addr", "ADDRESS", Group.MEETING, "found by itself", "Address at which other nodes reach this machine."
    ),
    Flag(
        "--standalone", "", Group.MEETING, "", "Everything runs on this machine; no endpoint is used."
    ),
    Flag(
        "--rdzv-backend", "static|c10d", Group.MEETING, "static",
        "static: the machine with --node-rank 0 runs control; c10d: the machine that owns the endpoint does.",
    ),
    Flag("--rdzv-endpoint", "HOST[:PORT]", Group.MEETING, "this machine only", "Where control listens for all nodes."),
    Flag("--rdzv-id", "ID", Group.MEETING, "a new one, as in run-7f3a2c", "Name of the job."),
    Flag(
        "--rdzv-conf", "KEY=VALUE,...", Group.MEETING, "",
        "Waiting times in seconds: join_timeout, timeout, read_timeout, last_call_timeout, keep_alive_interval, "
        "keep_alive_max_attempt (their product is the lease); is_host=true|false says whether control runs here.",
    ),
    Flag(
        "--master-addr", "ADDRESS", Group.MEETING, "127.0.0.1",
        "Host of the endpoint for static without --rdzv-endpoint; on one machine: MASTER_ADDR of the workers.",
    ),
    Flag(
        "--master-port", "PORT", Group.MEETING, "29500, on one machine any free one",
        "Port of the endpoint for static without --rdzv-endpoint; on one machine: MASTER_PORT of the workers.",
    ),
    Flag("--module", "", Group.PROGRAM, "", "The script is a module name, run as by `python -m`.", short="-m"),
    Flag("--no-python", "", Group.PROGRAM, "", "The script is a program, executed as it is."),
    Flag("--run-path", "", Group.PROGRAM, "", "Run the script by runpy.run_path; it must be an absolute path."),
    Flag(
        "--start-method", "METHOD", Group.PROGRAM, "spawn",
        "spawn, fork or forkserver; without effect on scripts, as in torchrun. See --no-fork-server.",
    ),
    Flag("--virtual-local-rank", "", Group.PROGRAM, "", "Each worker sees LOCAL_RANK=0 and only its own GPU."),
    Flag(
        "--numa-binding", "MODE", Group.PROGRAM, "",
        "Bind workers to the CPUs near their GPUs: node, socket, exclusive or core-complex.", pet=False,
    ),
    Flag(
        "--max-restarts", "N", Group.LIFE, "3 in an hour",
        "Restarts that workers may cause in the whole job; lost nodes do not count.",
    ),
    Flag(
        "--monitor-interval", "SECONDS", Group.LIFE, "0.05",
        "How often heartbeats and process states are read. The exit of a worker is seen at once in any case.",
    ),
    Flag(
        "--signals-to-handle", "SIG,...", Group.LIFE, "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
        "Signals to the launcher that are passed on and end the job.",
    ),
    Flag(
        "--shutdown-timeout", "SECONDS", Group.LIFE, "TORCH_ELASTIC_SHUTDOWN_TIMEOUT, else 30",
        "Time to save and end after such a signal, before SIGKILL.",
    ),
    Flag("--event-log-handler", "NAME", Group.LIFE, "null", "Only null: Perdure keeps its own event log."),
    Flag("--log-dir", "DIR", Group.OUTPUT, "in the job's folder", "Base folder of log files, in torchrun's layout."),
    Flag("--redirects", "STD", Group.OUTPUT, "0", "Streams that go to log files instead of here.", short="-r"),
    Flag("--tee", "STD", Group.OUTPUT, "0", "Streams that go to log files and here.", short="-t"),
    Flag("--local-ranks-filter", "RANK,...", Group.OUTPUT, "all", "Local ranks whose output is shown here."),
    Flag(
        "--duplicate-stdout-filters", "TEXT,...", Group.OUTPUT, "",
        "Lines of stdout with one of these texts go to filtered_stdout.log too (,, is a comma).",
    ),
    Flag(
        "--duplicate-stderr-filters", "TEXT,...", Group.OUTPUT, "",
        "Lines of stderr with one of these texts go to filtered_stderr.log too (,, is a comma).",
    ),
    Flag("--logs-specs", "NAME", Group.OUTPUT, "default", "Only default: Perdure writes the logs itself.", pet=False),
    _added("--spares", "N", "0", "Nodes beyond --nnodes that stand by, warm, to take the place of a lost one."),
    _added("--local-nodes", "N", "1", "Nodes to start on this machine; without --nnodes all but the spares work."),
    _added("--preload", "MODULE,...", "", "Modules that the fork server imports besides those at the script's top."),
    _added("--no-fork-server", "", "", "Start every worker as a fresh interpreter: slower, and always possible."),
    _added(
        "--stall-limit", "DURATION", "learned from the steps",
        "A worker without progress for so long is ended, whatever it does.",
    ),
    _added("--restart-window", "DURATION", "1h; the whole job with --max-restarts", "Time in which restarts count."),
    _added("--hold", "DURATION", "30m", "How long to wait for a node when there are too few."),
    _added(
        "--flush-timeout", "DURATION", "1m",
        "How long a job that ends waits for its newest checkpoint in memory to reach storage.",
    ),
    _added(
        "--failure-domain", "LABEL", "the node by itself",
        "Rack, switch or power feed of this machine: copies of checkpoints go to another one.",
    ),
    _added("--explain-timeouts", "", "", "Print the time limits that hold for this command line, and end."),
    _added("--json", "", "", "Print events as JSON lines, for programs."),
    _added("--tls-cert", "FILE", "", "Certificate that control shows; with --tls-key."),
    _added("--tls-key", "FILE", "", "Private key of that certificate."),
    _added("--tls-ca", "FILE", "--tls-cert", "Certificate, or authority, that nodes accept from control."),
)  # fmt: skip
"""All flags. Order is the help's order."""

BY_DEST = {flag.dest: flag for flag in FLAGS}

_USAGE = "perdure run [flags] script [the script's own arguments]"

_INTRO = """\
Run a training script on one or several machines and keep it running. Takes torchrun's flags and PET_ variables:
replace the word torchrun. A flag that cannot be honoured is refused with the reason."""

_VALUES = """\
values:
  DURATION       seconds, or units: 90, 30s, 10m, 1h30m
  HOST[:PORT]    a name or address; port 29400 (static: 29500) where none is given; IPv6 in brackets
  STD            0 nothing, 1 stdout, 2 stderr, 3 both; or by local rank: 0:3,1:2

examples:
  perdure run --nproc-per-node 4 train.py --lr 3e-4
  perdure run --local-nodes 3 --spares 1 --nproc-per-node 2 train.py
  perdure run --nnodes 4 --spares 1 --rdzv-backend c10d --rdzv-endpoint head:29400 --rdzv-id exp7 train.py

exit codes: the job's own; 2 for a wrong command line. State lies in $PERDURE_HOME (~/.local/state/perdure)."""


def help_text() -> str:
    """What `perdure run --help` prints."""
    parser = argparse.ArgumentParser(
        usage=_USAGE,
        description=_INTRO,
        epilog=_VALUES,
        add_help=False,
        formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(prog, max_help_position=36, width=110),
    )
    for group in Group:
        section = parser.add_argument_group(group.value)
        for flag in (f for f in FLAGS if f.group is group):
            spellings = [flag.short, flag.name] if flag.short else [flag.name]
            text = flag.help + (f" [{flag.default}]" if flag.default else "")
            if flag.is_switch:
                section.add_argument(*spellings, action="store_true", help=text)
            else:
                section.add_argument(*spellings, metavar=flag.metavar, help=text)
    return parser.format_help()
