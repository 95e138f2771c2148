"""What one `perdure run` asks for, as values: the job, the nodes to start here, and who runs control.

It does not know flags, and starts nothing.
"""

import ipaddress
from collections.abc import Collection

import msgspec

from perdure.agent.config import OutputConfig
from perdure.vocab.generation import Address
from perdure.vocab.ids import NodeId
from perdure.vocab.job import JobSpec
from perdure.vocab.units import Seconds
from perdure.wire.messages import Launch


class NodeToStart(msgspec.Struct, frozen=True, kw_only=True):
    """An agent to start on this machine."""

    name: NodeId
    order: int
    """Preferred place among the nodes."""
    standby: bool = False


class TlsFiles(msgspec.Struct, frozen=True, kw_only=True):
    """Absolute paths. With `cert` and `key` control serves HTTPS; `ca` is what agents and readers accept."""

    cert: str | None = None
    key: str | None = None
    ca: str


class RunRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One command line, understood."""

    job: JobSpec
    id_is_made: bool
    """No --rdzv-id was given. A machine that does not run control takes the id from there instead (`Pong.job`)."""
    nodes: tuple[NodeToStart, ...]
    endpoint: Address | None
    """Where control listens for several machines; None: on loopback, at any free port."""
    owner: bool | None
    """True, False: control runs here, elsewhere, by the user's word; None: by `owns_endpoint`."""
    launch: Launch
    python: str
    """Interpreter (PYTHON_EXEC, as in torchrun)."""
    output: OutputConfig
    """Its log_dir is "" where --log-dir was not given: the launcher replaces it."""
    env: dict[str, str] = {}
    """Set on top of this environment for fork server, store and workers."""
    signals: tuple[str, ...] = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")
    fork_server: bool = True
    preload: tuple[str, ...] = ()
    poll_seconds: Seconds = 0.05
    local_addr: str | None = None
    domain: str | None = None
    """Failure domain of this machine; None: each of its nodes is one."""
    master_addr: str | None = None
    """MASTER_ADDR of the workers; set on one machine only."""
    master_port: int = 0
    """Fixed port of the store; set on one machine only; 0: any free one."""
    virtual_local_rank: bool = False
    numa_binding: str | None = None
    tls: TlsFiles | None = None
    json: bool = False
    explain: bool = False
    """Print the time limits and end; contradictions are not refused yet."""
    notes: tuple[str, ...] = ()
    """Sentences for stderr, once: flags that torchrun accepts and does not use either."""

    def runs_control(self, local_addresses: Collection[str]) -> bool:
        """Whether control belongs on this machine, whose addresses and names are `local_addresses`."""
        if self.endpoint is None:
            return True
        return owns_endpoint(self.endpoint, local_addresses) if self.owner is None else self.owner

    def is_local(self, local_addresses: Collection[str]) -> bool:
        """Whether nothing of the job can be on another machine, so that the launcher may make the token itself."""
        if self.endpoint is None or _is_loopback(self.endpoint.host):
            return True
        everything_here = self.job.max_nodes + self.job.spares <= len(self.nodes)
        return everything_here and self.runs_control(local_addresses)


def owns_endpoint(endpoint: Address, local_addresses: Collection[str]) -> bool:
    """Whether `endpoint` is on the machine that has `local_addresses` (IP addresses and host names)."""
    host = _canonical(endpoint.host)
    return _is_loopback(host) or host in {_canonical(address) for address in local_addresses}


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _canonical(host: str) -> str:
    """One spelling per address: IPv6 has many, names have capitals and may end in a dot."""
    try:
        return ipaddress.ip_address(host.partition("%")[0]).compressed
    except ValueError:
        return host.lower().rstrip(".")
