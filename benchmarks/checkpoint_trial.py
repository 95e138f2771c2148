"""One trial: a fresh process per rank, one method, and what the slowest rank measured. Nothing about statistics."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

import processes
from launchers import ROOT, WORKERS, free_port
from perdure.agent.launch import glibc_tunables

Result = dict[str, object]


@dataclass(frozen=True)
class Size:
    """What a trial saves, and how often."""

    world: int
    mib: int
    """Of each rank."""
    threads: int
    """Of the bare memcpy."""
    saves: int
    restores: int
    limit: float
    """Seconds until a trial has failed."""


def try_once(method: str, python: str, size: Size, storage: Path, own_nodes: bool) -> Result:
    """`own_nodes`: each rank believes that it is alone on a node. A failure is {"error": …}."""
    run = f"bench-{uuid.uuid4().hex[:12]}"
    folder = Path(tempfile.mkdtemp(prefix="perdure-bench-", dir=storage))
    marker = f"PERDURE_BENCH_RUN={run}"
    before = set(_slot_folders())
    try:
        return _merged(_run(method, python, size, folder, run, own_nodes))
    finally:
        processes.kill_marked(marker)
        shutil.rmtree(folder, ignore_errors=True)
        _remove_memory(run, before)


def _run(method: str, python: str, size: Size, folder: Path, run: str, own_nodes: bool) -> list[Result]:
    result = folder / "result"
    flags = ["--method", method, "--mib", str(size.mib), "--threads", str(size.threads), "--saves", str(size.saves)]
    flags += ["--restores", str(size.restores), "--folder", str(folder), "--result", str(result)]
    port = str(free_port())
    with open(folder / "output.log", "wb") as log:
        ranks = [
            subprocess.Popen(
                [python, str(WORKERS / "checkpoint.py"), *flags],
                env=_environment(run, folder, rank, size.world, port, own_nodes),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=folder,
                start_new_session=True,
            )
            for rank in range(size.world)
        ]
    try:
        deadline = time.monotonic() + size.limit
        files = [Path(f"{result}.{rank}") for rank in range(size.world)]
        found = _wait(ranks, files, deadline)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait(60)  # it has GiBs to give back
    if found is None:
        found = [{"error": f"not finished after {size.limit:.0f} s"}]
    if any("error" in result for result in found) and "PERDURE_BENCH_SHOW" in os.environ:
        print((folder / "output.log").read_text(errors="replace")[-6000:], file=sys.stderr)
    return found


def _wait(ranks: list[subprocess.Popen[bytes]], files: list[Path], deadline: float) -> list[Result] | None:
    """Results of all ranks, or of one that failed; None at the deadline."""
    while time.monotonic() < deadline:
        found = [json.loads(file.read_text()) for file in files if file.exists()]
        if len(found) == len(files) or any("error" in result for result in found):
            return found
        dead = [rank.returncode for rank in ranks if rank.poll() not in (None, 0)]
        if dead:
            return [{"error": f"a rank ended with exit code {dead[0]}"}]
        time.sleep(0.05)
    return None


def _environment(run: str, folder: Path, rank: int, world: int, port: str, own_nodes: bool) -> dict[str, str]:
    """What torchrun gives its workers, and a home of its own for ours."""
    nodes = world if own_nodes else 1
    local = 0 if own_nodes else rank
    return {
        **os.environ,
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_RANK": str(local),
        "LOCAL_WORLD_SIZE": str(world // nodes),
        "GROUP_RANK": str(rank if own_nodes else 0),
        "GROUP_WORLD_SIZE": str(nodes),
        "ROLE_RANK": str(rank),
        "ROLE_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "TORCHELASTIC_RUN_ID": run,
        "TORCHELASTIC_RESTART_COUNT": "0",
        "GLIBC_TUNABLES": glibc_tunables(os.environ.get("GLIBC_TUNABLES", "")),  # as `perdure run` sets it; peers, too
        "PERDURE_BENCH_RUN": run,
        "PERDURE_HOME": str(folder / "home"),
        "PYTHONPATH": os.pathsep.join([str(ROOT / "benchmarks"), str(ROOT / "src")]),
        "PYTHONWARNINGS": "ignore",
    }


def _merged(found: list[Result]) -> Result:
    """Of each number the slowest rank's; all ranks must have been right."""
    for result in found:
        if "error" in result:
            return {"error": _short(str(result["error"]))}
    merged: Result = dict(found[0])
    for key, value in merged.items():
        values = [result[key] for result in found]
        if isinstance(value, list):
            merged[key] = [max(numbers) for numbers in zip(*values, strict=True)]
        elif isinstance(value, bool):
            merged[key] = all(values)
        elif isinstance(value, float):
            merged[key] = max(values)
    return merged


def _short(text: str) -> str:
    first = text.strip().splitlines()[0] if text.strip() else "no message"
    return first if len(first) <= 160 else first[:157] + "…"


def _slot_folders() -> list[Path]:
    """Where ours keeps the memory of scripts called `checkpoint`, for the next start of the same command."""
    return [*Path("/dev/shm").glob(f"perdure-{os.getuid()}/alone-checkpoint-*")]


def _remove_memory(run: str, before: set[Path]) -> None:
    """Remove what was left in memory for another start: under the run's name by a peer, in a folder by ours."""
    for path in [*Path("/dev/shm").glob(f"*{run}*"), *(set(_slot_folders()) - before)]:
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
    shutil.rmtree(Path("/tmp/ckpt_sock") / run, ignore_errors=True)  # dlrover's sockets
