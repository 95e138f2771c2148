"""Where this process is: told by an agent in its environment, or found out alone."""

from collections.abc import Mapping

from perdure.errors import ConfigError
from perdure.trainer.checkpoint.seat import Place
from perdure.vocab.ids import JobId


def place_of(rank: int, world_size: int, store: str, environ: Mapping[str, str]) -> Place:
    """Raises ConfigError, HostError, WireError."""
    socket = environ.get("PERDURE_MEMORY")
    if not socket:
        from perdure.trainer.checkpoint import alone

        return alone.meet(store, environ)
    try:
        return Place(
            job=JobId(environ["PERDURE_JOB"]),
            attempt=int(environ["PERDURE_ATTEMPT"]),
            generation=int(environ["PERDURE_GENERATION"]),
            rank=rank,
            world_size=world_size,
            local_world_size=int(environ.get("LOCAL_WORLD_SIZE", "1")),
            socket=socket,
        )
    except (KeyError, ValueError) as problem:
        raise ConfigError(f"PERDURE_MEMORY is set, but {problem} is missing or no number beside it") from None
