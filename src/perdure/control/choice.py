"""Which checkpoint all ranks of a generation restore: one answer, or the reasons why there is none. Pure.

It knows what was found and what was asked; it does not know when to stop waiting for more (`control.saves`).
"""

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from perdure.control.inventory import Standing
from perdure.vocab.checkpoint import Aside, CheckpointId, Chosen
from perdure.vocab.ids import NodeId
from perdure.wire.memory import Attachment

SHOWN = 8
"""Checkpoints and ranks that a refusal lists, before it says how many there are besides."""


class Wish(msgspec.Struct, frozen=True, kw_only=True):
    """What the ranks have asked for, together."""

    step: int | None = None
    """Exactly this one; None: the newest."""
    fresh: bool = False


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """Either `chosen`, or `refused`: one sentence and the list of what was found."""

    chosen: Chosen | None = None
    refused: str = ""


def wish_of(attached: Iterable[Attachment]) -> Wish | str:
    """What all of them want; a sentence where they want different things."""
    asked = list(attached)
    steps = sorted({-1 if each.restore_step is None else each.restore_step for each in asked})
    fresh = {each.fresh for each in asked}
    if len(fresh) > 1:
        ranks = ranks_in_words([each.rank for each in asked if each.fresh])
        return f"only {ranks} asked for a fresh start; all ranks must, or none: give the same `fresh` everywhere"
    if len(steps) > 1:
        names = " and ".join("the newest step" if step < 0 else f"step {step}" for step in steps)
        return f"ranks asked for different checkpoints ({names}); call restore() with the same step on all ranks"
    return Wish(step=next((step for step in steps if step >= 0), None), fresh=True in fresh)


def choose(
    wish: Wish,
    found: Iterable[Standing],
    *,
    looked: Sequence[NodeId],
    unlooked: Mapping[NodeId, str],
    bad: frozenset[CheckpointId] = frozenset(),
    asides: Sequence[Aside] = (),
    discards: int = 0,
    left: frozenset[CheckpointId] = frozenset(),
    existed: CheckpointId | None = None,
) -> Choice:
    """The newest complete one of `found` (or the wished step's), which is no `bad` one.

    `bad`: set aside, by `asides`; only a wish for that very step overrides it. No more than `discards` in a row are
    stepped over. `left`: those that the job has turned away from;
    taken when there is nothing else. `looked`: nodes whose memory was looked into. `unlooked`: why the storage was
    not, by node that should have. `existed`: the newest that is known to have been, also where nothing is left of it.
    """
    if wish.fresh:
        return Choice(chosen=Chosen(checkpoint=None))
    newest_first = sorted(found, key=lambda standing: standing.checkpoint, reverse=True)
    if wish.step is not None:
        wanted = [standing for standing in newest_first if standing.checkpoint.step == wish.step]
    else:
        allowed = [standing for standing in newest_first if standing.checkpoint not in bad]
        wanted = sorted(allowed, key=lambda each: (each.checkpoint in left, _is_torn(each, existed)))
    for standing in wanted:
        if standing.is_complete:
            newer = sum(each.checkpoint > standing.checkpoint for each in asides)
            if wish.step is None and newer > discards:
                why = _fault_elsewhere(standing.checkpoint, newer, discards)
                return Choice(refused="\n".join([f"{why} Found:", *_listed(newest_first, bad, asides)]))
            return Choice(chosen=chosen_of(standing))
    if wish.step is None and not newest_first and existed is None and not unlooked:
        return Choice(chosen=Chosen(checkpoint=None))
    lines = _listed(newest_first, bad, asides)
    return Choice(refused=_refusal(wish, newest_first, lines, looked, unlooked, existed))


def _is_torn(standing: Standing, committed: CheckpointId | None) -> bool:
    """Whether some ranks saved it and others did not live to: replicas may have every tensor of it all the same, but
    the data position and the random numbers of the dead are in the one before."""
    is_newer = committed is None or standing.checkpoint > committed
    return is_newer and standing.stored is None and bool(standing.lost)


def chosen_of(standing: Standing) -> Chosen:
    """`standing` as the answer to all ranks."""
    return Chosen(
        checkpoint=standing.checkpoint,
        world_size=standing.world_size,
        holders=standing.holders,
        stored=standing.stored,
        groups=standing.groups,
        missing=standing.lost if standing.stored is None else (),
    )


# --- why there is no answer ------------------------------------------------------------------------------------------


def _refusal(
    wish: Wish,
    found: Sequence[Standing],
    lines: list[str],
    looked: Sequence[NodeId],
    unlooked: Mapping[NodeId, str],
    existed: CheckpointId | None,
) -> str:
    what = (
        "no checkpoint can be restored" if wish.step is None else f"there is no complete checkpoint of step {wish.step}"
    )
    where = f"in the memory of {_some(looked)}" if looked else "in no node's memory"
    storage = [f"the storage was not listed by {node}: {why}" for node, why in sorted(unlooked.items())]
    if existed is not None and all(standing.checkpoint != existed for standing in found):
        lines.insert(0, f"  {existed}: it was committed, and no copy of any part of it is left")
    head = f"{what} (looked {where} and in storage{''.join('; ' + line for line in storage)})."
    tail = "Bring back the nodes or the storage that had the missing parts, or start over with fresh=True (--fresh)."
    return "\n".join([f"{head} Found:" if lines else f"{head} Nothing was found.", *lines, tail])


def _fault_elsewhere(next_one: CheckpointId, newer: int, discards: int) -> str:
    return (
        f"{newer} checkpoints in a row were set aside as bad after they had been restored, and the policy allows"
        f" {discards}: the fault may lie in the data, the code or a machine. {next_one} would be next; restore(step=…)"
        " takes it, or any other one, all the same."
    )


def _listed(found: Sequence[Standing], bad: frozenset[CheckpointId], asides: Sequence[Aside]) -> list[str]:
    lines = [f"  {standing.checkpoint}: {_lack(standing, bad, asides)}" for standing in found[:SHOWN]]
    return [*lines, f"  and {len(found) - SHOWN} older ones"] if len(found) > SHOWN else lines


def _lack(standing: Standing, bad: frozenset[CheckpointId], asides: Sequence[Aside]) -> str:
    """What is wrong with it, in words."""
    if standing.checkpoint in bad:
        why = next((each.reason for each in asides if each.covers(standing.checkpoint)), "")
        return f"set aside as bad ({why})" if why else "set aside as bad"
    if standing.is_complete:
        return "complete"
    said = list(standing.flaws)
    if standing.world_size:
        said.append(f"no copy of {ranks_in_words(standing.lost)} of {standing.world_size}")
        if standing.holders:
            said.append("the others are on " + _some(sorted({n for nodes in standing.holders.values() for n in nodes})))
    return "; ".join([*said, "not in storage"])


def ranks_in_words(ranks: Sequence[int]) -> str:
    """As in `rank 3`, or `ranks 1, 2 and 9 more`."""
    return ("rank " if len(ranks) == 1 else "ranks ") + _some([str(rank) for rank in ranks])


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(names[:SHOWN])
    return shown if len(names) <= SHOWN else f"{shown} and {len(names) - SHOWN} more"
