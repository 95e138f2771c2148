"""Ours and torchrun on the same worker script: start, hear from every rank, end. Nothing about faults or statistics."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import processes

ROOT = Path(__file__).resolve().parent.parent
WORKERS = ROOT / "benchmarks" / "workers"
OURS = (sys.executable, "-m", "perdure.cli.main", "run")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")


@dataclass(frozen=True)
class Report:
    """One rank has finished the first all-reduce of one life."""

    rank: int
    restarts: int
    time: float
    pid: int
    parent: int
    """Its agent: workers are its children, with either launcher."""


class Running:
    """Programs that together are one job, in a folder and an environment of their own."""

    def __init__(self, worker: str, arguments: Sequence[str] = (), env: dict[str, str] | None = None) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="perdure-bench-"))
        self.home = self.folder / "home"
        self._marker = f"PERDURE_BENCH_RUN={uuid.uuid4().hex}"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(self.folder / "reports"))
        self._worker = (str(WORKERS / worker), "--report", self.reports, *arguments)
        self._env = {**os.environ, **self._own_env(), **(env or {})}
        self._programs: list[subprocess.Popen[bytes]] = []

    def _own_env(self) -> dict[str, str]:
        path = [str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
        name, _, value = self._marker.partition("=")
        return {
            name: value,
            "PERDURE_HOME": str(self.home),
            "PYTHONPATH": os.pathsep.join(path),
            "PYTHONWARNINGS": "ignore",
            "OMP_NUM_THREADS": "1",
        }

    @property
    def reports(self) -> str:
        """Socket to which the workers report."""
        return str(self.folder / "reports")

    @property
    def first(self) -> int:
        """Pid of the program that was started first."""
        return self._programs[0].pid

    @property
    def pids(self) -> list[int]:
        """Every live process of the job."""
        return processes.marked(self._marker)

    def start(self, command: Sequence[str]) -> int:
        """Start one program of the job; its pid."""
        with open(self.folder / "output.log", "ab") as log:
            program = subprocess.Popen(
                [*command, *self._worker],
                env=self._env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.folder,
                start_new_session=True,
            )
        self._programs.append(program)
        return program.pid

    def ranks(self, world: int, within: float, since: float = 0.0) -> dict[int, Report] | None:
        """Reports of all ranks of one generation that began after `since`; None where `within` seconds pass first."""
        deadline = time.monotonic() + within
        by_life: dict[int, dict[int, Report]] = {}
        while (left := deadline - time.monotonic()) > 0:
            self._socket.settimeout(left)
            try:
                report = Report(**json.loads(self._socket.recv(4096)))
            except TimeoutError:
                return None
            if report.time < since:
                continue
            life = by_life.setdefault(report.restarts, {})
            life[report.rank] = report
            if len(life) == world:
                return life
        return None

    def is_over(self) -> bool:
        """No program of the job runs any more."""
        return all(program.poll() is not None for program in self._programs)

    def output(self, lines: int = 20) -> str:
        """The last lines that the job wrote."""
        log = self.folder / "output.log"
        return "\n".join(log.read_text(errors="replace").splitlines()[-lines:]) if log.exists() else ""

    def end(self, politely: bool) -> list[str]:
        """End everything; the command lines of what had not ended by itself, though asked politely."""
        if politely:
            processes.kill((p.pid for p in self._programs if p.poll() is None), signal.SIGTERM)
            deadline = time.monotonic() + 15
            while self.pids and time.monotonic() < deadline:
                self.is_over()  # reaps
                time.sleep(0.05)
        left = [processes.command_line(pid) for pid in self.pids] if politely else []
        processes.kill_marked(self._marker)
        for program in self._programs:
            program.wait(5)
        self._socket.close()
        shutil.rmtree(self.folder, ignore_errors=True)
        return left


def free_port() -> int:
    """A port of the loopback interface that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_for_port(port: int, within: float) -> bool:
    deadline = time.monotonic() + within
    while time.monotonic() < deadline:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return True
        time.sleep(0.05)
    return False
