"""`make demo`: a small GPT trains on two nodes and a spare, all on this machine, while three faults happen to it.

It starts the real command line, breaks things by signals alone, and judges by the event log and the record of losses.
Exit code 0: every fault was survived, and the loss went on from the newest checkpoint, read from the nodes' memory.
"""

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from faults import FAULTS, Fault
from judge import complaints, resumptions
from rich.console import Console
from rich.markup import escape
from watch import JobOverError, Watch

from perdure.cli.timeline import draw_timeline
from perdure.errors import PerdureError
from perdure.goodput import account
from perdure.vocab.event import GenerationBegan

ROOT = Path(__file__).resolve().parent.parent.parent
PERDURE = (sys.executable, "-m", "perdure.cli.main")
NODES, PER_NODE, SPARES = 2, 2, 1
PATIENCE = 60.0  # seconds for anything that is awaited; a recovery takes one or two

console = Console(highlight=False, soft_wrap=True)


def start(args: argparse.Namespace, training: Path, env: dict[str, str]) -> subprocess.Popen[bytes]:
    shape = ["--nnodes", str(NODES), "--nproc-per-node", str(PER_NODE), "--spares", str(SPARES)]
    shape += ["--local-nodes", str(NODES + SPARES), "--max-restarts", "10"]
    script = [str(ROOT / "examples" / "gpt.py"), "--steps", str(args.steps), "--save-every", str(args.save_every)]
    script += ["--replicas", "1"]
    command = ["run", *shape, *script, "--out", str(training), "--seed", str(args.seed)]
    console.print(f"[bold]$ perdure {' '.join(command)}[/]")
    return subprocess.Popen([*PERDURE, *command], env=env)


def announce(text: str) -> None:
    console.rule(f"[bold red]{text}", style="red")


def inject(fault: Fault, number: int, watch: Watch, args: argparse.Namespace, dice: random.Random) -> None:
    """Wait until there is something to lose, do `fault`, wait until all ranks step again."""
    generation = watch.until("a generation", watch.assignment, PATIENCE).number
    watch.until("a checkpoint", lambda: watch.has_saved(generation) or None, PATIENCE)
    # Some steps after a checkpoint: those are what the fault costs, and what the judge compares.
    enough = watch.last_step() + args.save_every // 2 + 1
    watch.until(f"step {enough}", lambda: watch.last_step() >= enough or None, PATIENCE)
    announce(f"fault {number} of {len(FAULTS)}: {fault.title}")
    began = time.monotonic()
    console.print(f"[red]{fault.strike(watch, dice)}[/]")

    def newer() -> int | None:
        assignment = watch.assignment()
        if assignment is None or assignment.number <= generation or not watch.has_stepped(assignment.number):
            return None
        return assignment.number

    now = watch.until(f"recovery from: {fault.title}", newer, PATIENCE)
    choice = watch.chosen(now)
    if choice is not None and choice.checkpoint is not None:
        console.print(f"all ranks restored {choice.checkpoint}, {choice.from_memory} of them from the nodes' memory")
    console.print(f"[bold green]all ranks train again in generation {now}, {time.monotonic() - began:.1f} s later[/]")


def train(args: argparse.Namespace, job: subprocess.Popen[bytes], watch: Watch) -> None:
    """The run with its faults, to its end. Raises TimeoutError or JobOverError when something did not come back."""
    dice = random.Random(args.seed)
    ready = NODES + SPARES
    watch.until(f"{ready} warm nodes", lambda: watch.nodes_ready() >= ready or None, PATIENCE)
    for number, fault in enumerate(FAULTS, start=1):
        inject(fault, number, watch, args, dice)
    try:
        code = job.wait(PATIENCE + args.steps)
    except subprocess.TimeoutExpired:
        raise TimeoutError(f"the job had not ended {PATIENCE + args.steps:.0f} s after its last fault") from None
    watch.look()
    if code != 0:
        raise JobOverError(f"the job ended with exit code {code}")


def end(job: subprocess.Popen[bytes]) -> None:
    """Leave nothing running, whatever happened."""
    if job.poll() is not None:
        return
    job.send_signal(signal.SIGINT)
    try:
        job.wait(15)
    except subprocess.TimeoutExpired:
        job.kill()
        job.wait()


def report(watch: Watch, out: Path, env: dict[str, str]) -> None:
    """What a user would ask afterwards: why things were done, and the picture."""
    if watch.log is None:
        return
    job = watch.log.parent.name
    console.print(f"[bold]$ perdure why {job}[/]")  # `perdure goodput` gives the table above, which a run ends with
    subprocess.run([*PERDURE, "why", job], env=env, check=False)
    picture = out / "timeline.svg"
    curve = [(loss.time, loss.step, loss.loss) for loss in watch.losses()]
    try:
        draw_timeline(account(watch.records), watch.records, picture, losses=curve)
        console.print(f"\nThe timeline is in [bold]{picture}[/].")
    except PerdureError as error:
        console.print(f"\n[yellow]No picture: {escape(str(error))}[/]")
    console.print(f"Checkpoints and losses are in {out / 'training'}.")


def judge(watch: Watch, args: argparse.Namespace) -> list[str]:
    """Say for each resumption where it began; what is wrong is returned."""
    losses = watch.losses()
    for found in resumptions(losses):
        console.print(
            f"Generation {found.generation} went on with step {found.first}; {found.redone} steps were done again, "
            f"with losses at most {found.apart:.1e} from the first time."
        )
    if losses:
        first, last = losses[0], losses[-1]
        console.print(f"Loss: {first.loss:.2f} at step {first.step}, {last.loss:.2f} at step {last.step}.")
    generations = {r.assignment.number for r in watch.records if isinstance(r, GenerationBegan)}
    return complaints(
        losses,
        watch.committed(),
        [choice for number in sorted(generations) if (choice := watch.chosen(number)) is not None],
        steps=args.steps,
        ranks=NODES * PER_NODE,
        faults=len(FAULTS),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--save-every", type=int, default=5)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("demo-out"), help="folder that is made anew")
    args = parser.parse_args()
    began = time.monotonic()
    out = args.out.resolve()
    if out.exists() and not (out / "home").is_dir():
        raise SystemExit(f"{out} is there and was not made by this demo; name another folder by --out")
    shutil.rmtree(out, ignore_errors=True)
    (out / "home").mkdir(parents=True)
    env = {**os.environ, "PERDURE_HOME": str(out / "home"), "PYTHONWARNINGS": "ignore"}

    job = start(args, out / "training", env)
    watch = Watch(out / "home", out / "training", lambda: job.poll() is not None)
    wrong: list[str] = []
    try:
        train(args, job, watch)
    except (TimeoutError, JobOverError) as error:
        wrong.append(str(error))
    finally:
        end(job)
    console.rule("[bold]afterwards")
    report(watch, out, env)
    wrong += judge(watch, args)
    console.print(f"{time.monotonic() - began:.0f} s in all.")
    for sentence in wrong:
        console.print(f"[bold red]FAILED: {sentence}[/]")
    if wrong:
        raise SystemExit(1)
    console.print(f"[bold green]{len(FAULTS)} faults, and the loss went on from the newest checkpoint each time.[/]")


if __name__ == "__main__":
    main()
