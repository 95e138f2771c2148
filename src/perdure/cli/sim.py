"""`perdure sim`: a made-up cluster in virtual time, under the very decisions that a real job gets."""

from typing import Annotated

import msgspec
import typer

from perdure.cli.control import load_catalogue
from perdure.cli.goodput import render_goodput
from perdure.sim.run import Outcome, render_outcome, simulate
from perdure.sim.scenario import a_cluster

app = typer.Typer(help="Simulate a job on a made-up cluster: what would its faults cost?", no_args_is_help=True)

EXIT_VIOLATED = 1


@app.callback()
def sim() -> None:
    """Simulate a job on a made-up cluster: what would its faults cost?"""


@app.command()
def run(
    nodes: Annotated[int, typer.Option(min=1, help="Nodes that the job asks for.")] = 64,
    spares: Annotated[int, typer.Option(min=0, help="Nodes beyond those that stand by.")] = 2,
    days: Annotated[float, typer.Option(min=0.01, help="Length of the job without any fault.")] = 30.0,
    seed: Annotated[int, typer.Option(help="Of the dice; the same seed gives the same timeline.")] = 0,
    mtbf_node: Annotated[
        float, typer.Option(min=1.0, help="Mean time between two interruptions of one node, in hours.")
    ] = 1000.0,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Run one job from its start to its end, and print where the time went and what went wrong.

    Exits with 1 when a rule of recovery was violated: that is a bug of Perdure, and the seed shows it again.
    """
    outcome = simulate(a_cluster(nodes, spares, days, mtbf_node, seed), seed, load_catalogue())
    print(_as_json(outcome) if json else f"{render_outcome(outcome)}\n\n{render_goodput(outcome.ledger, False)}")
    if outcome.violations:
        raise typer.Exit(EXIT_VIOLATED)


def _as_json(outcome: Outcome) -> str:
    body = {
        "summary": outcome.summary,
        "violations": outcome.violations,
        "goodput": msgspec.Raw(render_goodput(outcome.ledger, True).encode()),
    }
    return msgspec.json.encode(body).decode()
