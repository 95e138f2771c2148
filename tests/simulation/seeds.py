"""What the simulation tests share: the catalogue, one seed's outcome, and a timeline as text."""

from functools import cache
from pathlib import Path

from perdure.playbook.parse import Catalogue, parse_catalogue
from perdure.ports import LogRecord
from perdure.sim.agenda import START
from perdure.sim.run import Outcome, render_outcome, simulate
from perdure.sim.scenario import a_small_one
from perdure.vocab import event as e
from perdure.vocab.decision import Decision

FOLDER = Path(__file__).parents[2] / "src" / "perdure" / "playbook" / "catalogue"


@cache
def catalogue() -> Catalogue:
    return parse_catalogue(file.read_text() for file in sorted(FOLDER.glob("*.toml")))


def outcome_of(seed: int) -> Outcome:
    return simulate(a_small_one(seed), seed, catalogue())


def check(seeds: range) -> None:
    """Fail with what is needed to see it again."""
    bad = [outcome for seed in seeds if (outcome := outcome_of(seed)).violations]
    assert not bad, "\n\n".join(render_outcome(outcome) for outcome in bad[:3])


def timeline(records: tuple[LogRecord, ...]) -> str:
    """One line for each record, without what every run has anew."""
    return "".join(f"{record.at - START:9.3f}  {_say(record)}\n" for record in records)


def _say(record: LogRecord) -> str:
    match record:
        case Decision():
            actions = " + ".join(str(type(action).__struct_config__.tag) for action in record.actions)
            return f"    => {actions}: {record.because}"
        case e.NodeJoined():
            return f"node_joined {record.node.id} life {record.node.incarnation.started_ticks}"
        case e.GenerationBegan():
            members = ", ".join(f"{m.node}: {list(m.ranks)}" for m in record.assignment.members)
            return f"generation_began {record.assignment.number} ({members})"
        case e.WorkerExited():
            how = f"signal {record.signal}" if record.signal else f"code {record.exit_code}"
            return f"worker_exited {record.node} generation {record.generation} rank {record.rank} {how}"
        case e.JobEnded():
            return f"job_ended {record.exit_code}: {record.reason}"
        case _:
            facts = (str(getattr(record, name, "")) for name in ("node", "generation", "step", "deadline"))
            return " ".join((str(type(record).__struct_config__.tag), *(fact for fact in facts if fact)))
