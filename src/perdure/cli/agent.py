"""`python -m perdure.cli.agent`: one agent, started by the launcher. Imports little: 64 may start at once."""

import os
import sys

import anyio

from perdure.agent.loop import Agent
from perdure.cli.programs import AgentStart, forget_token, one_problem, read_start
from perdure.errors import ConfigError, PerdureError
from perdure.wire.channel import client_tls


def main() -> int:
    try:
        start = read_start(sys.argv[1:], AgentStart)
        forget_token()
        with one_problem():
            return anyio.run(_run, start)
    except PerdureError as problem:
        print(f"perdure: {problem}", file=sys.stderr, flush=True)
        return 2 if isinstance(problem, ConfigError) else 1


async def _run(start: AgentStart) -> int:
    tls = start.tls
    agent = Agent(
        start.config,
        dict(os.environ),
        token=start.token,
        version=start.version,
        tls=client_tls(tls.ca) if tls is not None else None,
    )
    return await agent.run()


if __name__ == "__main__":
    sys.exit(main())
