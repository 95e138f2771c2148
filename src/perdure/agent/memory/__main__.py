"""`python -m perdure.agent.memory --config-fd N`: started by an agent, or by a trainer without one."""

import ctypes
import os
import signal
import sys

import anyio
import msgspec

from perdure.agent.memory.config import MemoryConfig
from perdure.agent.memory.door import complain
from perdure.agent.memory.loop import MemoryServer
from perdure.errors import ConfigError, PerdureError

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def main(argv: list[str]) -> int:
    parent = os.getppid()
    try:
        config = read_config(argv)
        if config.linger is None:
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() != parent:
                return 1  # it died before the line above
        _be_nice(config.nice)
        return anyio.run(MemoryServer(config).run)
    except* (PerdureError, OSError) as problems:
        problem: BaseException = problems
        while isinstance(problem, BaseExceptionGroup):
            problem = problem.exceptions[0]
        complain(str(problem))
        code = 2 if isinstance(problem, ConfigError) else 1
    return code


def _be_nice(nice: int) -> None:
    """Yield to training: among all processes, not only to those of our own session."""
    os.nice(nice)
    try:
        # Where the kernel groups processes by session, nice counts within the group only, and the group has its own.
        with open("/proc/self/autogroup", "w") as file:
            file.write(str(nice))
    except OSError:
        return  # not built into this kernel, or switched off, or changed too often within a tenth of a second


def read_config(argv: list[str]) -> MemoryConfig:
    """What whoever starts us has written. Raises ConfigError."""
    if len(argv) != 2 or argv[0] != "--config-fd" or not argv[1].isdigit():
        raise ConfigError("the memory server is started by Perdure, not by hand")
    try:
        with open(int(argv[1]), "rb") as file:
            return msgspec.json.decode(file.read(), type=MemoryConfig)
    except (OSError, msgspec.DecodeError) as problem:
        raise ConfigError(f"descriptor {argv[1]} holds no configuration of a memory server: {problem}") from None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
