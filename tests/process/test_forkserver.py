"""A real fork server and real workers, forked and spawned, judged by what plain Python does with the same program.

The test is the agent here: a child subreaper that holds one end of the channel and the heartbeat page.
"""

import ctypes
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest

import perdure
from perdure.vocab.ids import GenerationNumber
from perdure.wire.layouts import LoopPhase
from perdure.wire.messages import (
    Entry,
    ForkReply,
    ForkRequest,
    ForkServerIn,
    ForkServerOut,
    ForkServerParked,
    ForkServerReady,
    Launch,
    StoreRequest,
)
from perdure.wire.page import HeartbeatPage
from perdure.wire.reading import SlotReading

LIMIT = 90.0  # seconds after which a wait has failed; far above what anything here takes
SOURCE = str(Path(perdure.__file__).parents[1])
BASE_ENV = {**os.environ, "PYTHONPATH": SOURCE, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}


class Ended(NamedTuple):
    code: int
    out: str
    err: str
    slot: SlotReading | None = None


class Worker(NamedTuple):
    """A forked worker. `wait` reaps it."""

    pid: int
    out: Path
    err: Path
    page: HeartbeatPage
    slot: int

    def wait(self) -> Ended:
        await_exit(self.pid)
        _, status = os.waitpid(self.pid, 0)
        code = os.waitstatus_to_exitcode(status)
        return Ended(code, self.out.read_text(), self.err.read_text(), self.page.read(self.slot))


def await_exit(pid: int) -> None:
    """Returns when the process has ended; it may be anyone's child."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        assert select.select([fd], [], [], LIMIT)[0], f"process {pid} still runs"
    finally:
        os.close(fd)


class Server:
    """A fork server with the test as its agent."""

    def __init__(self, folder: Path, target: str, kind: str = "script", preload: str = "") -> None:
        self.folder = folder
        self.page = HeartbeatPage(4)
        self.channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.channel.settimeout(LIMIT)
        argv = [sys.executable, "-u", "-m", "perdure.trainer.forkserver", "--fd", str(theirs.fileno()), "--nproc", "2"]
        argv += ["--preload", preload, "--script-kind", kind, "--target", target]
        self.process = subprocess.Popen(
            argv, pass_fds=[theirs.fileno()], cwd=folder, env=BASE_ENV, stdin=subprocess.DEVNULL
        )
        theirs.close()
        ready = self.receive()
        assert isinstance(ready, ForkServerReady)
        self.ready = ready
        self._count = 0

    def receive(self) -> ForkServerOut:
        message = msgspec.json.decode(self.channel.recv(1 << 20), type=ForkServerOut)
        if isinstance(message, ForkServerParked):
            self.parked = message.pids
            return self.receive()
        return message

    def wait_parked(self) -> tuple[int, ...]:
        """The processes that have been forked ahead, once there are some."""
        message = msgspec.json.decode(self.channel.recv(1 << 20), type=ForkServerOut)
        assert isinstance(message, ForkServerParked)
        return message.pids

    def send(self, request: ForkServerIn, fds: tuple[int, ...] = ()) -> None:
        socket.send_fds(self.channel, [msgspec.json.encode(request)], fds)

    def ask(self, request: ForkServerIn, fds: tuple[int, ...] = ()) -> ForkReply:
        self.send(request, fds)
        reply = self.receive()
        assert isinstance(reply, ForkReply)
        assert reply.id == request.id
        return reply

    def fork(self, launch: Launch, env: dict[str, str] | None = None, slot: int = 0, **more: object) -> Worker:
        self._count += 1
        out, err = self.folder / f"{self._count}.out", self.folder / f"{self._count}.err"
        self.page.clear(slot)
        self.page.stop_after(None)
        request = ForkRequest(
            id=self._count, launch=launch, env=env or {}, slot=slot, generation=GenerationNumber(3), **more
        )
        with out.open("ab", 0) as out_file, err.open("ab", 0) as err_file:
            reply = self.ask(request, (out_file.fileno(), err_file.fileno(), self.page.fd))
        assert reply.error == ""
        return Worker(reply.pid, out, err, self.page, slot)

    def close(self) -> None:
        self.channel.close()
        try:
            assert self.process.wait(LIMIT) in (0, -signal.SIGKILL)
        finally:
            self.process.kill()
            self.process.wait()
            self.page.close()


@pytest.fixture(scope="module", autouse=True)
def _subreaper() -> Iterator[None]:
    libc = ctypes.CDLL(None)
    libc.prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
    yield
    libc.prctl(36, 0, 0, 0, 0)


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server that has torch, for all tests: requests name their own program."""
    folder = tmp_path_factory.mktemp("warm")
    (folder / "main.py").write_text("import torch\nimport nowhere_to_be_found\n")
    server = Server(folder, "main.py")
    assert server.ready.warm, server.ready.note
    yield server
    server.close()


@pytest.fixture
def plain(tmp_path: Path) -> Iterator[Server]:
    """A server of a program without torch."""
    (tmp_path / "main.py").write_text("import json\n")
    server = Server(tmp_path, "main.py")
    yield server
    server.close()


Launcher = Callable[..., Ended]


@pytest.fixture(params=["fork", "spawn"])
def launch(request: pytest.FixtureRequest, warm: Server) -> Launcher:
    """Runs a program to its end by either way, in the folder of the warm server."""

    def fork(target: str, *args: str, entry: Entry = Entry.SCRIPT, env: dict[str, str] | None = None) -> Ended:
        return warm.fork(Launch(entry=entry, target=target, args=args), env).wait()

    def spawn(target: str, *args: str, entry: Entry = Entry.SCRIPT, env: dict[str, str] | None = None) -> Ended:
        page = HeartbeatPage(1)
        argv = [sys.executable, "-u", "-m", "perdure.trainer.worker", "--heartbeat-fd", str(page.fd), "--slot", "0"]
        argv += ["--generation", "3", "--kind", entry.value, "--target", target, "--", *args]
        ended = run(argv, warm.folder, env, (page.fd,))
        reading = page.read(0)
        page.close()
        return ended._replace(slot=reading)

    return fork if request.param == "fork" else spawn


def run(argv: list[str], cwd: Path, env: dict[str, str] | None = None, fds: tuple[int, ...] = ()) -> Ended:
    done = subprocess.run(
        argv,
        cwd=cwd,
        env={**BASE_ENV, **(env or {})},
        pass_fds=fds,
        capture_output=True,
        text=True,
        timeout=LIMIT,
        start_new_session=True,
        stdin=subprocess.DEVNULL,
    )
    return Ended(done.returncode, done.stdout, done.stderr)


def program(folder: Path, name: str, text: str) -> str:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return name


# --- the program cannot tell -----------------------------------------------------------------------------------------

FACTS = """
'''Doc.'''
import json, os, signal, sys, threading
names = sorted(globals())
from beside import VALUE
print(json.dumps({
    "names": names, "argv": sys.argv, "orig": sys.orig_argv, "file": __file__, "name": __name__, "doc": __doc__,
    "path0": sys.path[0], "spec": __spec__ and __spec__.name, "package": __package__,
    "loader": type(__loader__).__name__,
    "main": sys.modules["__main__"].__dict__ is globals(), "cwd": os.getcwd(), "value": VALUE,
    "leader": os.getsid(0) == os.getpid(), "stdin": sys.stdin.read(),
    "raw": [type(s.buffer).__name__ for s in (sys.stdout, sys.stderr)], "through": sys.stdout.write_through,
    "encodings": [(s.encoding, s.errors, s.line_buffering) for s in (sys.stdout, sys.stderr)],
    "handlers": {s.name: str(signal.getsignal(s)) for s in signal.valid_signals() if isinstance(s, signal.Signals)
                 and "function" not in str(signal.getsignal(s))},
    "blocked": len(signal.pthread_sigmask(signal.SIG_BLOCK, ())), "threads": threading.active_count(),
    "main_thread": threading.main_thread() is threading.current_thread(), "mine": os.environ["MINE"],
}))
print("to stderr", file=sys.stderr)
"""


@pytest.mark.parametrize("entry", [Entry.SCRIPT, Entry.MODULE])
def test_program_sees_the_same_as_under_plain_python(launch: Launcher, warm: Server, entry: Entry) -> None:
    program(warm.folder, "facts/beside.py", "VALUE = 5")
    program(warm.folder, "beside.py", "VALUE = 6")
    program(warm.folder, "facts/show.py", FACTS)
    target = "facts/show.py" if entry is Entry.SCRIPT else "facts.show"
    command = [target] if entry is Entry.SCRIPT else ["-m", target]
    expected = run([sys.executable, "-u", *command, "a", "--b=c"], warm.folder, {"MINE": "x"})
    ended = launch(target, "a", "--b=c", entry=entry, env={"MINE": "x"})
    assert (ended.code, ended.err) == (0, "to stderr\n")
    assert json.loads(ended.out) == json.loads(expected.out)


ENDINGS = {
    "normal": "print('x', end='')",
    "zero": "import sys; sys.exit(0)",
    "three": "import sys; sys.exit(3)",
    "text": "import sys; sys.exit('good-bye')",
    "exception": "def f():\n    raise ValueError('no')\nf()",
    "chained": "try:\n    1/0\nexcept ZeroDivisionError as e:\n    raise KeyError('k') from e",
    "group": "raise ExceptionGroup('g', [ValueError(1)])",
    "interrupt": "raise KeyboardInterrupt",
    "own interrupt": "import os, signal, time; os.kill(os.getpid(), signal.SIGINT); time.sleep(60)",
    "killed": "import os; print('before'); os.kill(os.getpid(), 9)",
    "at once": "import os; print('before', end=''); os._exit(7)",
    "terminated": "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
    "syntax": "x = = 1",
    "hook": "import sys\nsys.excepthook = lambda t, v, tb: print('mine', t, tb.tb_lineno)\n\nraise ValueError",
    "atexit": "import atexit, sys\natexit.register(print, 'last', file=sys.stderr)\nraise ValueError('no')",
    "thread": "import threading\ndef late():\n    threading.main_thread().join()\n    print('after')\n"
    "threading.Thread(target=late).start()\nraise ValueError('no')",
    "forks": "import os\npid = os.fork()\nif pid == 0:\n    raise ValueError('child')\nos.waitpid(pid, 0)",
}


@pytest.mark.parametrize("name", ENDINGS)
def test_program_ends_as_under_plain_python(launch: Launcher, warm: Server, name: str) -> None:
    target = program(warm.folder, f"ending_{name.replace(' ', '_')}.py", ENDINGS[name])
    expected = run([sys.executable, "-u", target], warm.folder)
    ended = launch(target)
    assert ended[:3] == expected[:3]


def test_missing_script_is_reported_as_by_python(launch: Launcher, warm: Server) -> None:
    expected = run([sys.executable, "-u", "nowhere.py"], warm.folder)
    assert launch("nowhere.py")[:3] == expected[:3]


def test_missing_module_is_reported_as_by_python(launch: Launcher, warm: Server) -> None:
    expected = run([sys.executable, "-um", "nowhere.at_all"], warm.folder)
    assert launch("nowhere.at_all", entry=Entry.MODULE)[:3] == expected[:3]


def test_folder_with_main_runs(launch: Launcher, warm: Server) -> None:
    program(warm.folder, "app/__main__.py", "import sys, part; print(__name__, part.X, sys.argv)")
    program(warm.folder, "app/part.py", "X = 4")
    assert launch("app", "a")[:3] == run([sys.executable, "-u", "app", "a"], warm.folder)[:3]


def test_module_traceback_shows_no_frame_before_the_program(launch: Launcher, warm: Server) -> None:
    program(warm.folder, "failing_module.py", "raise ValueError('no')")
    ended = launch("failing_module", entry=Entry.MODULE)
    assert ended.code == 1
    assert ended.err.splitlines() == [
        "Traceback (most recent call last):",
        f'  File "{warm.folder}/failing_module.py", line 1, in <module>',
        "    raise ValueError('no')",
        "ValueError: no",
    ]


def test_only_the_program_s_descriptors_are_open(launch: Launcher, warm: Server) -> None:
    target = program(
        warm.folder,
        "fds.py",
        "import os\nfor fd in os.listdir('/proc/self/fd'):\n    try: print(fd, os.readlink(f'/proc/self/fd/{fd}'))\n"
        "    except OSError: pass",
    )
    lines = dict(line.split(" ", 1) for line in launch(target).out.splitlines())
    assert lines.pop("0") == "/dev/null"
    assert {"1", "2"} < set(lines)
    others = [place for fd, place in lines.items() if int(fd) > 2]
    assert all("perdure-heartbeat" in place for place in others), others  # mmap keeps a duplicate of its own
    assert len(others) <= 1


def test_worker_is_the_agent_s_child_with_its_own_random_numbers(warm: Server) -> None:
    target = program(warm.folder, "who.py", "import os, random; print(os.getppid(), random.random())")
    ended = [warm.fork(Launch(entry=Entry.SCRIPT, target=target), cpus=(0,)).wait() for _ in range(2)]
    parents, numbers = zip(*(e.out.split() for e in ended), strict=True)
    assert set(parents) == {str(os.getpid())}
    assert len(set(numbers)) == 2


# --- error files -----------------------------------------------------------------------------------------------------


def test_error_file_has_torchrun_s_format_and_ours(launch: Launcher, warm: Server, tmp_path: Path) -> None:
    target = program(warm.folder, "fails.py", "import json\n\ndef f():\n    json.loads('{')\n\nf()")
    path = tmp_path / "error.json"
    ended = launch(target, env={"TORCHELASTIC_ERROR_FILE": str(path)})
    assert ended.code == 1
    written, ours = json.loads(path.read_text()), json.loads(Path(f"{path}.perdure").read_text())
    assert written["perdure"] == ours
    assert ours["type"] == "JSONDecodeError"
    assert ours["where"] == f"{warm.folder}/fails.py:4"
    assert ours["traceback"] == ended.err
    assert written["message"]["message"].startswith("JSONDecodeError: Expecting property name")
    assert written["message"]["extraInfo"]["py_callstack"] == ended.err
    assert int(written["message"]["extraInfo"]["timestamp"]) > 0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["error.json", "error.json.perdure"]


def test_error_file_of_record_is_kept(launch: Launcher, warm: Server, tmp_path: Path) -> None:
    target = program(
        warm.folder,
        "recorded.py",
        "from torch.distributed.elastic.multiprocessing.errors import record\n\n@record\ndef main():\n"
        "    raise RuntimeError('mine')\n\nmain()",
    )
    path = tmp_path / "error.json"
    assert launch(target, env={"TORCHELASTIC_ERROR_FILE": str(path)}).code == 1
    written, ours = json.loads(path.read_text()), json.loads(Path(f"{path}.perdure").read_text())
    assert "perdure" not in written
    assert written["message"]["message"] == "RuntimeError: mine"
    assert (ours["message"], ours["where"]) == ("mine", f"{warm.folder}/recorded.py:5")


@pytest.mark.parametrize("text", ["import sys; sys.exit(3)", "print(1)", "raise KeyboardInterrupt"])
def test_no_error_file_without_an_error(launch: Launcher, warm: Server, tmp_path: Path, text: str) -> None:
    target = program(warm.folder, "no_error.py", text)
    launch(target, env={"TORCHELASTIC_ERROR_FILE": str(tmp_path / "error.json")})
    assert list(tmp_path.iterdir()) == []


def test_syntax_error_is_located(launch: Launcher, warm: Server, tmp_path: Path) -> None:
    target = program(warm.folder, "syntax.py", "a = 1\nb = = 2\n")
    path = tmp_path / "error.json"
    assert launch(target, env={"TORCHELASTIC_ERROR_FILE": str(path)}).code == 1
    assert json.loads(path.read_text())["perdure"]["where"] == f"{warm.folder}/syntax.py:2"


# --- what training scripts do ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_data_loader_workers_work_and_do_not_write_the_slot(launch: Launcher, warm: Server, method: str) -> None:
    target = program(
        warm.folder,
        f"loader_{method}.py",
        "import pickle, torch\nfrom torch.utils.data import DataLoader, Dataset\nimport perdure\n"
        "class Squares(Dataset):\n    def __len__(self): return 8\n"
        "    def __getitem__(self, i):\n        perdure.current_run()._heartbeat.step_done(999)\n"
        "        return torch.tensor(i * i)\n"
        "if __name__ == '__main__':\n"
        "    assert type(pickle.loads(pickle.dumps(Squares()))) is Squares\n"
        f"    loader = DataLoader(Squares(), batch_size=2, num_workers=2, multiprocessing_context='{method}')\n"
        "    print(sum(int(b.sum()) for b in loader))\n",
    )
    ended = launch(target)
    assert ended[:3] == (0, "140\n", "")
    assert ended.slot is not None
    assert ended.slot.step == -1


def test_optimizer_steps_are_counted_without_being_told(launch: Launcher, warm: Server) -> None:
    target = program(
        warm.folder,
        "untold.py",
        "import torch\nmodels = [torch.nn.Linear(2, 2) for _ in range(2)]\n"
        "first, second = (torch.optim.SGD(m.parameters(), lr=0.1) for m in models)\n"
        "for _ in range(3):\n    first.step()\n    second.step()\n",
    )
    slot = launch(target).slot
    assert slot is not None
    assert (slot.step, slot.tells, slot.phase, slot.generation) == (3, False, LoopPhase.DONE, 3)
    assert slot.pid > 0


def test_told_steps_end_after_the_step_that_the_agent_names(warm: Server) -> None:
    target = program(
        warm.folder,
        "told.py",
        "import os, perdure, sys\ndef train(run):\n"
        "    for step in run.steps(start=5):\n"
        "        if step == 7:\n            print('at 7', flush=True)\n            open(sys.argv[1]).read()\n"
        "        with run.phase('checkpoint'):\n            pass\n"
        "    print(step, run.stopping, run.rank, run.world_size, run.generation, run.restarts)\nperdure.train(train)\n",
    )
    gate = warm.folder / "gate"
    os.mkfifo(gate)
    env = {"RANK": "2", "WORLD_SIZE": "4", "TORCHELASTIC_RESTART_COUNT": "1"}
    worker = warm.fork(Launch(entry=Entry.SCRIPT, target=target, args=(str(gate),)), env)
    with gate.open("w"):  # opens when the worker stands at step 7
        reading = warm.page.read(0)
        assert (reading.step, reading.first_step, reading.tells) == (6, 5, True)
        assert reading.phase is LoopPhase.TRAINING
        warm.page.stop_after(8)
    ended = worker.wait()
    assert (ended.code, ended.out) == (0, "at 7\n8 True 2 4 3 1\n")
    assert ended.slot is not None
    assert (ended.slot.step, ended.slot.saves, ended.slot.saves_step) == (8, 4, 7)


ALL_REDUCE = """
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
x = torch.ones(1) * (dist.get_rank() + 1)
dist.all_reduce(x)
print(int(x))
"""


def test_two_workers_reduce_over_the_forked_store(warm: Server) -> None:
    target = program(warm.folder, "reduce.py", ALL_REDUCE)
    store = warm.ask(StoreRequest(id=100, host="127.0.0.1"))
    assert store.error == ""
    assert listening_addresses(store.pid, store.port) == {"0100007F"}  # 127.0.0.1 and nowhere else
    env = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    env["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    workers = [warm.fork(Launch(entry=Entry.SCRIPT, target=target), {**env, "RANK": str(i)}, slot=i) for i in range(2)]
    assert [(w.code, w.out) for w in (w.wait() for w in workers)] == [(0, "3\n"), (0, "3\n")]
    os.kill(store.pid, signal.SIGINT)
    os.kill(store.pid, signal.SIGTERM)
    await_exit(store.pid)
    assert os.waitpid(store.pid, 0)[1] == signal.SIGTERM


def listening_addresses(pid: int, port: int) -> set[str]:
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            local, state = line.split()[1], line.split()[3]
            if state == "0A" and int(local.rpartition(":")[2], 16) == port:
                found.add(local.rpartition(":")[0])
    return found


def test_requests_that_wait_are_forked_together_and_all_answered(warm: Server) -> None:
    target = program(warm.folder, "quick.py", "import sys; sys.exit(int(sys.argv[1]))")
    null = os.open(os.devnull, os.O_RDWR)
    os.kill(warm.process.pid, signal.SIGSTOP)
    for i in range(4):
        launch = Launch(entry=Entry.SCRIPT, target=target, args=(str(i),))
        request = ForkRequest(id=200 + i, launch=launch, env={}, slot=i, generation=GenerationNumber(1))
        warm.send(request, (null, null, warm.page.fd))
    warm.send(StoreRequest(id=204, host="127.0.0.1"))
    os.kill(warm.process.pid, signal.SIGCONT)
    os.close(null)
    replies = {reply.id: reply for reply in (warm.receive() for _ in range(5)) if isinstance(reply, ForkReply)}
    codes = []
    for i in range(4):
        await_exit(replies[200 + i].pid)
        codes.append(os.waitstatus_to_exitcode(os.waitpid(replies[200 + i].pid, 0)[1]))
    assert codes == [0, 1, 2, 3]
    assert replies[204].port > 0
    os.kill(replies[204].pid, signal.SIGKILL)
    os.waitpid(replies[204].pid, 0)
    # The channel, and the processes that are forked ahead: two workers and a store.
    assert set(open_kinds(warm.process.pid)) == {"socket"}
    assert len(open_kinds(warm.process.pid)) <= 4


def open_kinds(pid: int) -> list[str]:
    """What its descriptors above 2 are."""
    return [os.readlink(p).partition(":")[0] for p in Path(f"/proc/{pid}/fd").iterdir() if int(p.name) > 2]


# --- what cannot be done is said -------------------------------------------------------------------------------------


def test_store_that_cannot_listen_says_why(warm: Server) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        reply = warm.ask(StoreRequest(id=300, host="127.0.0.1", port=port))
    assert reply.error.startswith(f"the store cannot listen on 127.0.0.1:{port}: Address already in use")
    os.waitpid(reply.pid, 0)


def test_program_is_not_forked(warm: Server) -> None:
    launch = Launch(entry=Entry.PROGRAM, target="/bin/true")
    request = ForkRequest(id=301, launch=launch, env={}, slot=0, generation=GenerationNumber(1))
    assert "cannot be forked" in warm.ask(request).error


def test_bad_slot_ends_the_worker_with_a_sentence(warm: Server) -> None:
    launch = Launch(entry=Entry.SCRIPT, target="main.py")
    err = warm.folder / "bad_slot.err"
    with err.open("ab", 0) as file:
        request = ForkRequest(id=302, launch=launch, env={}, slot=99, generation=GenerationNumber(1))
        reply = warm.ask(request, (file.fileno(), file.fileno(), warm.page.fd))
    await_exit(reply.pid)
    assert os.waitstatus_to_exitcode(os.waitpid(reply.pid, 0)[1]) == 1
    assert "slot 99" in err.read_text()
    assert "Traceback" not in err.read_text()


def test_thread_started_by_a_library_makes_forking_unsafe(tmp_path: Path) -> None:
    program(tmp_path, "main.py", "import json")
    program(
        tmp_path, "threads.py", "import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()"
    )
    program(tmp_path, "broken.py", "raise ValueError('broken here')")
    server = Server(tmp_path, "main.py", preload="threads,broken,nowhere")
    assert not server.ready.warm
    assert "Python threads" in server.ready.note
    assert "importing broken failed in the fork server: ValueError: broken here" in server.ready.note
    assert "importing nowhere failed" in server.ready.note
    assert "forking is unsafe" in server.ask(StoreRequest(id=1, host="127.0.0.1")).error
    server.close()


def test_plain_python_program_does_not_pay_for_torch_but_gets_a_store(plain: Server) -> None:
    assert plain.ready.warm
    assert plain.ready.imported == ("json",)
    maps = Path(f"/proc/{plain.process.pid}/maps").read_text()
    assert "libtorch" not in maps
    reply = plain.ask(StoreRequest(id=1, host="127.0.0.1"))
    assert reply.error == ""
    os.kill(reply.pid, signal.SIGTERM)
    os.waitpid(reply.pid, 0)


def test_only_installed_libraries_are_imported(warm: Server) -> None:
    assert "torch" in warm.ready.imported
    assert "nowhere_to_be_found" not in warm.ready.imported
    assert warm.ready.note == ""


# --- who survives whom -----------------------------------------------------------------------------------------------


def test_workers_live_on_without_their_fork_server(plain: Server) -> None:
    gate = plain.folder / "gate"
    os.mkfifo(gate)
    target = program(plain.folder, "waits.py", "import sys; print(open(sys.argv[1]).read())")
    worker = plain.fork(Launch(entry=Entry.SCRIPT, target=target, args=(str(gate),)))
    plain.process.kill()
    plain.process.wait(LIMIT)
    with gate.open("w") as file:
        file.write("alive")
    assert worker.wait()[:2] == (0, "alive\n")


def test_fork_server_ends_when_the_agent_closes_the_channel(plain: Server) -> None:
    plain.channel.close()
    assert plain.process.wait(LIMIT) == 0


AGENT = """
import ctypes, os, socket, subprocess, sys
import msgspec
from perdure.vocab.ids import GenerationNumber
from perdure.wire.messages import *
from perdure.wire.page import HeartbeatPage
ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)
page = HeartbeatPage(2)
ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
base = [sys.executable, "-u", "-m"]
server = subprocess.Popen([*base, "perdure.trainer.forkserver", "--fd", str(theirs.fileno()), "--nproc", "1",
                           "--script-kind", "script", "--target", "idle.py"], pass_fds=[theirs.fileno()])
theirs.close()
ours.recv(1 << 16)
request = ForkRequest(id=1, launch=Launch(entry=Entry.SCRIPT, target="idle.py"), env={}, slot=0,
                      generation=GenerationNumber(1))
socket.send_fds(ours, [msgspec.json.encode(request)], [1, 2, page.fd])
forked = msgspec.json.decode(ours.recv(1 << 16), type=ForkServerOut)
spawned = subprocess.Popen([*base, "perdure.trainer.worker", "--heartbeat-fd", str(page.fd), "--slot", "1",
    "--generation", "1", "--agent", str(os.getpid()), "--kind", "script", "--target", "idle.py"], pass_fds=[page.fd])
os.write(1, f"pids {server.pid} {forked.pid} {spawned.pid}\\n".encode())  # one write: others write there too
sys.stdin.read()
"""


def test_everything_ends_with_the_agent(tmp_path: Path) -> None:
    program(tmp_path, "agent.py", AGENT)
    program(tmp_path, "idle.py", "import os, signal\nos.write(1, b'up\\n')\nwhile True: signal.pause()")
    agent = subprocess.Popen(
        [sys.executable, "agent.py"],
        cwd=tmp_path,
        env=BASE_ENV,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert agent.stdin is not None
    assert agent.stdout is not None
    lines = [agent.stdout.readline().split() for _ in range(3)]
    pids = [int(p) for line in lines if line[0] == "pids" for p in line[1:]]
    assert sorted(line[0] for line in lines) == ["pids", "up", "up"]
    agent.kill()
    agent.wait(LIMIT)
    assert len(pids) == 3
    for pid in pids:
        await_exit(pid)
        os.waitpid(pid, 0)  # the test adopted them
    agent.stdin.close()
    agent.stdout.close()


# --- the store by itself ---------------------------------------------------------------------------------------------


def test_spawned_store_tells_its_port_in_one_line() -> None:
    argv = [sys.executable, "-m", "perdure.trainer.store", "--host", "127.0.0.1", "--port", "0"]
    store = subprocess.Popen(argv, env=BASE_ENV, stdout=subprocess.PIPE, text=True)
    assert store.stdout is not None
    port = json.loads(store.stdout.readline())["port"]
    with socket.create_connection(("127.0.0.1", port), timeout=LIMIT):
        pass
    store.terminate()
    assert store.wait(LIMIT) == -signal.SIGTERM
    store.stdout.close()


def test_spawned_store_on_a_foreign_address_says_why() -> None:
    started = time.monotonic()
    argv = [sys.executable, "-m", "perdure.trainer.store", "--host", "192.0.2.1", "--port", "0"]
    done = subprocess.run(argv, env=BASE_ENV, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 1
    assert json.loads(done.stdout)["error"].startswith("the store cannot listen on 192.0.2.1:0:")
    assert time.monotonic() - started < LIMIT


# --- forked ahead ----------------------------------------------------------------------------------------------------


def test_processes_forked_ahead_become_the_next_workers(plain: Server) -> None:
    (plain.folder / "main.py").write_text("import os, sys\nprint(os.getpid(), os.environ['MARK'], sys.argv[1:])\n")
    parked = plain.wait_parked()
    assert len(parked) == 2
    worker = plain.fork(Launch(entry=Entry.SCRIPT, target="main.py", args=("a",)), {"MARK": "seen"})
    assert worker.pid in parked
    assert worker.wait().out == f"{worker.pid} seen ['a']\n"


def test_process_forked_ahead_that_was_killed_is_passed_over(plain: Server) -> None:
    (plain.folder / "main.py").write_text("print('done')\n")
    parked = plain.wait_parked()
    for pid in parked:
        os.kill(pid, signal.SIGKILL)
        await_exit(pid)
    worker = plain.fork(Launch(entry=Entry.SCRIPT, target="main.py"))
    assert worker.pid not in parked
    assert worker.wait().out == "done\n"


def test_processes_forked_ahead_end_with_the_server(plain: Server) -> None:
    parked = plain.wait_parked()
    plain.process.kill()
    for pid in parked:
        await_exit(pid)
