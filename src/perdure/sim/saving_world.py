"""Checkpoints on a made-up cluster: ranks in lockstep, the real ring and commit protocol, and all that can go wrong.

It carries out what happens (`saving_nemesis` says what fails when) and shows the truth to `saving_rules`.
"""

import random
from collections.abc import Callable
from functools import partial

from perdure.agent.memory.ring import replicated
from perdure.control import saves
from perdure.control.memories import copies_needed
from perdure.control.saves import SavesState
from perdure.sim.agenda import START, Agenda
from perdure.sim.memory_server import MemoryServer
from perdure.sim.saving_rules import Guard, Rules
from perdure.sim.saving_scenario import SavingScenario
from perdure.vocab.checkpoint import CheckpointId, Member, Stored
from perdure.vocab.ids import GenerationNumber, NodeId, Rank
from perdure.vocab.units import Seconds
from perdure.wire.memory import DrainOrder, MemoryOrders, MemoryReport

ATTEMPT = int(START)
Judge = Callable[[SavesState, MemoryReport, float], SavesState]
"""`saves.reported`, or one that breaks a rule."""
QUIET: Seconds = 200.0
"""At the end nothing fails for so long; by then something new must have been committed."""


class Run:
    """One generation's trainers."""

    def __init__(self, number: int, places: dict[Rank, NodeId], *, fresh: bool = False) -> None:
        self.number, self.places, self.fresh = number, places, fresh
        self.alive, self.started = True, False
        self.answers: dict[Rank, CheckpointId | None] = {}
        self.left: set[Rank] = set()
        """Ranks that have not finished the present step."""
        self.question, self.turn = 1, 0
        self.wish: int | None = None
        """The step that the present question names; None: the newest."""


class SavingWorld:
    """Everything there is. Faults call its methods; `rules` watches it."""

    def __init__(self, scenario: SavingScenario, rng: random.Random, judge: Judge) -> None:
        self.scenario, self.rng, self.judge = scenario, rng, judge
        self.agenda = Agenda()
        self.boots = 0
        self.servers: dict[NodeId, MemoryServer] = {}
        for index in range(scenario.nodes):
            self.boot(NodeId(f"n{index}"), index)
        self.stored: dict[CheckpointId, Stored] = {}
        self.control: SavesState | None = saves.opened(self.agenda.now)
        self.run = Run(0, {})
        self.rules = Rules(self.agenda)
        self.commits = 0
        self.quiet = self.fresh = False

    @property
    def saves_seldom(self) -> bool:
        """Whether the cadence that was found is too slow to see two checkpoints in the quiet time."""
        cadence = None if self.control is None else self.control.cadence
        return cadence is not None and 3 * cadence.every * self.scenario.step_seconds > QUIET

    @property
    def holders(self) -> list[MemoryServer]:
        """All memories that there are: a server that is down has still its files."""
        return list(self.servers.values())

    # --- generations -------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """A new generation on the nodes that there are, in any order of ranks."""
        nodes = list(self.servers)
        if self.rng.random() < 0.3:
            self.rng.shuffle(nodes)
        per = self.scenario.ranks_per_node
        places = {Rank(i * per + k): node for i, node in enumerate(nodes) for k in range(per)}
        self.run = run = Run(self.run.number + 1, places, fresh=self.fresh)
        self.fresh = False
        if self.control is not None:
            self.tell_control()
        for rank, node in places.items():
            self.agenda.after(self.rng.uniform(0.1, 3.0), partial(self._attach, run, rank, node))

    def tell_control(self) -> None:
        run = self.run
        if self.control is not None and run.number:
            self.become(
                saves.began(
                    self.control,
                    ATTEMPT,
                    GenerationNumber(run.number),
                    set(run.places.values()),
                    len(run.places),
                    self.agenda.now,
                )
            )

    def _attach(self, run: Run, rank: Rank, node: NodeId) -> None:
        server = self.servers.get(node)
        if not run.alive or server is None:
            return
        if not server.is_up:
            self.agenda.after(0.5, partial(self._attach, run, rank, node))
            return
        server.attach(rank, (ATTEMPT, run.number), len(run.places), self.scenario.slots)
        server.seats[rank].fresh = run.fresh
        server.ask(rank, run.question, run.wish)
        self.say(server)

    def end(self) -> None:
        """All trainers die; the memory lives on."""
        self.run.alive = False
        for server in self.servers.values():
            server.leave_all()
            self.say(server)

    def restart_after(self, seconds: Seconds) -> None:
        if self.run.alive:
            self.end()
            self.agenda.after(seconds, self.begin)

    def boot(self, node: NodeId, index: int) -> None:
        self.boots += 1
        server = MemoryServer(node, index, f"boot{self.boots}", self.scenario.policy, self.scenario.has_store)
        self.servers[node] = server

    # --- training ----------------------------------------------------------------------------------------------------

    def _look_for_answer(self, server: MemoryServer) -> None:
        run = self.run
        orders = server.line_orders((ATTEMPT, run.number))
        if orders is None or not run.alive:
            return
        waiting = [rank for rank, seat in server.seats.items() if 0 < seat.restoring <= orders.question]
        if any(server.seats[rank].restoring < orders.question for rank in waiting):
            self.rules.violate("every question is answered", f"{orders.question} is, and an earlier one waits")
        if orders.refused and waiting:
            self.rules.refused(orders.refused, is_wished=run.wish is not None)
            self.fresh = run.question == 1  # the user's answer: start over
            self.restart_after(1.0)
            return
        if orders.chosen is None:
            return
        for rank in waiting:
            seat = server.seats[rank]
            seat.restoring, seat.begun, seat.turn = 0, True, orders.turn
            run.answers[rank], run.turn = orders.chosen.checkpoint, orders.turn
            if not run.fresh:
                answers = set(run.answers.values())
                self.rules.answered(orders.chosen, answers, self.holders, self.stored, is_wished=run.wish is not None)
        if len(run.answers) == len(run.places) and not run.started:
            run.started = True
            chosen = orders.chosen.checkpoint
            self._begin_step(run, 0 if chosen is None else chosen.step + 1)

    def _begin_step(self, run: Run, step: int) -> None:
        if not run.alive:
            return
        run.left = set(run.places)
        for rank in run.places:
            slow = 6.0 if self.rng.random() < 0.01 else self.rng.uniform(0.9, 1.1)
            self.agenda.after(self.scenario.step_seconds * slow, partial(self._finish_step, run, rank, step))

    def _finish_step(self, run: Run, rank: Rank, step: int) -> None:
        server = self.servers.get(run.places[rank])
        if not run.alive or server is None:
            return
        copying = 0.0
        seat = server.seats.get(rank)
        if seat is not None:
            seat.step = step
        if server.is_up and seat is not None and self._is_due(server, seat.line, step):
            copying = self._save(run, server, rank, step)
        self.agenda.after(copying, partial(self._next, run, rank, step))

    def _is_due(self, server: MemoryServer, line: tuple[int, int], step: int) -> bool:
        orders = server.line_orders(line)
        if orders is None:
            return False
        return step == orders.once or (orders.cadence is not None and orders.cadence.is_due(step))

    def _save(self, run: Run, server: MemoryServer, rank: Rank, step: int) -> Seconds:
        generation = GenerationNumber(run.number)
        checkpoint = CheckpointId(attempt=ATTEMPT, generation=generation, turn=run.turn, step=step)
        self.rules.saves(checkpoint, run.question)
        number = server.grant(rank) if self.rng.random() > 0.01 else None  # a rank may be too slow to see its grant
        self.rules.look(self.holders, self.stored)
        if number is None:
            server.skipped.add(checkpoint)
            server.seats[rank].begun = True
            self.say(server)
            return 0.0
        copying = self.rng.uniform(0.05, 0.2)
        self.agenda.after(copying, partial(self._written, run, server, (rank, number), checkpoint, server.life))
        return copying * 1.01

    def _written(
        self, run: Run, server: MemoryServer, key: tuple[Rank, int], checkpoint: CheckpointId, life: int
    ) -> None:
        slot = server.ring.slots.get(key)
        if not run.alive or self.servers.get(server.node) is not server or slot is None:
            return
        if server.life != life or not slot.given:
            return  # it began anew in the copy: what was given is torn
        server.seats[key[0]].begun = True
        server.write(key, checkpoint)
        self.hash(server, key, checkpoint)

    def hash(self, server: MemoryServer, key: tuple[Rank, int], checkpoint: CheckpointId) -> None:
        def sealed() -> None:
            if self.servers.get(server.node) is server and server.seal(key, checkpoint):
                server.commit_seconds = 1.0
                self.say(server)
                self.send_replicas(server)

        self.agenda.after(self.rng.uniform(0.05, 1.0), sealed)

    def _next(self, run: Run, rank: Rank, step: int) -> None:
        run.left.discard(rank)
        if not run.alive or run.left:
            return
        if not self.quiet and self.rng.random() < self.scenario.goes_back:
            self._go_back(run)
        else:
            self._begin_step(run, step + 1)

    def _go_back(self, run: Run) -> None:
        """The script calls restore() again, on all ranks, some of them later than others."""
        steps = sorted({each.step for server in self.holders for each in server.sizes})
        run.wish = self.rng.choice(steps) if steps and self.rng.random() < 0.3 else None
        run.question, run.answers, run.started = run.question + 1, {}, False
        for rank in run.places:
            self.agenda.after(self.rng.uniform(0.0, 2.0), partial(self._ask, run, rank, run.question))

    def _ask(self, run: Run, rank: Rank, question: int) -> None:
        server = self.servers.get(run.places[rank])
        if not run.alive or server is None:
            return
        if not server.is_up or rank not in server.seats:
            self.agenda.after(0.5, partial(self._ask, run, rank, question))
            return
        server.ask(rank, question, run.wish)
        self.say(server)

    # --- replicas and storage ----------------------------------------------------------------------------------------

    def send_replicas(self, server: MemoryServer) -> None:
        orders = server.orders
        if orders is None or not server.is_up or self.servers.get(server.node) is not server:
            return
        for address in orders.partners.get(server.node, ()):
            for rank in {key[0] for key in server.ring.slots}:
                wanted = server.to_send(rank, address)
                if wanted is not None:
                    done = partial(self._replicated, server, wanted[0], wanted[1], address, server.life)
                    self.agenda.after(self.rng.uniform(0.05, 1.5), done)

    def _replicated(
        self, server: MemoryServer, key: tuple[Rank, int], checkpoint: CheckpointId, address: object, life: int
    ) -> None:
        partner = next((s for s in self.servers.values() if s.address == address and s.is_up), None)
        slot = server.ring.slots.get(key)
        if partner is None or not server.is_up or server.life != life or self.servers.get(server.node) is not server:
            return
        if slot is None or slot.checkpoint != checkpoint or key not in server.ring.holding(checkpoint):
            return  # it was given away meanwhile
        if partner.take(server.node, key[0], checkpoint, server.sizes[checkpoint]):
            server.acked[key, partner.address] = checkpoint
            server.ring = replicated(server.ring, key, checkpoint)
            self.say(partner)
            self.say(server)
            self.rules.look(self.holders, self.stored)
            self.send_replicas(server)

    def make_parity(self, server: MemoryServer) -> None:
        """One at a time: the slots of the group are read, which takes a while."""
        wanted = server.parity_wanted()
        if wanted is None or not server.is_up or self.servers.get(server.node) is not server:
            return
        self.agenda.after(self.rng.uniform(0.05, 1.5), partial(self._parity_made, server, *wanted, server.life))

    def _parity_made(
        self, server: MemoryServer, checkpoint: CheckpointId, members: tuple[Member, ...], life: int
    ) -> None:
        if not server.is_up or server.life != life or self.servers.get(server.node) is not server:
            return
        for member in members:
            there = self.servers.get(member.node)
            own = {int(rank) for rank, _ in there.ring.holding(checkpoint)} if there is not None else set()
            if there is None or not there.is_up or not set(member.ranks) <= own:
                return  # tried again when there are news
        if server.parity_wanted() == (checkpoint, members) and server.keep_parity(checkpoint, members):
            self.say(server)
            self.rules.look(self.holders, self.stored)
            self.make_parity(server)

    def drain(self, server: MemoryServer, order: DrainOrder) -> None:
        """Write what this node still has of its part, and commit when all parts are there."""
        if self.servers.get(server.node) is not server or not server.is_up:
            return
        now = None if server.orders is None else server.orders.drain
        if now is None or now.number != order.number:
            return
        there = server.has(order.checkpoint)
        server.wrote(order, [rank for rank in server.to_write(order) if rank in there])
        if now.is_written and now.committer == server.node:
            size = next(
                each.sizes[order.checkpoint] for each in self.servers.values() if order.checkpoint in each.sizes
            )
            self.stored[order.checkpoint] = Stored(checkpoint=order.checkpoint, path="p", world_size=size, nbytes=1)
        for other in self.servers.values():
            self.say(other)

    # --- messages ----------------------------------------------------------------------------------------------------

    def say(self, server: MemoryServer) -> None:
        """Report at once; it may be lost, late, or come twice."""
        if not server.is_up or self.servers.get(server.node) is not server:
            return
        report = server.report(self.agenda.now, self.stored, self.scenario.step_seconds)
        for _ in range(1 + (self.rng.random() < self.scenario.loss)):
            if self.rng.random() >= self.scenario.loss:
                late = self.rng.uniform(0.5, 3.0) if self.rng.random() < self.scenario.loss else 0.0
                self.agenda.after(self.rng.uniform(0.001, 0.05) + late, partial(self._hear, server, report))

    def _hear(self, server: MemoryServer, report: MemoryReport) -> None:
        if self.control is None or self.servers.get(server.node) is not server:
            return
        self.become(self.judge(self.control, report, self.agenda.now))
        if self.control.version != report.seen:
            self._order(server)

    def become(self, state: SavesState) -> None:
        before, self.control = self.control, state
        if before is not None and state.committed != before.committed and state.committed is not None:
            need = copies_needed(state)
            chosen = None if state.choice is None or state.choice.chosen is None else state.choice.chosen.checkpoint
            guard = Guard(state.committed, need)
            is_new = self.rules.committed(guard, chosen, self.holders, self.stored)
            self.commits += is_new
        if before is not None and state.version != before.version:
            for server in self.servers.values():
                self._order(server)

    def _order(self, server: MemoryServer) -> None:
        if self.control is None or self.rng.random() < self.scenario.loss:
            return
        known = self.control.reports.get(server.node)
        if known is None or (known.incarnation.boot_id, known.incarnation.started_ticks) != (server.boot, server.life):
            return  # orders are answers
        orders = saves.orders(self.control, self.agenda.now)
        self.agenda.after(self.rng.uniform(0.001, 0.1), partial(self._obey, server, orders, server.life))

    def _obey(self, server: MemoryServer, orders: MemoryOrders, life: int) -> None:
        if self.servers.get(server.node) is not server or not server.is_up or server.life != life:
            return
        if orders.version < server.heard_of:
            return  # an answer that was overtaken: the link has left that question
        server.heard_of = orders.version
        server.apply(orders)
        self.rules.look(self.holders, self.stored)
        self._look_for_answer(server)
        self.send_replicas(server)
        self.make_parity(server)
        order = orders.drain
        if order is not None and (server.to_write(order) or (order.is_written and order.committer == server.node)):
            self.agenda.after(self.rng.uniform(1.0, 8.0), partial(self.drain, server, order))

    def tick(self) -> None:
        """Once a second: everybody reports, control looks at the clock."""
        if self.control is not None:
            self.become(saves.ticked(self.control, self.agenda.now))
        for server in self.servers.values():
            self.say(server)
            self.send_replicas(server)
            self.make_parity(server)
        self.agenda.after(1.0, self.tick)
