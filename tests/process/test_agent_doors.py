"""The agent's doors, with real processes, pipes, cgroups and a real fork server."""

import json
import os
import pty
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import msgspec
import pytest

from perdure.agent.config import AgentConfig, OutputConfig
from perdure.agent.console import Console
from perdure.agent.launch import base_env, worker_env
from perdure.agent.output import Outputs, WorkerOutput
from perdure.agent.standby import ForkServer, spawn_store
from perdure.errors import ConfigError, HostError
from perdure.host.memory import MemoryGroup, OomWatch, memory_group_of
from perdure.host.proc import children_of, descendants_of, incarnation, read_process, read_state
from perdure.host.processes import Children, set_subreaper, start_process
from perdure.vocab.generation import Address, Assignment, Member
from perdure.vocab.ids import GenerationNumber, JobId, NodeId, Rank
from perdure.wire.messages import Duty, Entry, ForkRequest, Launch, Orders
from perdure.wire.page import HeartbeatPage
from tests.torch_release import like_torchrun

pytestmark = pytest.mark.anyio
ONE = GenerationNumber(1)
ENV = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def config(tmp_path: Path, script: str = "", **fields: object) -> AgentConfig:
    target = tmp_path / "train.py"
    target.write_text(script)
    given = AgentConfig(
        job=JobId("j"),
        node=NodeId("a"),
        control=Address("127.0.0.1", 1),
        address="127.0.0.1",
        slots=2,
        world="w",
        launch=Launch(entry=Entry.SCRIPT, target=str(target)),
        python=sys.executable,
        run_id="run",
        max_restarts=0,
        output=OutputConfig(log_dir=str(tmp_path / "logs")),
    )
    return msgspec.structs.replace(given, **fields)


def with_output(tmp_path: Path, **fields: object) -> AgentConfig:
    return config(tmp_path, output=OutputConfig(log_dir=str(tmp_path / "logs"), **fields))  # type: ignore[arg-type]


def python(code: str) -> list[str]:
    return [sys.executable, "-u", "-c", code]


@asynccontextmanager
async def registry(orphan_age: float = 5.0) -> AsyncIterator[Children]:
    workers = Children(orphan_age)
    try:
        with anyio.fail_after(60):
            yield workers
    finally:
        for pid in workers.pids:
            workers.signal(pid, signal.SIGKILL)
        while workers.pids:
            await workers.exits.receive()
        workers.close()


async def started(workers: Children, code: str, tag: str = "w") -> tuple[int, int]:
    """(pid, read end of its stdout), once it has printed its first byte."""
    read_fd, write_fd = os.pipe()
    pid = await workers.spawn(python(code), ENV, None, write_fd, None)
    os.close(write_fd)
    workers.adopt(pid, tag)
    await anyio.wait_readable(read_fd)
    return pid, read_fd


async def printed(fd: int) -> str:
    """Everything until the other end is closed."""
    parts = []
    while True:
        await anyio.wait_readable(fd)
        part = os.read(fd, 65536)
        if not part:
            os.close(fd)
            return b"".join(parts).decode()
        parts.append(part)


async def until(condition: Callable[[], bool]) -> None:
    """For what the kernel announces nowhere; bounded by the test's own limit."""
    while not condition():  # noqa: ASYNC110 - there is no event
        await anyio.sleep(0.01)


def text(*path: object) -> str:
    return Path(*map(str, path)).read_text()


# --- workers ---------------------------------------------------------------------------------------------------------


async def test_exits_tell_code_or_signal_with_the_tag() -> None:
    async with registry() as workers:
        for code, tag in (("raise SystemExit(7)", "seven"), ("import os; os.kill(os.getpid(), 9)", "killed")):
            workers.adopt(await workers.spawn(python(code), ENV, None, None, None), tag)
        exits = {e.tag: (e.exit_code, e.signal) for e in [await workers.exits.receive() for _ in range(2)]}
        assert exits == {"seven": (7, None), "killed": (None, signal.SIGKILL)}


async def test_spawn_gives_a_session_folder_descriptors_and_processors(tmp_path: Path) -> None:
    code = (
        "import os, sys; print(os.getsid(0) == os.getpid(), os.getcwd(), os.sched_getaffinity(0),"
        " sys.stdin.read() == '', os.write(int(sys.argv[1]), b'x'))"
    )
    cpu = min(os.sched_getaffinity(0))
    out, out_write = os.pipe()
    extra, extra_write = os.pipe()
    async with registry() as workers:
        argv = [*python(code), str(extra_write)]
        pid = await workers.spawn(argv, ENV, str(tmp_path), out_write, None, [extra_write], [cpu])
        workers.adopt(pid, "w")
        for fd in (out_write, extra_write):
            os.close(fd)
        assert await printed(out) == f"True {tmp_path} {{{cpu}}} True 1\n"
        assert await printed(extra) == "x"
        assert (await workers.exits.receive()).exit_code == 0


async def test_signal_reaches_the_group_once_and_never_a_pid_that_has_ended() -> None:
    code = (
        "import os, signal, time\n"
        "def stop(number, frame): os.write(1, b'%d ' % number); os._exit(0)\n"
        "signal.signal(signal.SIGTERM, stop)\n"
        "child = os.fork()\n"
        "os.write(1, b'up ')\n"
        "while True: time.sleep(60)"
    )
    async with registry() as workers:
        pid, out = await started(workers, code)
        up = os.read(out, 6)
        while len(up) < 6:  # Python forgets signals that arrive while it forks
            await anyio.wait_readable(out)
            up += os.read(out, 6 - len(up))
        assert workers.signal(pid, signal.SIGTERM)
        assert (await printed(out)).split() == ["15", "15"]
        await workers.exits.receive()
        assert not workers.signal(pid, signal.SIGTERM)
        assert not workers.signal(os.getpid(), signal.SIGTERM)  # not ours to signal


async def test_a_worker_that_left_its_group_is_still_reached() -> None:
    code = "import os, time; os.fork() or (os.setpgid(0, 0), os.write(1, b'up'), time.sleep(60)); os.wait()"
    async with registry() as workers:
        pid, out = await started(workers, code)
        child = children_of(pid)[0]
        workers.adopt(child, "child")  # not our child: it can be signalled, its exit code is its parent's to know
        assert workers.signal(child, signal.SIGKILL)
        ends = [await workers.exits.receive() for _ in range(2)]
        assert {(e.tag, e.exit_code, e.signal) for e in ends} == {("child", None, None), ("w", 0, None)}
        os.close(out)


@pytest.mark.parametrize(
    ("argv", "cwd", "sentence"),
    [
        (["./no-such-program"], None, "no-such-program cannot be started: there is no such program"),
        (["./plain"], None, "permission denied; make it executable"),
        (["./empty"], None, "it is no program"),
        ([sys.executable], "/no-such-folder", "working directory /no-such-folder does not exist"),
    ],
)
async def test_what_cannot_be_started_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, argv: list[str], cwd: str | None, sentence: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, mode in (("plain", 0o644), ("empty", 0o755)):
        os.close(os.open(name, os.O_CREAT, mode))
    async with registry() as workers:
        with pytest.raises(HostError, match=sentence):
            await workers.spawn(argv, ENV, cwd, None, None)
        with pytest.raises(HostError, match="may not use them"):
            await workers.spawn(python(""), ENV, None, None, None, cpus=[4095])


async def test_sweep_kills_those_that_left_and_spares_whole_families() -> None:
    set_subreaper()
    family = "import os, time; os.fork(); os.write(1, b'up'); time.sleep(300)"
    stray = (  # like a data loader's helper: another session, and its parent is gone
        "import os, time\n"
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    if os.fork() == 0: os.write(1, b'up')\n"
        "    time.sleep(300)\n"
        "os._exit(0)"
    )
    async with registry(orphan_age=0.0) as workers:
        spared, out = await started(workers, family, "spared")
        await until(lambda: len(children_of(spared)) == 1)
        _, stray_out = await started(workers, stray, "parent")
        assert (await workers.exits.receive()).tag == "parent"
        mine = descendants_of(os.getpid(), {spared})
        assert len(mine) == 2
        await until(lambda: not workers.sweep({spared}))
        assert await printed(stray_out) == "up"
        await until(lambda: not descendants_of(os.getpid(), {spared}))  # and reaped
        assert len(descendants_of(os.getpid())) == 2
        assert workers.sweep(set()) is not None
        assert (await workers.exits.receive()).signal == signal.SIGKILL
        await printed(out)


async def test_workers_die_with_the_agent() -> None:
    code = (
        "import sys; from perdure.host.processes import start_process\n"
        "import os, time\n"
        "pid = start_process([sys.executable, '-c', 'import time; time.sleep(300)'], os.environ)\n"
        "print(pid, flush=True); time.sleep(300)"
    )
    set_subreaper()
    async with registry() as workers:
        agent, out = await started(workers, code, "agent")
        worker = int(os.read(out, 100))
        workers.adopt(worker, "worker")  # it becomes our child when the agent dies
        workers.signal(agent, signal.SIGKILL)
        ends = {e.tag: e.signal for e in [await workers.exits.receive() for _ in range(2)]}
        assert ends == {"agent": signal.SIGKILL, "worker": signal.SIGKILL}
        os.close(out)


# --- readings --------------------------------------------------------------------------------------------------------


async def test_readings_of_a_stopped_a_dead_and_a_gone_process() -> None:
    async with registry() as workers:
        pid, out = await started(workers, "import os, time; os.write(1, b'x'); time.sleep(300)")
        life = incarnation(pid)
        assert life.pid == pid
        assert life != incarnation(os.getpid())
        workers.signal(pid, signal.SIGSTOP)
        await until(lambda: read_state(pid) == "T")
        reading = read_process(pid)
        assert reading is not None
        assert (reading.state, reading.parent, reading.children) == ("T", os.getpid(), 0)
        assert reading.started_ticks == life.started_ticks
        assert reading.rss > 1 << 20
        workers.signal(pid, signal.SIGKILL)
        await workers.exits.receive()
        assert read_process(pid) is None
        assert read_state(pid) is None
        with pytest.raises(HostError, match=f"process {pid} is gone"):
            incarnation(pid)
        os.close(out)


@pytest.fixture
def memory_cgroup() -> Iterator[MemoryGroup]:
    here = memory_group_of(os.getpid())
    if here is None or here.version != 1:
        pytest.skip("memory is not under cgroup v1 here")
    folder = f"{here.root}/perdure-test-{os.getpid()}"
    try:
        os.mkdir(folder)
        Path(folder, "memory.limit_in_bytes").write_text(str(64 << 20))
    except OSError as error:
        pytest.skip(f"a memory cgroup cannot be made here: {error}")
    yield MemoryGroup(folder, here.root, 1)
    os.rmdir(folder)


async def test_an_oom_kill_is_told_from_a_sigkill(memory_cgroup: MemoryGroup) -> None:
    hog = (
        f"import os; open('{memory_cgroup.path}/cgroup.procs', 'w').write(str(os.getpid()))\n"
        "hoard = [bytearray(1 << 20) for _ in range(200)]"
    )
    watch = OomWatch(memory_cgroup)
    async with registry() as workers:
        killed, out = await started(workers, "import os, time; os.write(1, b'x'); time.sleep(300)", "killed")
        pid = await workers.spawn(python(hog), ENV, None, None, None)
        workers.adopt(pid, "hog")
        assert (await workers.exits.receive()).signal == signal.SIGKILL
        workers.signal(killed, signal.SIGKILL)
        await workers.exits.receive()
        evidence = watch.evidence(pid, 5)
        assert evidence is not None
        assert (evidence.by, evidence.limit, evidence.usage) == ("cgroup", 64 << 20, 64 << 20)
        if (
            f"Killed process {pid} " in evidence.line
        ):  # the kernel's log can be read here, so the other is known to be none
            assert evidence.rss is not None
            assert 32 << 20 < evidence.rss < 96 << 20
            assert watch.evidence(killed, None) is None
        watch.snapshot()
        assert watch.evidence(pid, None) is None
        os.close(out)
    watch.close()
    await until(lambda: not Path(memory_cgroup.path, "cgroup.procs").read_text())


# --- output ----------------------------------------------------------------------------------------------------------


async def run_workers(cfg: AgentConfig, *codes: str, restarts: int = 0) -> tuple[list[WorkerOutput], str]:
    """Run one worker per code as local ranks 0, 1 …; gives their outputs and their folder."""
    async with registry() as workers, anyio.create_task_group() as tasks:
        outputs = Outputs(cfg, tasks)
        opened = []
        for rank, code in enumerate(codes):
            output = outputs.open(restarts, ONE, rank, rank + 4)
            pid = await workers.spawn(python(code), ENV, None, output.stdout_fd, output.stderr_fd)
            output.close_child_ends()
            workers.adopt(pid, rank)
            opened.append(output)
        for _ in codes:
            await workers.exits.receive()
        for output in opened:
            await output.finish(5.0)
        await outputs.close()
    return opened, outputs.directory or ""


async def test_output_is_kept_shown_with_a_prefix_and_remembered(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    code = "import sys; print('hello'); print('no end', end=''); sys.stderr.write('bad\\nworse')"
    opened, folder = await run_workers(config(tmp_path), code, "print('other')")
    files = {
        (rank, name): text(folder, "attempt_0", rank, name)
        for rank in (0, 1)
        for name in os.listdir(f"{folder}/attempt_0/0")
    }
    assert files == {
        (0, "stdout.log"): "hello\nno end",
        (0, "stderr.log"): "bad\nworse",
        (1, "stdout.log"): "other\n",
        (1, "stderr.log"): "",
    }
    shown = capfd.readouterr()
    assert sorted(shown.out.splitlines()) == ["[default4]:hello", "[default4]:no end", "[default5]:other"]
    assert shown.err == "[default4]:bad\n[default4]:worse\n"
    assert opened[0].tail() == "bad\nworse"
    assert opened[0].error_file == f"{folder}/attempt_0/0/error.json"
    assert os.path.basename(folder).startswith("run_")


async def test_redirects_tee_rank_filter_and_line_filters(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    cfg = with_output(tmp_path, redirects={0: 3}, tee={1: 1}, ranks_filter=(0, 1), stdout_filters=("loss", "lr"))
    code = "import sys; print('loss 1'); print('noise'); sys.stderr.write('err\\n')"
    _, folder = await run_workers(cfg, code, code, code)
    shown = capfd.readouterr()
    assert shown.out == "[default5]:loss 1\n[default5]:noise\n"  # 0 is redirected, 2 filtered
    assert shown.err == "[default5]:err\n"
    assert text(folder, "attempt_0/filtered_stdout.log") == "[default5]:loss 1\n"
    assert [text(folder, "attempt_0", i, "stdout.log") for i in range(3)] == ["loss 1\nnoise\n"] * 3


async def test_lines_of_several_workers_are_never_torn(
    tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    code = (
        "import os, sys\n"
        "line = b'%s' * 30000 + b'\\xff\\n'\n"
        "for _ in range(40):\n"
        "    for at in range(0, len(line), 7001): os.write(1, line[at:at + 7001])"
    )
    await run_workers(config(tmp_path), code % "a", code % "b")
    lines = capfdbinary.readouterr().out.splitlines()
    assert (
        sorted(lines) == [b"[default4]:" + b"a" * 30000 + b"\xff"] * 40 + [b"[default5]:" + b"b" * 30000 + b"\xff"] * 40
    )


async def test_a_descendant_that_holds_the_pipe_does_not_hold_us(tmp_path: Path) -> None:
    async with registry() as workers, anyio.create_task_group() as tasks:
        outputs = Outputs(config(tmp_path), tasks)
        output = outputs.open(0, ONE, 0, 0)
        pid = await workers.spawn(python("print('x')"), ENV, None, output.stdout_fd, output.stderr_fd)
        workers.adopt(pid, "w")
        held = os.dup(output.stdout_fd)
        await workers.exits.receive()
        await output.finish(0.05)
        await outputs.close()
        os.close(held)
    assert text(outputs.directory, "attempt_0/0/stdout.log") == "x\n"


async def test_a_log_folder_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    async with anyio.create_task_group() as tasks:
        for log_dir, why in (
            (tmp_path / "file", "it is a file"),
            (Path("/proc/logs"), "No such file|Permission|denied"),
        ):
            with pytest.raises(ConfigError, match=f"log directory .* cannot be used: ({why})"):
                Outputs(config(tmp_path, output=OutputConfig(log_dir=str(log_dir))), tasks)


async def test_a_full_disk_is_told_once_and_training_goes_on(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    logs = tmp_path / "logs"
    logs.mkdir()
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(logs)], capture_output=True)
    if mount.returncode:
        pytest.skip("a small file system cannot be mounted here")
    try:
        cfg = with_output(tmp_path, tee=3)
        await run_workers(cfg, "for i in range(20000): print('line', i)", "print('small'); raise SystemExit(0)")
    finally:
        subprocess.run(["umount", "-l", str(logs)], check=True)
    shown = capfd.readouterr()
    assert shown.err.count("cannot be written (No space left on device)") == 1
    assert "[default4]:line 19999\n" in shown.out
    assert "[default5]:small\n" in shown.out


async def test_without_files_there_is_no_error_file(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    opened, _ = await run_workers(config(tmp_path, output=OutputConfig(log_dir="/dev/null")), "print('x')")
    assert opened[0].error_file == ""
    assert capfd.readouterr().out == "[default4]:x\n"


async def test_a_progress_bar_comes_through_at_once_and_others_stay_whole() -> None:
    read_fd, write_fd = os.pipe()
    console = Console(write_fd)
    bar, other = object(), object()
    console.show(bar, b"[0]:", b"\r 10%")
    assert os.read(read_fd, 100) == b"\r[0]: 10%"
    console.show(other, b"[1]:", b"hello\n")
    console.show(bar, b"[0]:", b"\r 20%")
    console.show(bar, b"[0]:", b" left")
    console.end_line(bar)
    assert os.read(read_fd, 100) == b"\n[1]:hello\n\r[0]: 20% left\n"
    console.close()
    os.close(read_fd)
    os.close(write_fd)


@pytest.mark.parametrize("kind", ["pipe", "terminal"])
async def test_a_reader_that_pauses_stops_neither_the_loop_nor_loses_a_byte(kind: str) -> None:
    read_fd, write_fd = os.pipe() if kind == "pipe" else pty.openpty()
    if kind == "terminal":
        subprocess.run(["stty", "raw", "-echo"], stdin=write_fd, check=True)
    console = Console(write_fd)
    lines = b"".join(b"%07d\n" % i for i in range(100_000))
    console.show(None, b"", lines)
    with anyio.move_on_after(0.05) as waiting:
        await console.room()
    assert waiting.cancelled_caught  # so readers wait, and the loop goes on
    assert os.get_blocking(write_fd)  # which others share
    got = b""
    with anyio.fail_after(60):
        while len(got) < len(lines):
            await anyio.wait_readable(read_fd)
            got += os.read(read_fd, 65536)
        await console.drained()
    assert got == lines
    console.close()
    os.close(read_fd)
    os.close(write_fd)


async def test_a_reader_that_has_gone_is_no_error() -> None:
    read_fd, write_fd = os.pipe()
    console = Console(write_fd)
    os.close(read_fd)
    console.show(None, b"", b"x\n" * 100_000)
    await console.room()
    await console.drained()
    os.close(write_fd)


# --- the fork server and the store -----------------------------------------------------------------------------------

SCRIPT = "import os, sys; print(os.environ['RANK'], sys.argv[1:]); sys.exit(int(os.environ['RANK']) + 5)"


def request(cfg: AgentConfig, slot: int) -> ForkRequest:
    launch = msgspec.structs.replace(cfg.launch, args=("--x", str(slot)))
    return ForkRequest(id=0, launch=launch, env={"RANK": str(slot)}, slot=slot, generation=ONE)


async def test_fork_server_forks_several_at_once_and_they_are_ours(tmp_path: Path) -> None:
    set_subreaper()
    cfg = config(tmp_path, SCRIPT)
    page = HeartbeatPage(2)
    server = ForkServer()
    async with registry() as workers, anyio.create_task_group() as tasks:
        outputs = Outputs(cfg, tasks)
        await server.start(cfg, base_env(cfg, ENV))
        assert (await server.wait_ready()).warm

        async def fork(slot: int) -> None:
            output = outputs.open(0, ONE, slot, slot)
            pid = await server.fork(request(cfg, slot), (output.stdout_fd, output.stderr_fd, page.fd))
            output.close_child_ends()
            workers.adopt(pid, output)

        async with anyio.create_task_group() as forks:
            for slot in range(2):
                forks.start_soon(fork, slot)
        ends = [await workers.exits.receive() for _ in range(2)]
        assert sorted(e.exit_code or 0 for e in ends) == [5, 6]
        for end in ends:
            await end.tag.finish(5.0)
        await server.close()
        await outputs.close()
    texts = [text(outputs.directory, "attempt_0", i, "stdout.log") for i in range(2)]
    assert texts == ["0 ['--x', '0']\n", "1 ['--x', '1']\n"]
    assert (server.exit_code, server.signal) in [(0, None), (None, signal.SIGKILL)]
    page.close()


async def test_fork_server_that_dies_fails_every_call_at_once(tmp_path: Path) -> None:
    cfg = config(tmp_path)
    server = ForkServer()
    with anyio.fail_after(60):
        await server.start(cfg, base_env(cfg, ENV))
        await server.wait_ready()
        os.kill(server.pid, signal.SIGSTOP)  # so that the requests are waiting when it dies
        failures = []

        async def ask() -> None:
            try:
                await server.start_store("127.0.0.1", 0)
            except HostError as error:
                failures.append(str(error))

        async with anyio.create_task_group() as tasks:
            for _ in range(3):
                tasks.start_soon(ask)
            await anyio.wait_all_tasks_blocked()
            os.kill(server.pid, signal.SIGKILL)
        assert failures == [f"the fork server (process {server.pid}) has ended; workers are spawned meanwhile"] * 3
        await server.closed.wait()
        assert (server.exit_code, server.signal) == (None, signal.SIGKILL)
        with pytest.raises(HostError, match="has ended"):
            await server.fork(request(cfg, 0), ())
        await server.close()


async def test_fork_server_that_cannot_start_is_told_by_wait_ready(tmp_path: Path) -> None:
    cfg = config(tmp_path, python="/bin/false")
    server = ForkServer()
    with anyio.fail_after(60):
        await server.start(cfg, base_env(cfg, ENV))
        with pytest.raises(HostError, match="has ended"):
            await server.wait_ready()
        await server.closed.wait()
        assert server.exit_code == 1
    with pytest.raises(HostError, match="there is no such program"):
        await ForkServer().start(config(tmp_path, python="/no/python"), ENV)
    with pytest.raises(ConfigError, match="no fork server"):
        await ForkServer().start(config(tmp_path, launch=Launch(entry=Entry.PROGRAM, target="a.out")), ENV)


async def test_stores_listen_when_their_port_is_told(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    set_subreaper()
    cfg = config(tmp_path, preload=("torch",))
    env = base_env(cfg, ENV)
    server = ForkServer()
    async with registry() as workers:
        await server.start(cfg, env)
        await server.wait_ready()
        with socket.create_server(("127.0.0.1", 0)) as taken:
            with pytest.raises(HostError, match="cannot listen on"):
                await server.start_store("127.0.0.1", taken.getsockname()[1])
        stores = [await server.start_store("127.0.0.1", 0), await spawn_store(cfg, env, "127.0.0.1", 0)]
        for pid, port in stores:
            workers.adopt(pid, "store")
            socket.create_connection(("127.0.0.1", port)).close()
            workers.signal(pid, signal.SIGTERM)
            end = await workers.exits.receive()
            assert (end.tag, end.pid) == ("store", pid)
        await server.close()
    with pytest.raises(HostError, match="ended before it listened"):
        await spawn_store(config(tmp_path, python="/bin/false"), env, "127.0.0.1", 0)


# --- torchrun --------------------------------------------------------------------------------------------------------


@like_torchrun
async def test_the_environment_is_torchruns(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    (tmp_path / "dump.py").write_text(
        f"import json, os; json.dump(dict(os.environ), open('{tmp_path}/' + os.environ['RANK'], 'w'))"
    )
    clean = {k: v for k, v in ENV.items() if k != "OMP_NUM_THREADS"}
    run = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        str(tmp_path / "dump.py"),
    ]
    with anyio.fail_after(100):
        await anyio.run_process(run, env=clean)
    cfg = config(tmp_path)
    member = Member(node=NodeId("a"), first_rank=Rank(0), count=2)
    assignment = Assignment(number=ONE, members=(member,), store_host=NodeId("a"))
    orders = Orders(version=1, job=cfg.job, duty=Duty.RUN, generation=ONE, assignment=assignment, store=Address("h", 1))
    differ = {"MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE"}
    for rank in range(2):
        theirs = json.loads((tmp_path / str(rank)).read_text())
        ours = {**base_env(cfg, clean), **worker_env(cfg, orders, rank, "e", clean)}
        # which torchrun sets nowhere, and what its own start leaves behind
        own = {k for k in ours if k.startswith("PERDURE_")} | {"PYTORCH_NVML_BASED_CUDA_CHECK", "GLIBC_TUNABLES"}
        assert differ <= theirs.keys()
        assert theirs.keys() - ours.keys() <= {"TORCHELASTIC_SIGNALS_TO_HANDLE", "KINETO_LOG_LEVEL", "LC_CTYPE"}
        assert ours.keys() - theirs.keys() == own
        assert {k for k in theirs.keys() & ours.keys() if theirs[k] != ours[k]} <= differ


def test_start_process_needs_no_event_loop() -> None:
    pid = start_process([sys.executable, "-c", "raise SystemExit(3)"], ENV)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3
