"""`perdure run`: starts control (where it belongs here) and this machine's agents, keeps them alive, shows, ends.

The launcher decides nothing about the job; it starts what dies, passes signals on to control, and prints the log.
"""

import signal
import time
from collections.abc import Mapping

import anyio
import msgspec

from perdure.agent.config import LEAVE_SIGNAL, STAY_SIGNAL, AgentConfig
from perdure.agent.loop import EXIT_UNAVAILABLE
from perdure.agent.memory.files import default_folder, remove_folder
from perdure.agent.state import EXIT_FENCED
from perdure.backends.local import YOUNG, Life, LocalMachine, Program
from perdure.cli.control import EXIT_PORT_TAKEN
from perdure.cli.home import JobDir, read_control, withdraw_control
from perdure.cli.programs import AgentStart, ControlStart, argv_of
from perdure.cli.request import NodeToStart, RunRequest
from perdure.cli.terminal import Terminal
from perdure.errors import AccessDeniedError, ConfigError, HostError, UntrustedError, WireError
from perdure.host.processes import Children, set_subreaper
from perdure.vocab.event import JobEnded, NodeLost, NodeRefused
from perdure.vocab.generation import Address
from perdure.wire.channel import Channel, RefusedError, client_tls
from perdure.wire.messages import Pong, Progress, Records, Reply, Stop

CONTROL = "control"
FOLLOW_WAIT = 5
FEW_RECORDS = 100
"""An answer with fewer was the end of the log at that moment."""
END_SECONDS = 8.0
"""From the job's end until this machine's agents are killed: clean-up never takes more than 10 s."""
CONTROL_START = 30.0
EXIT_FAILED, EXIT_USAGE, EXIT_INCOMPLETE = 1, 2, 3
AGENT_FINAL_CODES = frozenset({0, EXIT_USAGE, EXIT_UNAVAILABLE})
MOST_EARLY_DEATHS = 20
"""An agent that dies so often within seconds of its start is not started again."""


class Launcher:
    """One `perdure run` on one machine."""

    def __init__(
        self,
        request: RunRequest,
        job: JobDir,
        environ: Mapping[str, str],
        *,
        token: str,
        version: str,
        bind: Address | None,
        address: str,
    ) -> None:
        """`bind`: where control listens if it is run here, else None. `address`: this machine's, for the others."""
        self._request, self._job, self._environ = request, job, environ
        self._token, self._version = token, version
        self._bind, self._address = bind, address
        self._terminal = Terminal(request.job, json=request.json)
        self._control: Address | None = None if bind is not None else request.endpoint
        self._channel: Channel | None = None
        self._ended: JobEnded | None = None
        self._codes: dict[str, int] = {}
        self._deaths: dict[str, int] = {}
        self._stops = 0
        self._done = anyio.Event()

    async def run(self) -> int:
        """Until the job's end; gives the exit code of `perdure run`."""
        set_subreaper()
        children = Children()
        with self._terminal:
            self._machine = LocalMachine(
                children,
                dict(self._environ),
                stdout_fd=self._terminal.stdout_fd,
                stderr_fd=self._terminal.stderr_fd,
                on_end=self._on_end,
            )
            try:
                async with anyio.create_task_group() as group:
                    for task in (self._machine.watch, self._take_signals, self._terminal.run):
                        group.start_soon(task)
                    if "SIGUSR1" not in self._request.signals:
                        group.start_soon(self._take_notices)
                    await self._start()
                    if self._channel is not None:
                        group.start_soon(self._follow)
                        group.start_soon(self._show_progress)
                    await self._done.wait()
                    await self._end()
                    group.cancel_scope.cancel()
            finally:
                with anyio.CancelScope(shield=True):
                    await self._machine.close(signal.SIGKILL, 1.0)
                    for node in self._request.nodes:  # of agents that had to be killed
                        remove_folder(self._memory_of(node))
                children.close()
            self._terminal.end(self._ended)
        return self._exit_code()

    # --- starting ----------------------------------------------------------------------------------------------------

    async def _start(self) -> None:
        if self._bind is not None:
            withdraw_control(self._job)  # of an earlier launcher that was killed; its control died with it
            self._machine.start(self._control_program(self._bind.port))
            await self._wait_for_control()
        if self._done.is_set():
            return
        assert self._control is not None
        tls = self._request.tls
        self._channel = Channel(self._control, self._token, client_tls(tls.ca) if tls is not None else None)
        self._terminal.begin(self._control, self._job)
        for node in self._request.nodes:
            self._machine.start(self._agent_program(node))

    async def _wait_for_control(self) -> None:
        """Control publishes its address once it listens."""
        with anyio.move_on_after(CONTROL_START):
            while not self._done.is_set():
                published = read_control(self._job)
                if published is not None and published.pid == self._machine.running.get(CONTROL):
                    self._control = published.address
                    return
                await anyio.sleep(0.005)
        if not self._done.is_set():
            raise HostError(f"control did not listen within {CONTROL_START:g} s; its own message, if any, is above")

    def _control_program(self, port: int) -> Program:
        assert self._bind is not None
        start = ControlStart(
            spec=self._request.job,
            job_dir=str(self._job.path),
            host=self._bind.host,
            port=port,
            token=self._token,
            version=self._version,
            tls=self._request.tls,
            until_idle=False,
        )
        return Program(
            name=CONTROL,
            argv=argv_of("control"),
            config=msgspec.json.encode(start),
            final_codes=frozenset({EXIT_USAGE}),
        )

    def _bind_port(self) -> int:
        return self._bind.port if self._bind is not None else 0

    def _agent_program(self, node: NodeToStart) -> Program:
        start = AgentStart(
            config=self._agent_config(node), token=self._token, version=self._version, tls=self._request.tls
        )
        return Program(
            name=node.name,
            argv=argv_of("agent"),
            config=msgspec.json.encode(start),
            final_codes=AGENT_FINAL_CODES,
            death_signal=signal.SIGTERM,  # it outlives us for a moment, to end what its workers have left
        )

    def _agent_config(self, node: NodeToStart) -> AgentConfig:
        request, job = self._request, self._request.job
        assert self._control is not None
        output = request.output
        if not output.log_dir:
            output = msgspec.structs.replace(output, log_dir=str(self._job.logs))
        return AgentConfig(
            job=job.id,
            node=node.name,
            control=self._control,
            address=self._address,
            domain=request.domain or node.name,
            tls_ca=None if request.tls is None else request.tls.ca,
            memory=self._memory_of(node),
            slots=job.workers_per_node,
            order=node.order,
            standby=node.standby,
            world=job.world,
            role=job.role,
            launch=request.launch,
            python=request.python,
            fork_server=request.fork_server,
            preload=request.preload,
            env=request.env,
            run_id=job.id,
            max_restarts=job.rules.max_restarts,
            master_addr=request.master_addr,
            master_port=request.master_port,
            virtual_local_rank=request.virtual_local_rank,
            numa_binding=request.numa_binding,
            signals=request.signals,
            output=output,
            join_timeout=job.rules.join_timeout,
            poll_seconds=request.poll_seconds,
        )

    def _memory_of(self, node: NodeToStart) -> str:
        return default_folder(self._request.job.id, node.name, str(self._job.path.resolve()))

    # --- watching ----------------------------------------------------------------------------------------------------

    def _on_end(self, life: Life) -> Program | None:
        """What follows the end of one of our programs."""
        program = life.program
        if program.name == CONTROL:
            never_ran = self._control is None
            if life.exit_code == EXIT_USAGE or (never_ran and life.exit_code == EXIT_PORT_TAKEN):
                self._codes[CONTROL] = EXIT_USAGE if life.exit_code == EXIT_USAGE else 1
                self._done.set()
                return None
            # Whoever ended it, and however: the job goes on, so control does.
            return self._control_program(self._control.port if self._control is not None else self._bind_port())
        self._deaths[program.name] = self._deaths.get(program.name, 0) + 1 if life.seconds < YOUNG else 1
        hopeless = self._deaths[program.name] > MOST_EARLY_DEATHS
        if self._is_leaving:
            self._codes[program.name] = EXIT_INCOMPLETE
        elif life.exit_code not in program.final_codes and self._ended is None and not hopeless:
            self._terminal.say(f"the agent of {program.name} ended ({_how(life)}); it is started again")
            return program
        else:
            self._codes[program.name] = life.exit_code if life.exit_code is not None else 1
        if all(node.name in self._codes for node in self._request.nodes):
            self._done.set()
        return None

    @property
    def _is_leaving(self) -> bool:
        """This machine was told to leave a job that goes on elsewhere."""
        return self._bind is None and self._stops > 0 and self._ended is None

    async def _follow(self) -> None:
        """Print the log as it grows; its end is the job's."""
        after, is_history = 0, self._bind is None
        while True:
            try:
                path = f"/v1/records?after={after}&wait={FOLLOW_WAIT}"
                assert self._channel is not None
                found = await self._channel.call("GET", path, None, Records, timeout=FOLLOW_WAIT + 5)
            except WireError:
                await anyio.sleep(0.1)
                continue
            after = found.last
            for record in found.records:
                # Elsewhere's past, and its refusals (ours the agent tells), are for those who were there.
                if is_history or (self._bind is None and isinstance(record, NodeRefused)):
                    self._terminal.remember(record)
                else:
                    self._terminal.tell(record)
                if isinstance(record, NodeLost):
                    self._fence(record)
                if isinstance(record, JobEnded):
                    self._ended = record
                    self._machine.stop_restarting()
                    self._done.set()
            is_history = is_history and len(found.records) > FEW_RECORDS

    def _fence(self, lost: NodeLost) -> None:
        """An agent here that was declared lost and lives, frozen perhaps, must not outlive its replacement's start."""
        if self._machine.running.get(lost.node) == lost.incarnation.pid:
            self._machine.signal(lost.node, signal.SIGKILL)

    async def _show_progress(self) -> None:
        while self._terminal.is_live:
            await anyio.sleep(0.5)
            try:
                assert self._channel is not None
                self._terminal.progress(await self._channel.call("GET", "/v1/progress", None, Progress))
            except WireError:
                self._terminal.progress(None)

    async def _take_signals(self) -> None:
        numbers = {signal.Signals[name] for name in self._request.signals} | {signal.SIGINT, signal.SIGTERM}
        with anyio.open_signal_receiver(*numbers) as signals:
            async for number in signals:
                self._stops += 1
                await self._stop(number)

    async def _stop(self, number: signal.Signals) -> None:
        """First signal: save and end. Second: end at once."""
        grace = self._request.job.rules.shutdown_timeout if self._stops == 1 else 0.0
        if self._stops > 2:
            self._done.set()
        if self._bind is None:  # control is elsewhere: this machine leaves the job
            self._machine.stop_restarting()
            for node in self._request.nodes:
                self._machine.signal(node.name, LEAVE_SIGNAL if self._stops == 1 else signal.SIGKILL)
            return
        stop = Stop(by=f"{number.name} to the launcher", signal=int(number), grace=grace)
        self._terminal.say(
            f"{number.name}: the workers have {grace:g} s to save and end; once more ends them at once"
            if grace
            else f"{number.name} again: everything is ended now"
        )
        for node in self._request.nodes:  # a scheduler may have sent them the signal too
            self._machine.signal(node.name, STAY_SIGNAL)
        if not await self._ask_control("/v1/stop", stop):
            self._codes[CONTROL] = 128 + int(number)
            self._done.set()

    async def _ask_control(self, path: str, what: Stop | None) -> bool:
        """Whether control has heard it. One that was sent the signal too is being started again: it is waited for."""
        with anyio.move_on_after(CONTROL_START):
            while self._channel is not None:
                try:
                    await self._channel.call("POST", path, what, Reply)
                except WireError:
                    await anyio.sleep(0.1)
                else:
                    return True
        return False

    async def _take_notices(self) -> None:
        """SIGUSR1: something is about to happen. All save soon, and that goes to storage; the job goes on."""
        with anyio.open_signal_receiver(signal.SIGUSR1) as signals:
            async for _ in signals:
                self._terminal.say("SIGUSR1: all ranks save at their next common step, and that goes to storage")
                await self._ask_control("/v1/save", None)

    # --- the end -----------------------------------------------------------------------------------------------------

    async def _end(self) -> None:
        """The agents have heard of the end from control; whoever is still there after a while is killed."""
        self._machine.stop_restarting()
        with anyio.move_on_after(1.0):  # the agents may have heard of the end before the log was read here
            while CONTROL in self._machine.running or (self._bind is None and 0 in self._codes.values()):
                if self._ended is not None:
                    break
                await anyio.sleep(0.02)
        deadline = time.monotonic() + END_SECONDS
        while time.monotonic() < deadline and self._agents_running():
            changed = self._machine.changed
            with anyio.move_on_after(max(0.0, deadline - time.monotonic())):
                await changed.wait()
        for node in self._request.nodes:
            self._machine.signal(node.name, signal.SIGKILL)
        await self._machine.close(signal.SIGTERM, 1.0)
        if self._channel is not None:
            await self._channel.aclose()

    def _agents_running(self) -> bool:
        if self._ended is None:
            return False
        return any(name != CONTROL for name in self._machine.running)

    def _exit_code(self) -> int:
        if self._ended is not None:
            return self._ended.exit_code
        worst = max(self._codes.values(), default=EXIT_FAILED)
        return EXIT_FAILED if worst == EXIT_UNAVAILABLE else worst


async def find_job(address: Address, token: str, ca: str | None, seconds: float) -> Pong | None:
    """What the control at `address` says of its job; None: nobody answers there within `seconds`.

    Raises ConfigError when it answers that it will not talk to us.
    """
    channel = Channel(address, token, client_tls(ca) if ca is not None else None)
    deadline = time.monotonic() + seconds
    try:
        while True:
            try:
                return await channel.call("GET", "/v1/ping", None, Pong)
            except AccessDeniedError as problem:
                raise ConfigError(f"{problem}: set the same PERDURE_TOKEN on all machines") from None
            except UntrustedError as problem:
                raise ConfigError(str(problem)) from None
            except RefusedError as problem:
                if problem.status < 500:
                    raise ConfigError(f"control at {address} refuses to talk: {problem}") from None
            except WireError:
                pass
            if time.monotonic() >= deadline:
                return None
            await anyio.sleep(0.2)
    finally:
        await channel.aclose()


def _how(life: Life) -> str:
    if life.signal is not None:
        return signal.Signals(life.signal).name if life.signal in set(signal.Signals) else f"signal {life.signal}"
    return "fenced" if life.exit_code == EXIT_FENCED else f"exit code {life.exit_code}"
