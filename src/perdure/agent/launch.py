"""What a worker is given: its environment and its command line, as torchrun 2.13 gives them. Pure: it starts nothing.

Source: torch 2.13, distributed/elastic/agent/server/local_elastic_agent.py (`_start_workers`) and distributed/run.py.
"""

from collections.abc import Mapping
from string import Template
from types import MappingProxyType

import msgspec

from perdure.agent.config import AgentConfig
from perdure.errors import ConfigError, WireError
from perdure.vocab.generation import Assignment, Member
from perdure.vocab.ids import GenerationNumber
from perdure.vocab.units import Bytes
from perdure.wire.messages import Entry, Launch, Orders

STREAMING_FROM: Bytes = 1 << 20
"""A memcpy of so many bytes goes past the caches. glibc's own number is 240 MiB on some virtual machines, and then a
checkpoint's copy reads every line that it only overwrites: a quarter of its time (benchmarks/checkpoint.py)."""

_NO_ENVIRON: Mapping[str, str] = MappingProxyType({})
_STREAMING = "glibc.cpu.x86_non_temporal_threshold"


def base_env(config: AgentConfig, environ: Mapping[str, str], interface: str | None = None) -> dict[str, str]:
    """The environment of the fork server, a store or a spawned worker, before anything that differs by rank.

    Libraries read OMP_NUM_THREADS and the NVML switch when they are imported, so setting them in a fork is too late.
    `interface`: the one by which other nodes reach this one.
    """
    env = {**environ, **config.env}
    if interface is not None:
        # Else gloo and tensorpipe listen where this machine's host name leads: often 127.0.1.1, which no other node
        # reaches. NCCL leaves the loopback out by itself, and one name would take its other fast interfaces from it.
        env.setdefault("GLOO_SOCKET_IFNAME", interface)
        env.setdefault("TP_SOCKET_IFNAME", interface)
    if config.slots > 1:
        env.setdefault("OMP_NUM_THREADS", "1")
    env.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # torch.cuda.is_available() must not open a CUDA context
    env["GLIBC_TUNABLES"] = glibc_tunables(env.get("GLIBC_TUNABLES", ""))
    return env


def glibc_tunables(given: str) -> str:
    """GLIBC_TUNABLES with large copies that stream; a user's own number stays. Other C libraries do not read it."""
    if _STREAMING in given:
        return given
    return ":".join(filter(None, (given, f"{_STREAMING}={STREAMING_FROM:#x}")))


def worker_env(
    config: AgentConfig,
    orders: Orders,
    local_rank: int,
    error_file: str,
    environ: Mapping[str, str] = _NO_ENVIRON,
) -> dict[str, str]:
    """What one worker has on top of `base_env`.

    `environ` is the agent's own environment: a user's TORCH_NCCL_ASYNC_ERROR_HANDLING and CUDA_VISIBLE_DEVICES count.
    """
    assignment, member = _part_of(config, orders)
    if orders.store is None:
        raise WireError(f"control ordered generation {orders.generation} to run without naming its store; report this")
    given = {**environ, **config.env}
    rank, world = str(member.first_rank + local_rank), str(assignment.world_size)
    return {
        "RANK": rank,
        "GROUP_RANK": str(assignment.nodes.index(config.node)),
        "ROLE_RANK": rank,  # one role per job, so its ranks are the job's
        "ROLE_NAME": config.role,
        "LOCAL_WORLD_SIZE": str(member.count),
        "WORLD_SIZE": world,
        "GROUP_WORLD_SIZE": str(len(assignment.members)),
        "ROLE_WORLD_SIZE": world,
        "MASTER_ADDR": orders.store.host,
        "MASTER_PORT": str(orders.store.port),
        "TORCHELASTIC_RESTART_COUNT": str(orders.restarts),
        "TORCHELASTIC_MAX_RESTARTS": str(config.max_restarts),
        "TORCHELASTIC_RUN_ID": config.run_id,
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_ERROR_FILE": error_file,
        "TORCHELASTIC_SIGNALS_TO_HANDLE": ",".join(config.signals),
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": given.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
        "PERDURE_GENERATION": str(orders.generation),
        "PERDURE_NODE": config.node,
        "PERDURE_JOB": config.job,
        "PERDURE_ATTEMPT": str(orders.attempt),
        **_device_env(config, local_rank, given.get("CUDA_VISIBLE_DEVICES")),
    }


def launch_for(config: AgentConfig, local_rank: int) -> Launch:
    """The user's program for one worker: `${local_rank}` in its arguments is replaced, as torchrun does.

    torchrun replaces it in the script's or module's name too, but not in a program's (--no-python).
    """
    launch = config.launch
    target = launch.target if launch.entry is Entry.PROGRAM else _substitute(launch.target, local_rank)
    return msgspec.structs.replace(launch, target=target, args=tuple(_substitute(a, local_rank) for a in launch.args))


def spawn_argv(config: AgentConfig, slot: int, generation: GenerationNumber, heartbeat_fd: int) -> list[str]:
    """The command line of a worker that is not forked. `slot` is its index in the heartbeat page, the local rank."""
    launch = launch_for(config, slot)
    if launch.entry is Entry.PROGRAM:
        return [launch.target, *launch.args]
    return [
        *(config.python, "-u", "-m", "perdure.trainer.worker"),
        *("--heartbeat-fd", str(heartbeat_fd), "--slot", str(slot), "--generation", str(generation)),
        *("--kind", launch.entry.value, "--target", launch.target, "--", *launch.args),
    ]


def line_prefix(config: AgentConfig, rank: int, local_rank: int) -> str:
    """What stands before every line of a worker that is shown."""
    template = Template(config.output.prefix)
    return template.safe_substitute(role_name=config.role, rank=rank, local_rank=local_rank)


def _part_of(config: AgentConfig, orders: Orders) -> tuple[Assignment, Member]:
    member = orders.assignment.member(config.node) if orders.assignment else None
    if orders.assignment is None or member is None:
        raise WireError(f"control ordered node {config.node} to run generation {orders.generation} but gave it no part")
    return orders.assignment, member


def _device_env(config: AgentConfig, local_rank: int, visible: str | None) -> dict[str, str]:
    if not config.virtual_local_rank:
        inherited = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
        return {"LOCAL_RANK": str(local_rank), **inherited}
    devices = [str(i) for i in range(config.slots)] if visible is None else visible.split(",")
    if local_rank >= len(devices):
        raise ConfigError(
            f"--virtual-local-rank: local rank {local_rank} has no device in CUDA_VISIBLE_DEVICES={visible}; "
            f"name at least {config.slots} or lower --nproc-per-node"
        )
    return {"LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": devices[local_rank].strip()}


def _substitute(text: str, local_rank: int) -> str:
    return Template(text).safe_substitute(local_rank=str(local_rank))
