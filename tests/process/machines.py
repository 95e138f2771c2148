"""Machines for tests: network namespaces on one bridge, each with a host name of its own, cut off by nftables.

They share the kernel, the clock, the process table and the boot id; nothing else of the network is shared.
"""

import ipaddress
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from perdure.vocab.generation import Address
from tests.process.jobs import LIMIT, POLL, SOURCE, Job, descendants, kill_quietly

NET = "10.77.0"
PORT = 29400
TOKEN = "a-token-of-the-tests-0123456789"
CUT = """
table inet cut {
  set dropped { type ipv4_addr; }
  chain incoming { type filter hook input priority 0; ip saddr @dropped drop; }
}
"""


def why_no_machines() -> str:
    """Empty where namespaces can be made, else the reason."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [tool for tool in ("ip", "nft", "tc", "unshare") if shutil.which(tool) is None]
    if missing:
        return f"not installed: {', '.join(missing)}"
    probe = f"pd{os.getpid()}probe"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True)
    if made.returncode != 0:
        return f"no network namespace can be made: {made.stderr.strip()}"
    ruled = subprocess.run(["ip", "netns", "exec", probe, "nft", CUT], capture_output=True, text=True)
    subprocess.run(["ip", "netns", "del", probe], check=True)
    return "" if ruled.returncode == 0 else f"nft does not work here: {ruled.stderr.strip()}"


class Machine:
    """One of them."""

    def __init__(self, space: str, name: str, address: str, folder: Path) -> None:
        self.space, self.name, self.address, self.folder = space, name, address, folder
        self.home = folder / "home"
        self.host_name = name
        folder.mkdir()

    def prefix(self) -> list[str]:
        """Words before a command that is to run there."""
        named = ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', self.host_name]
        return ["ip", "netns", "exec", self.space, *named]

    def environ(self, extra: dict[str, str | None]) -> dict[str, str]:
        given: dict[str, str | None] = {
            **os.environ,
            "PERDURE_HOME": str(self.home),
            "PERDURE_TOKEN": TOKEN,
            "PYTHONPATH": SOURCE,
            "PYTHONWARNINGS": "ignore",
            **extra,
        }
        return {name: value for name, value in given.items() if value is not None}

    def perdure(self, *words: str, **env: str | None) -> subprocess.CompletedProcess[str]:
        """`perdure WORDS…` there, until it ends."""
        argv = [*self.prefix(), sys.executable, "-m", "perdure.cli.main", *words]
        return subprocess.run(
            argv, cwd=self.folder, env=self.environ(env), capture_output=True, text=True, timeout=LIMIT
        )

    def listening(self) -> set[Address]:
        """Where something listens there, IPv4 and IPv6."""
        table = subprocess.run(
            ["ip", "netns", "exec", self.space, "cat", "/proc/net/tcp", "/proc/net/tcp6"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        rows = [line.split() for line in table.splitlines()]
        local = [row[1].split(":") for row in rows if row[3] == "0A"]
        return {Address(_readable(host), int(port, 16)) for host, port in local}

    def pids(self) -> list[int]:
        found = subprocess.run(["ip", "netns", "pids", self.space], capture_output=True, text=True, check=True)
        return [int(pid) for pid in found.stdout.split()]


def _readable(host: str) -> str:
    """An address as /proc/net/tcp writes it: words of 4 bytes in the order of this machine, which is little-endian."""
    words = [bytes.fromhex(host[start : start + 8])[::-1] for start in range(0, len(host), 8)]
    return str(ipaddress.ip_address(b"".join(words)))


class Launched:
    """A command that runs on a machine."""

    def __init__(self, process: subprocess.Popen[bytes], out: Path, machine: Machine) -> None:
        self.process, self._out, self.machine = process, out, machine

    @property
    def output(self) -> str:
        return self._out.read_text(errors="replace")

    def end(self, *, seconds: float = LIMIT) -> int:
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.machine.name} has not ended within {seconds} s:\n{self.output}") from None

    def job(self, name: str = "job") -> Job:
        """The job whose log this command keeps."""
        return Job(self.process, self.machine.home, name, self._out)

    def agent(self) -> int:
        """Pid of the agent that this launcher has started."""
        agents = [pid for pid in descendants(self.process.pid) if b"perdure.cli.agent" in command_of(pid)]
        assert len(agents) == 1, f"agents of {self.machine.name}: {agents}\n{self.output}"
        return agents[0]


class Machines:
    """The machines of one test, and the wires between them."""

    def __init__(self, folder: Path, names: Sequence[str]) -> None:
        self._folder = folder
        self._id = f"pd{os.getpid()}"
        self._bridge = f"{self._id}-net"
        self.launched: list[Launched] = []
        self.machines = {
            name: Machine(f"{self._id}-{name}", name, f"{NET}.{number}", folder / name)
            for number, name in enumerate(names, start=1)
        }

    def __getitem__(self, name: str) -> Machine:
        return self.machines[name]

    # --- the wires ---------------------------------------------------------------------------------------------------

    def build(self) -> None:
        _ip("netns", "add", self._bridge)
        _ip("-n", self._bridge, "link", "add", "bridge", "type", "bridge")
        _ip("-n", self._bridge, "link", "set", "bridge", "up")
        for machine in self.machines.values():
            self._plug(machine)

    def _plug(self, machine: Machine) -> None:
        port = f"to-{machine.name}"[:15]
        _ip("netns", "add", machine.space)
        _ip("-n", machine.space, "link", "set", "lo", "up")
        _ip("-n", self._bridge, "link", "add", port, "type", "veth", "peer", "name", "eth7", "netns", machine.space)
        _ip("-n", self._bridge, "link", "set", port, "master", "bridge", "up")
        _ip("-n", machine.space, "address", "add", f"{machine.address}/24", "dev", "eth7")
        _ip("-n", machine.space, "link", "set", "eth7", "up")
        subprocess.run(["ip", "netns", "exec", machine.space, "nft", CUT], check=True)

    def demolish(self) -> None:
        """End everything that runs on the machines, then take them away."""
        for machine in self.machines.values():
            if os.path.exists(f"/run/netns/{machine.space}"):
                for pid in machine.pids():
                    kill_quietly(pid, signal.SIGKILL)
        for launched in self.launched:
            launched.process.wait(LIMIT)
        for space in (*(machine.space for machine in self.machines.values()), self._bridge):
            if os.path.exists(f"/run/netns/{space}"):
                _ip("netns", "del", space)

    def cut(self, one: str, other: str, *, one_way: bool = False) -> None:
        """Nothing from `one` reaches `other` any more; nor the other way round unless `one_way`."""
        self._rule(one, other, "add")
        if not one_way:
            self._rule(other, one, "add")

    def heal(self, one: str, other: str) -> None:
        for source, target in ((one, other), (other, one)):
            self._rule(source, target, "add")  # so that it is there to be deleted
            self._rule(source, target, "delete")

    def isolate(self, name: str) -> None:
        """Cut a machine off from all others."""
        for other in self.machines:
            if other != name:
                self.cut(name, other)

    def rejoin(self, name: str) -> None:
        for other in self.machines:
            if other != name:
                self.heal(name, other)

    def _rule(self, source: str, target: str, verb: str) -> None:
        element = f"{verb} element inet cut dropped {{ {self[source].address} }}"
        subprocess.run(["ip", "netns", "exec", self[target].space, "nft", element], check=True)

    def slow(self, name: str, rate: str) -> None:
        """What `name` sends goes no faster than `rate`, as in 10mbit."""
        shape = ["tbf", "rate", rate, "burst", "32kbit", "latency", "200ms"]
        subprocess.run(
            ["ip", "netns", "exec", self[name].space, "tc", "qdisc", "replace", "dev", "eth7", "root", *shape],
            check=True,
        )

    # --- what runs on them -------------------------------------------------------------------------------------------

    def start(self, name: str, *words: str, **env: str | None) -> Launched:
        """`perdure WORDS…` on machine `name`."""
        return self.start_command(name, [sys.executable, "-m", "perdure.cli.main", *words], **env)

    def start_command(self, name: str, command: Sequence[str], **env: str | None) -> Launched:
        machine = self[name]
        out = self._folder / f"{name}-{len(self.launched)}.out"
        with out.open("wb") as file:
            process = subprocess.Popen(
                [*machine.prefix(), *command],
                cwd=machine.folder,
                env=machine.environ(env),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )
        launched = Launched(process, out, machine)
        self.launched.append(launched)
        return launched

    def power_off(self, name: str) -> None:
        """The machine is gone from one moment to the next: nothing that it would still send is heard."""
        self.isolate(name)
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for pid in self[name].pids():
                kill_quietly(pid, number)


@contextmanager
def machines(folder: Path, *names: str) -> Iterator[Machines]:
    """Machines with these names (short ones), taken away after the test. Skips the test where there can be none."""
    reason = why_no_machines()
    if reason:
        pytest.skip(reason)
    made = Machines(folder, names)
    try:
        made.build()
        yield made
    except BaseException:
        for launched in made.launched:
            print(f"--- {launched.machine.name} ---\n{launched.output}")
        raise
    finally:
        made.demolish()


def start_job(
    net: Machines,
    control: str,
    nodes: Sequence[str],
    *program: str,
    shape: Sequence[str],
    rules: Sequence[str] = (),
    **env: str | None,
) -> tuple[Job, dict[str, Launched]]:
    """Control alone on `control`, and `perdure run` on every one of `nodes`; these learn the job's id from control."""
    meeting = ["--rdzv-endpoint", f"{net[control].address}:{PORT}"]
    head = net.start(control, "control", "--rdzv-id", "job", *meeting, *shape, *rules, *program, **env)
    launched = {name: net.start(name, "run", *meeting, *shape, *program, **env) for name in nodes}
    return head.job(), launched


def wait_until(what: Callable[[], bool], why: Callable[[], str] = str, *, seconds: float = LIMIT) -> None:
    """Until `what()` is true."""
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, f"not within {seconds} s: {why()}"
        time.sleep(POLL)


def is_alive(pid: int) -> bool:
    """Whether a process runs, zombies not counted."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except (FileNotFoundError, ProcessLookupError):
        return False


def command_of(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True)
    assert done.returncode == 0, f"ip {' '.join(words)}: {done.stderr}"
