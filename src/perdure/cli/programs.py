"""What the launcher hands to the programs that it starts, and how they are entered (`python -P -m perdure.cli.agent`).

The configuration comes by a descriptor, so that no token stands on a command line or in an environment.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import msgspec

from perdure.agent.config import AgentConfig
from perdure.cli.request import TlsFiles
from perdure.errors import ConfigError
from perdure.vocab.job import JobSpec

T = TypeVar("T")


class AgentStart(msgspec.Struct, frozen=True, kw_only=True):
    config: AgentConfig
    token: str
    version: str
    tls: TlsFiles | None


class ControlStart(msgspec.Struct, frozen=True, kw_only=True):
    spec: JobSpec
    job_dir: str
    host: str
    """Interface to listen on."""
    port: int
    """0: any free one; the same again when control is started again."""
    token: str
    version: str
    tls: TlsFiles | None
    until_idle: bool
    """End by itself after the job: there is no launcher to do it."""


def argv_of(module: str) -> tuple[str, ...]:
    """Command line of one of our programs. -P: a user's `random.py` in the working directory is not ours."""
    return (sys.executable, "-P", "-m", f"perdure.cli.{module}", "--fd", "{fd}")


def read_start(argv: list[str], kind: type[T]) -> T:
    """What the launcher wrote for this program. Raises ConfigError: nobody else starts it so."""
    if len(argv) != 2 or argv[0] != "--fd" or not argv[1].isdigit():
        raise ConfigError("this program is started by `perdure run`, not by hand")
    try:
        with open(int(argv[1]), "rb") as file:
            return msgspec.json.decode(file.read(), type=kind)
    except (OSError, msgspec.DecodeError) as problem:
        raise ConfigError(f"descriptor {argv[1]} holds no configuration: {problem}") from None


def forget_token() -> None:
    """The token is for Perdure's own processes, not for the user's."""
    os.environ.pop("PERDURE_TOKEN", None)


@contextmanager
def one_problem() -> Iterator[None]:
    """A task group wraps what its tasks raise; the user gets the first sentence."""
    try:
        yield
    except BaseExceptionGroup as group:
        error: BaseException = group
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        raise error from None
