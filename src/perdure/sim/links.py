"""The made-up network between control and nodes: it delays, loses, repeats and reorders messages, and can be cut."""

import random
from collections.abc import Callable
from itertools import count

from perdure.sim.agenda import Agenda
from perdure.sim.scenario import Network
from perdure.vocab.ids import NodeId

CONTROL = NodeId("control")
LATE_SECONDS = 2.0

Cut = tuple[frozenset[NodeId], frozenset[NodeId]]


class Links:
    """`send` brings a message or does not; `is_cut` says whether anything passes between two ends now."""

    def __init__(self, agenda: Agenda, network: Network, rng: random.Random) -> None:
        self._agenda, self._network, self._rng = agenda, network, rng
        self._cuts: dict[int, Cut] = {}
        self._numbers = count()
        self._held: list[tuple[NodeId, NodeId, Callable[[], None]]] = []

    def cut(self, one: frozenset[NodeId], other: frozenset[NodeId]) -> int:
        number = next(self._numbers)
        self._cuts[number] = (one, other)
        return number

    def mend(self, number: int) -> None:
        """End a cut. What was held back by the kernels on both sides arrives now."""
        del self._cuts[number]
        held, self._held = self._held, []
        for source, target, do in held:
            self._bring(source, target, do, 0.0)

    def is_cut(self, one: NodeId, other: NodeId) -> bool:
        return any((one in a and other in b) or (one in b and other in a) for a, b in self._cuts.values())

    @property
    def is_whole(self) -> bool:
        return not self._cuts

    def send(self, source: NodeId, target: NodeId, do: Callable[[], None]) -> None:
        """Bring a message: `do` is called where and when it arrives, perhaps twice, perhaps never."""
        network, rng = self._network, self._rng
        if network.loss and rng.random() < network.loss:
            return
        late = rng.uniform(0.0, LATE_SECONDS) if network.late and rng.random() < network.late else 0.0
        self._bring(source, target, do, late)
        if network.twice and rng.random() < network.twice:
            self._bring(source, target, do, rng.uniform(0.0, LATE_SECONDS))

    def _bring(self, source: NodeId, target: NodeId, do: Callable[[], None], late: float) -> None:
        delay = self._rng.uniform(*self._network.delay) + late
        self._agenda.after(delay, lambda: self._arrive(source, target, do))

    def _arrive(self, source: NodeId, target: NodeId, do: Callable[[], None]) -> None:
        if not self.is_cut(source, target):
            do()
        elif self._rng.random() < 0.5:
            self.hold(source, target, do)

    def hold(self, source: NodeId, target: NodeId, do: Callable[[], None]) -> None:
        """Keep a message until a cut is mended."""
        self._held.append((source, target, do))
