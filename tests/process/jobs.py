"""A real `perdure run` under test: started as a user starts it, watched through its event log, hurt, and counted after.

Tests wait for records of the log (`wait_for`), never for a time.
"""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import perdure
from perdure.errors import EventLogError
from perdure.host.proc import read_stat
from perdure.ports import LogRecord
from perdure.store.eventlog import open_reader
from perdure.vocab.decision import Decision
from perdure.vocab.event import (
    GenerationBegan,
    GenerationRunning,
    JobEnded,
    NodeDisconnected,
    NodeJoined,
    NodeLeft,
    NodeLost,
    StepsBegun,
    WorkersStarted,
)
from perdure.vocab.ids import NodeId

SOURCE = str(Path(perdure.__file__).parents[1])
SCRIPTS = Path(__file__).parent / "scripts"
LIMIT = 60.0
"""Seconds after which a wait has failed: far above what anything here takes on a busy machine."""
POLL = 0.01
R = TypeVar("R")


class Job:
    """One launcher and what it started. `process` is the launcher."""

    def __init__(self, process: subprocess.Popen[bytes], home: Path, name: str, out: Path) -> None:
        self.process, self.home, self.name, self._out = process, home, name, out
        self.folder = home / "jobs" / name

    # --- what it says ------------------------------------------------------------------------------------------------

    @property
    def output(self) -> str:
        """stdout and stderr of the launcher and of everything below it."""
        return self._out.read_text(errors="replace")

    def records(self) -> list[LogRecord]:
        path = self.folder / "events.db"
        if not path.exists():
            return []
        try:
            reader = open_reader(str(path))
        except EventLogError:
            return []  # it is just being made
        try:
            return [record for _, record in reader.read()]
        finally:
            reader.close()

    def all(self, kind: type[R]) -> list[R]:
        return [record for record in self.records() if isinstance(record, kind)]

    def wait_for(self, what: Callable[[list[LogRecord]], R | None], *, seconds: float = LIMIT) -> R:
        """The first true answer of `what` to the log as it grows."""
        deadline = time.monotonic() + seconds
        while True:
            ended = self.process.poll() is not None  # asked before the log is read: what it wrote last counts
            found = what(self.records())
            if found:
                return found
            assert not ended, f"the job ended ({self.process.returncode}) before that happened:\n{self.output}"
            assert time.monotonic() < deadline, f"not within {seconds} s:\n{self.output}\n{self.records()[-5:]}"
            time.sleep(POLL)

    def wait_event(self, kind: type[R], count: int = 1, where: Callable[[R], bool] = lambda _: True) -> R:
        """The `count`-th event of `kind`."""

        def find(records: list[LogRecord]) -> R | None:
            found = [r for r in records if isinstance(r, kind) and where(r)]
            return found[count - 1] if len(found) >= count else None

        return self.wait_for(find)

    def wait_running(self, generation: int) -> None:
        """Until `generation`, or a later one, runs."""
        self.wait_event(GenerationRunning, where=lambda e: e.generation >= generation)

    def wait_stepping(self, generation: int) -> None:
        """Until every member of the current generation, at least `generation`, has finished a step."""

        def find(records: list[LogRecord]) -> bool:
            began = [r for r in records if isinstance(r, GenerationBegan)]
            if not began or began[-1].assignment.number < generation:
                return False
            begun = {
                r.node for r in records if isinstance(r, StepsBegun) and r.generation == began[-1].assignment.number
            }
            return set(began[-1].assignment.nodes) <= begun

        self.wait_for(find)

    def end(self, *, seconds: float = LIMIT) -> int:
        """The launcher's exit code, waited for."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the job has not ended within {seconds} s:\n{self.output}") from None

    # --- who is who --------------------------------------------------------------------------------------------------

    def generation(self) -> GenerationBegan:
        return self.all(GenerationBegan)[-1]

    def workers(self) -> dict[int, int]:
        """Pid by rank, of the newest generation that has started."""
        records = self.records()
        began = [r for r in records if isinstance(r, GenerationBegan)][-1].assignment
        found: dict[int, int] = {}
        for record in records:
            if isinstance(record, WorkersStarted) and record.generation == began.number:
                member = began.member(record.node)
                assert member is not None
                found.update(zip(member.ranks, record.pids, strict=True))
        return found

    def agent(self, node: str) -> int:
        """Pid of the newest life of a node's agent."""
        return [r for r in self.all(NodeJoined) if r.node.id == node][-1].node.incarnation.pid

    def control(self) -> int:
        """Pid of the control that lives now; waited for, where it is just being started again."""

        def find() -> int | None:
            path = self.folder / "control"
            match = re.search(rb'"pid":\s*(\d+)', path.read_bytes()) if path.exists() else None
            return int(match[1]) if match is not None and read_stat(int(match[1])) is not None else None

        return wait_until(find)

    def members(self) -> tuple[NodeId, ...]:
        return self.generation().assignment.nodes

    def decisions(self) -> list[Decision]:
        return self.all(Decision)

    def actions(self) -> list[str]:
        """Kinds of all actions decided, in order."""
        return [type(action).__name__ for decision in self.decisions() for action in decision.actions]

    # --- the nemesis -------------------------------------------------------------------------------------------------

    def kill_worker(self, rank: int, number: int = signal.SIGKILL) -> None:
        os.kill(self.workers()[rank], number)

    def kill_node(self, node: str) -> None:
        """A machine that loses power: its agent and everything below it at once."""
        agent = self.agent(node)
        pids = [agent, *descendants(agent)]
        for pid in pids:
            kill_quietly(pid, signal.SIGSTOP)  # else the kernel's own clean-up would be seen as events
        for pid in pids:
            kill_quietly(pid, signal.SIGKILL)

    def interrupt(self, number: int = signal.SIGTERM) -> None:
        """What a user or a scheduler sends to the launcher."""
        os.kill(self.process.pid, number)

    @contextmanager
    def launcher_frozen(self) -> Iterator[None]:
        """Nothing that dies is started again in the meantime, as when a machine is gone for longer."""
        os.kill(self.process.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(self.process.pid, signal.SIGCONT)

    def fork_servers(self) -> dict[str, int]:
        """Pid by node. What it forks looks like it in /proc, but is younger."""
        found = {}
        for node in {record.node.id for record in self.all(NodeJoined)}:
            forked = [p for p in descendants(self.agent(node)) if "trainer.forkserver" in command_of(p)]
            ages = {pid: stat.started_ticks for pid in forked if (stat := read_stat(pid)) is not None}
            if ages:
                found[str(node)] = min(ages, key=lambda pid: (ages[pid], pid))
        return found

    def cpu_seconds(self, pid: int) -> float:
        stat = read_stat(pid)
        assert stat is not None
        return stat.cpu


def environment(home: Path, env: dict[str, str] | None = None) -> dict[str, str]:
    """What a `perdure` under test is started with."""
    return {**os.environ, "PERDURE_HOME": str(home), "PYTHONPATH": SOURCE, "PYTHONWARNINGS": "ignore", **(env or {})}


def perdure_words(*words: str) -> list[str]:
    """The command line of `perdure WORDS…`. -P, as the installed command is entered: not by the current folder."""
    return [sys.executable, "-P", "-m", "perdure.cli.main", *words]


def perdure(
    folder: Path, *words: str, env: dict[str, str] | None = None, home: Path | None = None, prefix: Sequence[str] = ()
) -> subprocess.CompletedProcess[str]:
    """`perdure WORDS…` in `folder`, to its end."""
    done = subprocess.run(
        [*prefix, *perdure_words(*words)],
        cwd=folder,
        env=environment(home or folder / "home", env),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert_no_traceback_of_ours(done.stdout + done.stderr)
    return done


def assert_no_traceback_of_ours(output: str) -> None:
    """A traceback of Perdure's own that reaches a user is a bug."""
    assert f'File "{SOURCE}/perdure' not in output, output


@contextmanager
def running(
    folder: Path,
    *words: str,
    name: str = "job",
    env: dict[str, str] | None = None,
    prefix: Sequence[str] = (),
    home: Path | None = None,
) -> Iterator[Job]:
    """`perdure run --rdzv-id NAME WORDS…` in `folder`; whatever is left of it is ended after the test.

    `prefix`: words before the command, as in `ip netns exec host`.
    """
    home = home or folder / "home"
    out = folder / f"{name}-{len(list(folder.glob('*.out')))}.out"
    environ = environment(home, env)
    argv = [*prefix, *perdure_words("run", "--rdzv-id", name, *words)]
    with out.open("wb") as file:
        process = subprocess.Popen(
            argv, cwd=folder, env=environ, stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True
        )
    job = Job(process, home, name, out)
    try:
        yield job
        assert_no_traceback_of_ours(job.output)
    except BaseException:
        print(job.output)  # pytest shows it with the failure
        raise
    finally:
        tree = [process.pid, *descendants(process.pid)] if process.poll() is None else []
        for pid in tree:
            kill_quietly(pid, signal.SIGKILL)
        process.wait(LIMIT)


def script(name: str) -> str:
    """Path of one of the scripts that tests train with."""
    return str(SCRIPTS / name)


def kill_quietly(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


def command_of(pid: int) -> str:
    """The command line of `pid`, empty where it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return ""


def wait_until(what: Callable[[], R | None], *, seconds: float = LIMIT) -> R:
    """The first true answer of `what`: for what happens outside of the event log."""
    deadline = time.monotonic() + seconds
    while not (found := what()):
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(POLL)
    return found


def descendants(pid: int) -> list[int]:
    """Everything below `pid`, parents first."""
    found: list[int] = []
    queue = [pid]
    while queue:
        parent = queue.pop(0)
        try:
            tasks = os.listdir(f"/proc/{parent}/task")
        except FileNotFoundError:
            continue
        for task in tasks:
            try:
                children = Path(f"/proc/{parent}/task/{task}/children").read_text().split()
            except (FileNotFoundError, ProcessLookupError):
                continue
            found.extend(int(c) for c in children)
            queue.extend(int(c) for c in children)
    return found


def processes_of(home: Path) -> dict[int, str]:
    """Live processes that have to do with a job in `home`: by their environment, whoever their parent is by now."""
    mark = f"PERDURE_HOME={home}".encode()
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            if mark in (entry / "environ").read_bytes().split(b"\0"):
                found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
    return found


def assert_ended(records: Sequence[LogRecord], exit_code: int) -> JobEnded:
    """The job's end, after which nothing comes but good-byes."""
    (ended,) = [record for record in records if isinstance(record, JobEnded)]
    after = records[records.index(ended) + 1 :]
    assert all(isinstance(record, NodeLeft | NodeDisconnected | NodeLost) for record in after), after
    assert ended.exit_code == exit_code, ended.reason
    return ended
