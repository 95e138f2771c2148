"""The made-up cluster: machines, launchers, agents, control and the network between them, in virtual time.

It carries messages and signals and lets faults happen; it decides nothing that control or an agent decides.
"""

import random
from collections.abc import Callable

from perdure.control import leases
from perdure.control.fold import fold
from perdure.control.state import State
from perdure.ports import LogRecord
from perdure.sim.agenda import START, Agenda
from perdure.sim.checker import RecordChecker, Violation
from perdure.sim.controller import ControlLife, Stepper
from perdure.sim.links import CONTROL, Links
from perdure.sim.node import BEATS_PER_LEASE, Actor, AgentLife, incarnation
from perdure.sim.scenario import Scenario
from perdure.sim.training import Saves, Training, Worker, pids
from perdure.vocab.event import JobEnded, NodeJoined, NodeLeft, NodeLost, WorkerError
from perdure.vocab.generation import Assignment
from perdure.vocab.ids import GenerationNumber, Incarnation, NodeId
from perdure.vocab.node import Node
from perdure.vocab.units import Instant
from perdure.wire.messages import Observed, Orders, Reply

SIGTERM, SIGKILL = 15, 9
KILLED = -9
EXIT_FENCED = 75


Answer = Callable[[], None]
"""What happens where an answer arrives."""
MessageToControl = Callable[[ControlLife], Answer | None]


class Machine:
    """One computer with its launcher."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.id = NodeId(f"node-{index}")
        self.is_up = True
        self.boots = 1
        self.lives = 0
        self.agent: AgentLife | None = None
        self.workers: list[Worker] = []


class World:
    """Everything that there is. `scenario` and `rng` determine all that happens."""

    def __init__(self, scenario: Scenario, rng: random.Random, step: Stepper, decide: Actor) -> None:
        self.scenario, self.rng, self._step, self.decide = scenario, rng, step, decide
        self.agenda = Agenda()
        self.pace = scenario.pace
        self.links = Links(self.agenda, scenario.network, rng)
        self.log: list[LogRecord] = []
        self.machines = [Machine(index) for index in range(scenario.nodes)]
        self.control: ControlLife | None = None
        self.crash_when_appended = False
        self.saves = Saves()
        self.trainings: dict[GenerationNumber, Training] = {}
        self.ended: JobEnded | None = None
        self.checker = RecordChecker()
        self.violations: list[Violation] = []
        self.pid = pids()
        self._control_lives = 0
        self._streams = 0
        self._by_life: dict[Incarnation, AgentLife] = {}
        self._steady: frozenset[NodeId] = frozenset()
        self._mirror = State()
        self.may_overlap: set[Incarnation] = set()
        """Agents' lives that control called lost because their connection was closed."""
        self._silent: set[NodeId] = set()

    def fail(self, rule: str, what: str) -> None:
        self.violations.append(Violation(rule=rule, what=what, at=self.agenda.now, record=len(self.log)))

    def start(self) -> None:
        self.start_control()
        for machine in self.machines:
            self.agenda.after(self.rng.uniform(0.0, 1.0), lambda machine=machine: self.launch(machine))  # type: ignore[misc]

    # --- control -----------------------------------------------------------------------------------------------------

    def start_control(self) -> None:
        if self.control is None:
            self._control_lives += 1
            self.control = ControlLife(self, self.scenario.spec, self._step, self._control_lives)
            self.control.start(self.scenario.spec)
            self.links_changed()

    def crash_control(self) -> None:
        """Its memory is lost; every connection to it ends."""
        self.crash_when_appended = False
        if self.control is None:
            return
        self.control.end()
        self.control = None
        self.links_changed()
        for machine in self.machines:
            agent = machine.agent
            if agent is not None and agent.is_alive and not self.links.is_cut(machine.id, CONTROL):
                self.agenda.after(self.rng.uniform(0.0005, 0.01), agent.stream_broke)

    def logged(self, life: ControlLife, before: State, records: tuple[LogRecord, ...]) -> None:
        """Check what control has just written; end its life if it was to crash between writing and answering."""
        for record in records:
            self.checker.take(record)
            self._note(record)
        if self.scenario.check_each_step:
            self._check_replay(life)
        if self.crash_when_appended:
            self.crash_control()
        elif any(isinstance(record, NodeJoined | NodeLost | NodeLeft) for record in records):
            self.links_changed()

    def _note(self, record: LogRecord) -> None:
        match record:
            case JobEnded():
                self.ended = record
            case NodeLost():
                if record.connection_closed:
                    self.may_overlap.add(record.incarnation)
                else:
                    self._silent.add(record.node)
            case NodeJoined():
                self._silent.discard(record.node.id)
            case _:
                pass

    def _check_replay(self, life: ControlLife) -> None:
        for record in self.log[self._mirror.version :]:
            self._mirror = fold(self._mirror, record)
        if self._mirror != life.state:
            self.fail("a replay gives the same state", f"after record {len(self.log)}")
        _, more = self._step(self._mirror, (), self.agenda.now)
        if more:
            self.fail("a replay decides alike", f"it would add {more[0]!r}")

    def push(self, node: NodeId, stream: int, orders: Orders) -> None:
        agent = self.machines[_index(node)].agent
        if agent is not None:
            self.agenda.after(
                self.rng.uniform(*self.scenario.network.delay), lambda: self._pushed(agent, stream, orders)
            )

    def _pushed(self, agent: AgentLife, stream: int, orders: Orders) -> None:
        """A stream is TCP: in a cut it stands still, and goes on after it, unless one end has given up."""
        if not self.links.is_cut(agent.id, CONTROL):
            agent.took_stream(stream, orders)
        elif self.rng.random() < 0.5:
            self.links.hold(CONTROL, agent.id, lambda: agent.took_stream(stream, orders))
        elif agent.stream == stream:
            agent.is_behind = True
            self.links_changed()

    # --- who hears whom ----------------------------------------------------------------------------------------------

    def steady(self, node: NodeId) -> bool:
        return node in self._steady

    def links_changed(self) -> None:
        """Anything about lives, streams or cuts has changed: see whose beats come through, and who must be watched."""
        now = frozenset(machine.id for machine in self.machines if self._is_steady(machine))
        before, self._steady = self._steady, now
        for node in sorted(before - now):
            self._beats_end(self.machines[_index(node)])
        for machine in self.machines:
            if machine.agent is not None and machine.agent.is_alive and machine.id not in now:
                machine.agent.keep_beating()
                if machine.id in before:
                    machine.agent.act()
        if self.control is not None:
            self.control.set_alarm()

    def _is_steady(self, machine: Machine) -> bool:
        agent, control = machine.agent, self.control
        if agent is None or control is None or not agent.is_alive or not machine.is_up or agent.stream is None:
            return False
        is_open = control.streams.get(machine.id) == agent.stream and control.knows(machine.id, agent.life)
        return is_open and not agent.is_behind and not self.links.is_cut(machine.id, CONTROL)

    def _beats_end(self, machine: Machine) -> None:
        """The last beat that came through lies up to one interval back; its answer may have been lost."""
        now = self.agenda.now
        interval = BEATS_PER_LEASE * self.scenario.spec.rules.lease
        sent = now - self.rng.uniform(0.0, interval)
        agent, control = machine.agent, self.control
        if control is not None and machine.id in control.contacts:
            contact = control.contacts[machine.id]
            heard = max(contact.heard_at, min(now, sent + self.rng.uniform(0.0, 0.002)))
            control.contacts = {
                **control.contacts,
                machine.id: leases.Contact(heard_at=heard, closed_at=contact.closed_at),
            }
        if agent is not None and agent.is_alive:
            answered = sent if self.rng.random() < 0.5 else sent - interval
            agent.beats_ended(answered)

    def network_changed(self) -> None:
        self.links_changed()
        for training in list(self.trainings.values()):
            training.update()

    # --- machines and launchers --------------------------------------------------------------------------------------

    def launch(self, machine: Machine) -> None:
        """The launcher starts an agent, unless one runs or the job has ended."""
        if not machine.is_up or self.ended is not None or (machine.agent is not None and machine.agent.is_alive):
            return
        spec, scenario = self.scenario.spec, self.scenario
        machine.lives += 1
        life = incarnation(100 + machine.index, machine.lives, machine.boots)
        node = Node(
            id=machine.id,
            incarnation=life,
            host=f"host-{machine.index}",
            address=f"10.0.0.{machine.index}",
            peer_port=7000,
            slots=spec.workers_per_node,
            version="sim",
            world=spec.world,
            order=machine.index,
            standby=machine.index >= scenario.nodes - scenario.standbys,
        )
        machine.agent = AgentLife(self, node)
        self._by_life[life] = machine.agent
        self.links_changed()

    def agent_ended(self, agent: AgentLife, code: int) -> None:
        machine = self.machines[_index(agent.id)]
        for worker in machine.workers:
            worker.killed = True
            if worker.is_alive and not worker.blocked:
                self._bury(worker, heard=machine.is_up)
        stream = agent.stream
        if stream is not None and machine.is_up:
            self.agenda.after(self.rng.uniform(0.0005, 0.005), lambda: self._closed(agent, stream))
        self.links_changed()
        if code in (EXIT_FENCED, KILLED) and machine.is_up:
            wait = self.rng.uniform(*self.pace.launcher)
            if agent.restart_after is not None:
                wait = agent.restart_after
            self.agenda.after(wait, lambda: self.launch(machine))

    def _closed(self, agent: AgentLife, stream: int) -> None:
        if self.control is not None and not self.links.is_cut(agent.id, CONTROL):
            self.control.close_stream(agent.id, agent.life, stream)
            self.links_changed()

    def power_off(self, machine: Machine) -> None:
        machine.is_up = False
        for worker in machine.workers:
            worker.blocked = False
        if machine.agent is not None:
            machine.agent.end(KILLED)
        machine.workers.clear()
        machine.boots += 1

    def power_on(self, machine: Machine) -> None:
        machine.is_up = True
        self.launch(machine)

    # --- messages from agents ----------------------------------------------------------------------------------------

    def _to_control(self, agent: AgentLife, do: MessageToControl) -> None:
        """Bring a message, if the life of control that it is sent to is still there when it arrives."""
        control, machine = self.control, self.machines[_index(agent.id)]
        boots = machine.boots
        if control is None:
            return

        def arrive() -> None:
            if control.is_alive and machine.boots == boots:
                reply = do(control)
                if self.control is control and reply is not None:
                    self.links.send(CONTROL, agent.id, reply)

        self.links.send(agent.id, CONTROL, arrive)

    def send_join(self, agent: AgentLife, node: Node) -> None:
        sent_at = self.agenda.now

        def arrive(control: ControlLife) -> Answer:
            reply = control.join(node)
            return lambda: agent.answered_join(reply, sent_at)

        self._to_control(agent, arrive)

    def send_report(self, agent: AgentLife, observed: tuple[Observed, ...]) -> None:
        sent_at = self.agenda.now

        def arrive(control: ControlLife) -> Answer:
            reply: Reply = control.report(agent.id, agent.life, observed)
            return lambda: agent.answered_report(reply, sent_at)

        self._to_control(agent, arrive)

    def send_leave(self, agent: AgentLife, reason: str) -> None:
        def arrive(control: ControlLife) -> Answer | None:
            control.leave(agent.id, agent.life, reason)
            return None

        self._to_control(agent, arrive)

    def open_stream(self, agent: AgentLife) -> None:
        self._streams += 1
        stream = self._streams

        def arrive() -> None:
            control = self.control
            if control is not None and agent.is_alive and agent.stream is None and control.knows(agent.id, agent.life):
                agent.stream, agent.is_behind = stream, False
                control.open_stream(agent.id, agent.life, stream)
                self.links_changed()

        self.links.send(agent.id, CONTROL, arrive)

    def break_stream(self, machine: Machine) -> None:
        """A reset on the way: both ends see it."""
        agent = machine.agent
        if agent is not None and agent.is_alive and agent.stream is not None:
            stream = agent.stream
            agent.stream_broke()
            self._closed(agent, stream)

    def ask_peers(self, agent: AgentLife, asked_at: Instant) -> None:
        self.agenda.after(self.rng.uniform(0.002, 0.05), lambda: self._answer_peers(agent, asked_at))

    def _answer_peers(self, agent: AgentLife, asked_at: Instant) -> None:
        orders = agent.state.orders
        if not agent.is_alive or orders is None:
            return
        if not orders.peers:
            return  # alone, and control is on another machine, where the network may be to blame
        yes = 0
        for peer in orders.peers:
            other = self.machines[_index(peer.node)].agent
            if other is None or not other.is_alive or self.links.is_cut(agent.id, peer.node):
                continue
            theirs = other.state.orders
            if theirs is None:
                continue
            members = theirs.assignment.nodes if theirs.assignment is not None else ()
            if theirs.generation > orders.generation and members and agent.id not in members:
                agent.fence(f"{peer.node} says that generation {theirs.generation} goes on without this node")
                return
            yes += other.vouches_for(agent.id)
        agent.peers_answered(yes, len(orders.peers) + 1, asked_at)

    # --- workers -----------------------------------------------------------------------------------------------------

    def training(self, generation: GenerationNumber) -> Training | None:
        return self.trainings.get(generation)

    def start_worker(self, agent: AgentLife, orders: Orders, local_rank: int) -> Worker:
        assignment = orders.assignment
        assert assignment is not None
        member = assignment.member(agent.id)
        assert member is not None
        worker = Worker(self.pid(), agent.id, agent.life, local_rank, member.ranks[local_rank], assignment.number)
        training = self._training_of(assignment)
        if orders.redo_until is not None:
            training.watched = (orders.redo_until,)
        self._check_overlap(worker)
        if worker.rank in training.workers:
            self.fail("a rank runs once", f"rank {worker.rank} of generation {worker.generation} was started twice")
        training.workers[worker.rank] = worker
        self.machines[_index(agent.id)].workers.append(worker)
        self.agenda.after(self.rng.uniform(*self.pace.script), lambda: training.ready(worker))
        return worker

    def _training_of(self, assignment: Assignment) -> Training:
        number = assignment.number
        if number not in self.trainings:
            self._forget_trainings(number)
            self.trainings[number] = Training(
                number,
                assignment.world_size,
                self.scenario.script,
                self.saves,
                self.pace.first_step_extra,
                self.agenda,
                self.rng,
                observe=self._observe,
                end=lambda worker, code, error: self.exit(worker, code, None, error),
                is_connected=self._is_connected,
            )
        return self.trainings[number]

    def _forget_trainings(self, before: GenerationNumber) -> None:
        for number, training in list(self.trainings.items()):
            if number < before and not any(worker.is_alive for worker in training.workers.values()):
                del self.trainings[number]

    def _check_overlap(self, new: Worker) -> None:
        """No worker of another generation may be alive when one starts, as far as control can know."""
        for machine in self.machines:
            for other in machine.workers:
                if other.generation == new.generation or not other.is_alive or (other.blocked and other.killed):
                    continue
                if not any(self._may_overlap(life) for life in (other.life, new.life)):
                    what = (
                        f"rank {new.rank} of generation {new.generation} started on {new.node} while rank {other.rank}"
                        f" of generation {other.generation} was alive on {other.node}"
                    )
                    self.fail("two generations never run at once", what)

    def _may_overlap(self, life: Incarnation) -> bool:
        """Whether control could not wait for the end of this life's workers.

        Its connection was closed; or those that control does not hear are a majority of all that it asks, reach each
        other, and go on: neither side can know of the other (decision record 0004).
        """
        if life in self.may_overlap:
            return True
        agent = self._by_life[life]
        peers = agent.state.orders.peers if agent.state.orders is not None else ()
        asked = {agent.id, *(peer.node for peer in peers)}
        return len(asked) > 1 and 2 * len(asked & self._silent) > len(asked)

    def _is_connected(self, nodes: list[NodeId]) -> bool:
        if self.links.is_whole:
            return True
        distinct = sorted(set(nodes))
        return not any(self.links.is_cut(a, b) for i, a in enumerate(distinct) for b in distinct[i + 1 :])

    def _observe(self, workers: tuple[Worker, ...]) -> None:
        """The agents of `workers` look at their heartbeat pages. (They always do; only now is there something new.)"""
        for life in dict.fromkeys(worker.life for worker in workers):
            self._by_life[life].act()

    def signal(self, worker: Worker, number: int) -> None:
        if number == SIGKILL:
            worker.killed = True
            self.agenda.after(0.002, lambda: self._die(worker, SIGKILL))
        elif self.scenario.script.heeds_sigterm:
            self.agenda.after(self.rng.uniform(0.1, 4.0), lambda: self._end_well(worker))
        else:
            self.agenda.after(0.002, lambda: self._die(worker, number))

    def _end_well(self, worker: Worker) -> None:
        if worker.is_alive and not (worker.stopped or worker.blocked):
            self.exit(worker, 0, None, None)

    def _die(self, worker: Worker, number: int) -> None:
        if worker.is_alive and not worker.blocked and (number == SIGKILL or not worker.stopped):
            self.exit(worker, None, number, None)

    def exit(self, worker: Worker, code: int | None, number: int | None, error: WorkerError | None) -> None:
        """A process ends; its agent hears of it from the kernel."""
        if not worker.is_alive:
            return
        self._bury(worker, heard=code != 0)
        agent = self._by_life[worker.life]
        self.agenda.after(
            self.rng.uniform(0.0005, 0.004), lambda: agent.worker_ended(worker, code, number, error, worker.was_oom)
        )

    def _bury(self, worker: Worker, *, heard: bool) -> None:
        worker.is_alive = False
        machine = self.machines[_index(worker.node)]
        machine.workers = [w for w in machine.workers if w is not worker]
        training = self.trainings.get(worker.generation)
        if training is not None:
            training.lost(worker, heard=heard)

    def unblock(self, worker: Worker) -> None:
        """A worker in state D comes out of the kernel; what was sent to it arrives."""
        if worker.is_alive and worker.blocked:
            worker.blocked = False
            if worker.killed:
                self._die(worker, SIGKILL)
            self.changed(worker)

    def changed(self, worker: Worker) -> None:
        """A worker was stopped, continued, blocked …"""
        training = self.trainings.get(worker.generation)
        if training is not None:
            training.update()
        self._by_life[worker.life].act()

    # --- the end -----------------------------------------------------------------------------------------------------

    def is_over(self) -> bool:
        """The job has ended and nothing of it is left but what cannot be killed."""
        if self.violations or self.checker.violations:
            return True
        if self.ended is None:
            return False
        return not any(m.agent is not None and m.agent.is_alive for m in self.machines)

    @property
    def elapsed(self) -> float:
        return self.agenda.now - START


def _index(node: NodeId) -> int:
    return int(node.removeprefix("node-"))
