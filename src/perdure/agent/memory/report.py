"""What control is told of this node: one value made of what tier, trainers, drain and copies know."""

from perdure.agent.memory.config import MemoryConfig
from perdure.agent.memory.copies import Copies
from perdure.agent.memory.drain import Drain
from perdure.agent.memory.protecting import Parities
from perdure.agent.memory.tier import Seat, Tier, attachment
from perdure.agent.memory.trainers import House
from perdure.vocab.generation import Address
from perdure.vocab.ids import GenerationNumber, Incarnation, Rank
from perdure.vocab.units import Seconds
from perdure.wire.layouts import NO_STEP
from perdure.wire.memory import MemoryReport, Told

WEIGHT = 0.3
"""Of the newest measurement in the step time that is told."""


class StepClock:
    """How long a step takes, of the fastest rank here, by the pages."""

    def __init__(self) -> None:
        self._last: dict[Rank, tuple[int, float]] = {}
        self._seconds: dict[Rank, Seconds] = {}

    def read(self, seats: dict[Rank, Seat]) -> bool:
        """Take in what the pages say; whether any rank has got on."""
        moved = False
        for rank, seat in seats.items():
            step, at = seat.page.step, seat.page.step_at
            before = self._last.get(rank, (NO_STEP, 0.0))
            if step == before[0]:
                continue
            moved, self._last[rank] = True, (step, at)
            if step > before[0] >= 0 and at > before[1]:
                now = (at - before[1]) / (step - before[0])
                self._seconds[rank] = now * WEIGHT + self._seconds.get(rank, now) * (1 - WEIGHT)
        for rank in self._last.keys() - seats.keys():
            self._last.pop(rank)
            self._seconds.pop(rank, None)
        return moved

    @property
    def seconds(self) -> Seconds | None:
        return min(self._seconds.values(), default=None)


class Reporter:
    """Makes the reports of one life of a server."""

    def __init__(
        self,
        config: MemoryConfig,
        incarnation: Incarnation,
        address: Address,
        domain: str,
        house: House,
        drain: Drain,
        copies: Copies,
        parities: Parities,
    ) -> None:
        self._config, self._incarnation, self._address, self._domain = config, incarnation, address, domain
        self._house, self._drain, self._copies, self._parities = house, drain, copies, parities
        self.clock = StepClock()
        self._number = 0

    @property
    def troubles(self) -> tuple[str, ...]:
        """What cannot be done here now."""
        found = (
            self._house.trouble,
            self._drain.trouble,
            self._copies.trouble,
            self._parities.trouble,
            self._house.tier.sameness.trouble,
        )
        return tuple(dict.fromkeys(one for one in found if one))

    def make(self, seen: int, wait: Seconds) -> MemoryReport:
        tier, house, drain = self._house.tier, self._house, self._drain
        attempt, generation = tier.ring.line
        self._number += 1
        self.clock.read(tier.seats)
        return MemoryReport(
            node=self._config.node,
            incarnation=self._incarnation,
            address=self._address,
            domain=self._domain,
            attempt=attempt or self._config.attempt,
            generation=GenerationNumber(generation),
            number=self._number,
            told=told(tier),
            world_size=house.world_size,
            ranks=tuple(sorted(tier.ring.members)),
            attached=tuple(
                attachment(seat, tier.ring) for _, seat in sorted(tier.seats.items()) if seat.line == tier.ring.line
            ),
            policy=house.policy,
            held=tier.held(),
            parity=self._parities.held(),
            skipped=tuple(sorted(tier.skipped)),
            done=house.is_done,
            asides=tier.asides,
            worlds=tier.worlds,
            stored=drain.stored,
            store=house.store,
            unlooked=drain.unlooked,
            flushing=house.flushing,
            parts=drain.parts,
            drain_bytes=drain.nbytes,
            drain_failure=drain.failure,
            free_store=drain.free,
            trouble=self.troubles,
            step_seconds=self.clock.seconds,
            stall_seconds=tier.stall,
            commit_seconds=tier.commit,
            seen=seen,
            wait=wait,
        )


def told(tier: Tier) -> Told:
    """What control has said for the generation that is here now."""
    orders = tier.orders
    if orders is None or (orders.attempt, int(orders.generation)) != tier.ring.line:
        return Told()
    return Told(
        committed=orders.committed,
        cadence=orders.cadence,
        once=orders.once,
        answered=0 if orders.chosen is None else orders.question,
        chosen=None if orders.chosen is None else orders.chosen.checkpoint,
    )
