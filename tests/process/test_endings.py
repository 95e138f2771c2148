"""How a job ends: asked to, failed, finished; and what the launcher returns."""

import json
import signal
import time
from pathlib import Path

import pytest

from perdure.vocab.decision import Drain
from perdure.vocab.event import StopRequested, WorkerExited
from tests.process.jobs import Job, assert_ended, processes_of, running, script, wait_until

UNTOLD = """
import os, signal, sys, time

rank = os.environ["RANK"]

def end(number, frame):
    with open(f"ended-{rank}", "w") as file:
        file.write(signal.Signals(number).name)
    sys.exit(0)

for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, end if sys.argv[1] == "handle" else signal.SIG_IGN)
open(f"ready-{rank}", "w").close()
while True:
    time.sleep(0.01)
"""


def untold(folder: Path) -> str:
    """A script that knows nothing of Perdure."""
    path = folder / "untold.py"
    path.write_text(UNTOLD)
    return str(path)


def wait_handlers(job: Job, folder: Path, ranks: int) -> None:
    """Until the workers have set their handlers."""
    wait_until(lambda: all((folder / f"ready-{rank}").exists() for rank in range(ranks)))
    job.wait_running(1)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_stop_signal_is_forwarded_to_a_script_that_tells_nothing(tmp_path: Path, number: signal.Signals) -> None:
    with running(tmp_path, "--nproc-per-node", "2", untold(tmp_path), "handle") as job:
        wait_handlers(job, tmp_path, 2)
        job.interrupt(number)
        assert job.end() == 3
        assert [(tmp_path / f"ended-{rank}").read_text() for rank in (0, 1)] == [number.name] * 2
        assert number.name in assert_ended(job.records(), 3).reason
        assert "all workers have ended" in assert_ended(job.records(), 3).reason
        assert "RestartWorkers" not in job.actions()


def test_script_that_ignores_the_signal_is_killed_after_the_shutdown_timeout(tmp_path: Path) -> None:
    words = ("--nproc-per-node", "2", "--shutdown-timeout", "2")
    with running(tmp_path, *words, untold(tmp_path), "ignore") as job:
        wait_handlers(job, tmp_path, 2)
        job.interrupt()
        assert job.end() == 3
        ended, asked = assert_ended(job.records(), 3), job.all(StopRequested)[0]
        assert asked.grace == 2
        assert ended.at - asked.at >= 2
        assert "--shutdown-timeout" in ended.reason
        assert processes_of(job.home) == {}


def test_second_interrupt_ends_a_script_that_ignores_the_first(tmp_path: Path) -> None:
    with running(tmp_path, "--nproc-per-node", "2", untold(tmp_path), "ignore") as job:
        wait_handlers(job, tmp_path, 2)
        job.interrupt(signal.SIGINT)
        job.wait_event(StopRequested)
        began = time.monotonic()
        job.interrupt(signal.SIGINT)
        assert job.end() == 3
        assert time.monotonic() - began < 10  # the grace that it cuts short is 30 s
        assert [e.grace for e in job.all(StopRequested)] == [30, 0]
        assert processes_of(job.home) == {}


def test_ranks_that_tell_their_steps_end_after_the_same_one_with_the_last_save(tmp_path: Path) -> None:
    """RESTART.md case 12: a save at a step boundary, never in a signal handler."""
    with running(
        tmp_path, "--nproc-per-node", "2", script("train.py"), "--out", "out", "--save-every", "999999"
    ) as job:
        job.wait_stepping(1)
        trace = tmp_path / "out" / "rank-0.jsonl"
        wait_until(lambda: len(trace.read_text().splitlines()) > 50)  # until the time of a step is known
        job.interrupt()
        assert job.end() == 3
        lasts = [json.loads((tmp_path / "out" / f"rank-{r}.jsonl").read_text().splitlines()[-1]) for r in (0, 1)]
        assert lasts[0]["end"] == lasts[1]["end"]
        assert all(last["stopping"] for last in lasts)
        assert json.loads((tmp_path / "out" / "saved.json").read_text())["step"] == lasts[0]["end"]
        drains = [a for d in job.decisions() for a in d.actions if isinstance(a, Drain)]
        assert [drain.forward for drain in drains] == [False, False]
        assert drains[-1].stop_after == lasts[0]["end"]


@pytest.mark.parametrize(
    ("death", "code"), [("sys.exit(7)", 7), ("os.kill(os.getpid(), 9)", 137), ("os.kill(os.getpid(), 15)", 143)]
)
def test_launcher_returns_what_the_job_failed_with(tmp_path: Path, death: str, code: int) -> None:
    (tmp_path / "fail.py").write_text(
        f"import os, sys\nif os.environ['RANK'] == '1':\n    {death}\nimport time\ntime.sleep(60)\n"
    )
    with running(tmp_path, "--nproc-per-node", "2", "--max-restarts", "0", "fail.py") as job:
        assert job.end() == code
        assert assert_ended(job.records(), code).reason in job.output
        assert [e.rank for e in job.all(WorkerExited)] == [1]


def test_job_that_finished_stays_finished_and_a_failed_one_begins_anew(tmp_path: Path) -> None:
    """RESTART.md case 4."""
    (tmp_path / "once.py").write_text("import os, sys\nsys.exit(0 if os.path.exists('mended') else 5)\n")
    words = ("--max-restarts", "0", "once.py")
    with running(tmp_path, *words) as job:
        assert job.end() == 5
        failed = job.records()
    (tmp_path / "mended").touch()
    with running(tmp_path, *words) as job:
        assert job.end() == 0
        assert (job.folder / "events-1.db").exists()
        finished = job.records()
        assert finished[0] != failed[0]
    with running(tmp_path, *words) as job:
        assert job.end() == 0
        assert "has finished already" in job.output
        assert "another --rdzv-id" in job.output
        assert job.records() == finished


def test_ranks_that_end_while_rank_0_still_saves_are_no_failure(tmp_path: Path) -> None:
    """RESTART.md case 10; pytorch 118891: the store and the job stay until all are done."""
    words = (script("plain.py"), "--out", "out", "--steps", "5", "--late-save", "1.5")
    with running(tmp_path, "--nproc-per-node", "3", *words) as job:
        assert job.end() == 0
        assert (tmp_path / "out" / "saved").read_text() == "4"
        assert sorted(e.exit_code or 0 for e in job.all(WorkerExited)) == [0, 0, 0]
        assert_ended(job.records(), 0)
        assert "RestartWorkers" not in job.actions()
