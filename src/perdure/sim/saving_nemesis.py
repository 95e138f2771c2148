"""Carries faults out on a made-up cluster that saves checkpoints: workers, nodes, memory servers and control die."""

from perdure.control import saves
from perdure.sim.memory_server import MemoryServer
from perdure.sim.saving_world import SavingWorld


class SaveNemesis:
    """Strikes again and again, until the world is to be quiet."""

    def __init__(self, world: SavingWorld) -> None:
        self._world = world

    def strike(self) -> None:
        world = self._world
        if world.quiet:
            return
        kind = world.rng.choice(["workers", "workers", "node", "server", "control"])
        match kind:
            case "workers":
                world.restart_after(world.rng.uniform(0.2, 2.0))
            case "node":
                self._lose_node()
            case "server":
                self._restart_server(world.rng.choice(list(world.servers.values())))
            case _:
                self._restart_control()
        world.agenda.after(world.rng.expovariate(1 / world.scenario.mean_faults), self.strike)

    def _lose_node(self) -> None:
        world = self._world
        if not world.run.alive:
            return
        node = world.rng.choice(list(world.servers))
        index = world.servers[node].address.port - 1000
        lost = world.servers.pop(node)
        world.end()
        world.rules.lost(lost, world.holders, world.stored)
        if world.control is not None:
            world.become(saves.gone(world.control, node, world.agenda.now))
        if len(world.servers) < 1 or world.rng.random() < 0.7:
            world.boot(node, index)
        world.agenda.after(world.rng.uniform(1.0, 5.0), world.begin)

    def _restart_server(self, server: MemoryServer) -> None:
        world = self._world
        server.is_up = False

        def back() -> None:
            server.is_up = True
            for key, checkpoint in server.restart():
                world.hash(server, key, checkpoint)
            world.rules.look(world.holders, world.stored)
            world.say(server)

        world.agenda.after(world.rng.uniform(0.1, 3.0), back)

    def _restart_control(self) -> None:
        world = self._world
        world.control = None

        def back() -> None:
            if world.control is None:
                world.control = saves.opened(world.agenda.now)
                world.tell_control()

        world.agenda.after(world.rng.uniform(0.1, 5.0), back)
