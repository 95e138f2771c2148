"""What `perdure run` shows: the workers' output, three lines per fault, and one live line where there is a terminal.

It prints what it is told; it asks nobody. Perdure's own lines go to stderr, so that stdout is the job's alone.
"""

import os
import sys
import time
from types import TracebackType
from typing import Self

import anyio
import msgspec
from rich.console import Console
from rich.live import Live
from rich.text import Text

from perdure.cli.goodput import draw, goodput_tables
from perdure.cli.home import JobDir
from perdure.cli.story import FaultStory
from perdure.cli.words import describe
from perdure.goodput.ledger import account
from perdure.ports import LogRecord
from perdure.vocab.decision import Decision, GiveUp
from perdure.vocab.event import EndDecided, GenerationRunning, JobEnded, NodeReady, NodeRefused
from perdure.vocab.generation import Address
from perdure.vocab.job import JobSpec
from perdure.vocab.units import Instant, show_duration
from perdure.wire.messages import Progress

CHUNK = 65536


class Terminal:
    """Use as a context manager; `run` is its task."""

    def __init__(self, job: JobSpec, *, json: bool) -> None:
        self._spec, self._json = job, json
        self.is_live = sys.stderr.isatty() and not json
        self._console = Console(stderr=True, highlight=False)
        self._live: Live | None = None
        self._story = FaultStory()
        self._records: list[LogRecord] = []
        self._last = ""
        self._pipes: list[tuple[int, bool]] = []
        self.stdout_fd: int | None = None
        """Descriptor for the programs' stdout; None: ours."""
        self.stderr_fd: int | None = None
        self._effective_share, self._count_again_at = 0.0, 0.0

    def __enter__(self) -> Self:
        if self.is_live:
            self.stdout_fd, self.stderr_fd = self._pipe(is_error=False), self._pipe(is_error=True)
            self._live = Live(Text("starting"), console=self._console, refresh_per_second=4, transient=True)
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()
        for fd, _ in self._pipes:
            os.close(fd)
        for end in (self.stdout_fd, self.stderr_fd):
            if end is not None:
                os.close(end)

    def _pipe(self, *, is_error: bool) -> int:
        read_fd, write_fd = os.pipe()
        os.set_blocking(read_fd, False)
        self._pipes.append((read_fd, is_error))
        return write_fd

    async def run(self) -> None:
        """Show what the programs print above the live line."""
        async with anyio.create_task_group() as group:
            for fd, is_error in self._pipes:
                group.start_soon(self._pump, fd, is_error)

    async def _pump(self, fd: int, is_error: bool) -> None:
        while True:
            await anyio.wait_readable(fd)
            self._copy(fd, is_error)

    def _copy(self, fd: int, is_error: bool) -> None:
        try:
            data = os.read(fd, CHUNK)
        except BlockingIOError:
            return
        text = data.decode(errors="replace")
        if is_error or os.isatty(1):
            self._console.out(text, end="")
        else:
            sys.stdout.write(text)
            sys.stdout.flush()

    # --- told --------------------------------------------------------------------------------------------------------

    def begin(self, control: Address, job: JobDir) -> None:
        spec = self._spec
        nodes = str(spec.max_nodes) if spec.min_nodes == spec.max_nodes else f"{spec.min_nodes} to {spec.max_nodes}"
        spares = f", {spec.spares} spare(s)" if spec.spares else ""
        self.say(
            f"job {spec.id}: {nodes} node(s) x {spec.workers_per_node} worker(s){spares};"
            f" control at {control}, state in {job.path}"
        )

    def say(self, text: str) -> None:
        """One line of Perdure's own."""
        if self._json:
            self._write(msgspec.json.encode({"kind": "note", "text": text}).decode())
        else:
            self._write(f"perdure: {text}")

    def remember(self, record: LogRecord) -> None:
        """A record that is not shown, but counts in what is."""
        self._records.append(record)
        self._story.tell(record)

    def tell(self, record: LogRecord) -> None:
        """One more record of the log."""
        self._records.append(record)
        if self._json:
            self._write(msgspec.json.encode(record).decode())
            return
        match record:
            case GenerationRunning():
                self._last = f"generation {record.generation} runs"
                if record.generation == 1:
                    self.say(self._last)
            case NodeRefused():
                self.say(f"{record.node} on {record.host} is refused: {record.reason}")
            case NodeReady(warm=False) if record.note and "as asked" not in record.note:
                self.say(f"{record.node}: {record.note}")
            case Decision():
                self._show_failure(record)
            case EndDecided():
                self.say(f"{record.reason}; {describe(record)} (an interrupt ends it at once)")
            case _:
                pass
        for block in self._story.tell(record):
            self._last = block[0]
            for index, line in enumerate(block):
                self._write(f"perdure: {line}" if index == 0 else f"         {line}")

    def _show_failure(self, decision: Decision) -> None:
        """The traceback of what the job ends by, once."""
        gives_up = any(isinstance(action, GiveUp) for action in decision.actions)
        if gives_up and decision.diagnosis is not None and decision.diagnosis.detail:
            self._write(decision.diagnosis.detail.rstrip())

    def progress(self, progress: Progress | None) -> None:
        """What the live line says."""
        if self._live is None:
            return
        if progress is None:
            self._live.update(Text("control is away; training goes on", style="yellow"))
            return
        parts = [f"{self._spec.id}", progress.status]
        if progress.step is not None:
            parts.append(f"step {progress.step}")
        if progress.step_seconds is not None:
            parts.append(f"{progress.step_seconds * 1000:.0f} ms/step")
        parts.append(f"effective {self._effective(progress.now):.1%}")
        if progress.nodes:
            parts.append(f"{progress.nodes} node(s)" + (f" + {progress.spares} spare(s)" if progress.spares else ""))
        if self._last:
            parts.append(self._last)
        line = Text("  ".join(parts), no_wrap=True, overflow="ellipsis")
        line.stylize("bold cyan", 0, len(parts[0]))
        self._live.update(line)

    def _effective(self, now: Instant) -> float:
        """Effective training time so far. A long log is counted anew rarely: it may cost a tenth of this process."""
        if time.monotonic() >= self._count_again_at:
            began = time.monotonic()
            self._effective_share = account(self._records, now).effective
            took = time.monotonic() - began
            self._count_again_at = began + 10 * took
        return self._effective_share

    def end(self, ended: JobEnded | None) -> None:
        """The last words: how it ended and where the time went."""
        for fd, is_error in self._pipes:
            self._copy(fd, is_error)
        if ended is None or self._json:
            return
        ledger = account(self._records)
        self.say(f"the job ended with exit code {ended.exit_code} after {show_duration(ledger.wall)}: {ended.reason}")
        if len(ledger.restarts) > 0 or self.is_live:
            self._write(draw(goodput_tables(ledger), width=100, colour=self.is_live).rstrip())

    def _write(self, text: str) -> None:
        if self._live is not None:
            self._console.out(text)
        else:
            print(text, file=sys.stderr, flush=True)
