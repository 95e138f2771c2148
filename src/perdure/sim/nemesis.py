"""Carries planned faults out on a made-up cluster. It knows what a fault does at first, not what comes of it."""

import msgspec

from perdure.sim.failures import FaultKind, PlannedFault
from perdure.sim.links import CONTROL
from perdure.sim.node import AgentLife
from perdure.sim.training import Worker
from perdure.sim.world import KILLED, Machine, World
from perdure.vocab.event import WorkerError
from perdure.vocab.ids import NodeId


class Nemesis:
    """Plans every fault of the world's scenario."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.carried_out: list[tuple[float, FaultKind]] = []
        for fault in world.scenario.faults:
            world.agenda.after(fault.at, lambda fault=fault: self._strike(fault))  # type: ignore[misc]

    def _strike(self, fault: PlannedFault) -> None:
        if self._world.ended is not None:
            return
        self.carried_out.append((self._world.elapsed, fault.kind))
        match fault.kind:
            case (
                FaultKind.KILL_WORKER
                | FaultKind.CRASH_WORKER
                | FaultKind.OUT_OF_MEMORY
                | FaultKind.STOP_WORKER
                | FaultKind.STALL_WORKER
                | FaultKind.BLOCK_WORKER
            ):
                worker = self._a_worker(fault)
                if worker is not None:
                    self._strike_worker(fault, worker)
            case FaultKind.CUT_OFF | FaultKind.CUT_CONTROL | FaultKind.CUT_PEERS:
                self._cut(fault)
            case FaultKind.CRASH_CONTROL:
                self._crash_control(fault)
            case FaultKind.ASK_TO_STOP:
                self._ask_to_stop(fault)
            case _:
                self._strike_machine(fault)

    # --- workers -----------------------------------------------------------------------------------------------------

    def _a_worker(self, fault: PlannedFault) -> Worker | None:
        """A living one; on a large cluster of the machine that the fault names, if that has one."""
        machines = self._world.machines
        named = [machines[index] for index in fault.nodes] if len(fault.nodes) == 1 else machines
        living = [w for machine in named for w in machine.workers if w.is_alive and not w.killed]
        return living[int(fault.pick * len(living))] if living else None

    def _strike_worker(self, fault: PlannedFault, worker: Worker) -> None:
        world = self._world
        match fault.kind:
            case FaultKind.KILL_WORKER:
                world.signal(worker, 9)
            case FaultKind.OUT_OF_MEMORY:
                worker.was_oom = True
                world.signal(worker, 9)
            case FaultKind.CRASH_WORKER:
                if worker.runs:
                    where = f"train.py:{int(100 + 900 * fault.pick)}"
                    error = WorkerError(type="RuntimeError", message="CUDA error", where=where, traceback="…")
                    world.exit(worker, 1, None, error)
            case FaultKind.STOP_WORKER:
                worker.stopped = True
                world.changed(worker)
                world.agenda.after(fault.seconds, lambda: self._go_on(worker))
            case FaultKind.STALL_WORKER:
                training = world.training(worker.generation)
                if training is None or not training.finishing:  # after its loop a script has all the time that it wants
                    worker.stalled = True
                    world.changed(worker)
            case _:
                worker.blocked = True
                world.changed(worker)
                world.agenda.after(fault.seconds, lambda: world.unblock(worker))

    def _go_on(self, worker: Worker) -> None:
        if worker.is_alive and worker.stopped:
            worker.stopped = False
            self._world.changed(worker)

    # --- machines ----------------------------------------------------------------------------------------------------

    def _strike_machine(self, fault: PlannedFault) -> None:
        found = self._a_machine(fault)
        if found is None:
            return
        machine, agent = found
        world = self._world
        match fault.kind:
            case FaultKind.KILL_AGENT:
                agent.end(KILLED)
            case FaultKind.STOP_AGENT:
                agent.restart_after = fault.seconds
                agent.fence("its agent was sent SIGTERM")
            case FaultKind.LOSE_NODE:
                world.power_off(machine)
                world.agenda.after(fault.seconds, lambda: world.power_on(machine))
            case FaultKind.RESET:
                world.break_stream(machine)
            case FaultKind.KILL_STORE:
                hosts = [m.agent for m in world.machines if m.agent is not None and m.agent.has_store]
                if hosts:
                    hosts[0].store_killed()
            case _:
                raise AssertionError(f"not a fault of a machine: {fault.kind}")

    def _a_machine(self, fault: PlannedFault) -> tuple[Machine, AgentLife] | None:
        machines = self._world.machines
        named = [machines[index] for index in fault.nodes] if len(fault.nodes) == 1 else machines
        living = [(m, m.agent) for m in named if m.is_up and m.agent is not None and m.agent.is_alive]
        return living[int(fault.pick * len(living))] if living else None

    # --- network and control -----------------------------------------------------------------------------------------

    def _cut(self, fault: PlannedFault) -> None:
        world = self._world
        here = frozenset(world.machines[index].id for index in fault.nodes)
        others: frozenset[NodeId] = frozenset(m.id for m in world.machines) - here
        there = {
            FaultKind.CUT_OFF: others | {CONTROL},
            FaultKind.CUT_CONTROL: frozenset({CONTROL}),
            FaultKind.CUT_PEERS: others,
        }[fault.kind]
        number = world.links.cut(here, there)
        world.network_changed()

        def mend() -> None:
            world.links.mend(number)
            world.network_changed()

        world.agenda.after(fault.seconds, mend)

    def _crash_control(self, fault: PlannedFault) -> None:
        """At once, or between the next writing to the log and the answer to whoever caused it."""
        world = self._world
        if fault.pick < 0.5:
            world.crash_control()
        else:
            world.crash_when_appended = True
            world.agenda.after(fault.seconds / 2, world.crash_control)
        world.agenda.after(fault.seconds, world.start_control)

    def _ask_to_stop(self, fault: PlannedFault) -> None:
        world = self._world
        if world.control is None:
            later = msgspec.structs.replace(fault, at=0.0)
            world.agenda.after(1.0, lambda: self._strike(later))
            return
        world.control.stop("SIGINT to the launcher", 2, fault.seconds)
