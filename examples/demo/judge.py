"""Whether training went on from its newest checkpoint after every fault, by rank 0's losses and the event log. Pure."""

from collections.abc import Sequence
from typing import NamedTuple

from watch import Loss

from perdure.vocab.event import CheckpointChosen, CheckpointCommitted

# Steps are done again with the same data from the same state. DDP sorts its gradients into other buckets after its
# first step, so sums may be rounded differently: 2e-7 was seen at 4 ranks (2026-11). A wrong state is off by far more.
TOLERANCE = 1e-3


class Resumption(NamedTuple):
    generation: int
    first: int
    """The step with which it began."""
    redone: int
    """Steps that an earlier generation had done already."""
    apart: float
    """Largest difference between a step's loss the first time and this time."""


def resumptions(losses: Sequence[Loss]) -> list[Resumption]:
    """One entry for each generation after the first, in order."""
    seen: dict[int, float] = {}
    found: list[Resumption] = []
    previous: Loss | None = None
    for loss in losses:
        if previous is not None and (loss.generation != previous.generation or loss.step <= previous.step):
            found.append(Resumption(loss.generation, loss.step, 0, 0.0))
        if loss.step in seen and found:
            apart = abs(loss.loss - seen[loss.step])
            last = found[-1]
            found[-1] = last._replace(redone=last.redone + 1, apart=max(last.apart, apart))
        seen[loss.step] = loss.loss
        previous = loss
    return found


def complaints(
    losses: Sequence[Loss],
    committed: Sequence[CheckpointCommitted],
    chosen: Sequence[CheckpointChosen],
    *,
    steps: int,
    ranks: int,
    faults: int,
) -> list[str]:
    """What is wrong with the record of a whole run: nothing, or one sentence each."""
    wrong: list[str] = []
    missing = sorted(set(range(steps)) - {loss.step for loss in losses})
    if missing:
        wrong.append(f"{len(missing)} of {steps} steps were never done, the first is {missing[0]}")
    found = resumptions(losses)
    if len(found) < faults:
        wrong.append(f"training was resumed {len(found)} times after {faults} faults")
    told = {choice.generation: choice for choice in chosen}
    for resumption in found:
        name = f"generation {resumption.generation}"
        restored = told[resumption.generation].checkpoint if resumption.generation in told else None
        if restored is None or resumption.first != restored.step + 1:
            wrong.append(f"{name} began with step {resumption.first}, but was told to restore {restored}")
            continue
        newest = max(each.checkpoint for each in committed if each.checkpoint.generation < resumption.generation)
        if restored < newest:
            wrong.append(f"{name} went back to {restored}, but {newest} was committed")
        if told[resumption.generation].from_memory < ranks:
            wrong.append(f"{name} had to read {restored} from storage")
        if resumption.apart > TOLERANCE:
            wrong.append(f"{name} did steps again with losses up to {resumption.apart:.4f} apart")
    return wrong
