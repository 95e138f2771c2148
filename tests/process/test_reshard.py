"""Slots of a real sharded model, read by worlds of other sizes: real processes, real process groups."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parent / "scripts" / "reshard.py"
ROOT = Path(__file__).parents[2]
LIMIT = 240
"""Seconds for one world: it takes 10 on a machine of its own."""


def run_world(folder: Path, world_size: int, source: Path | None, writers: int, target: Path | None) -> dict[str, Any]:
    """What the ranks of one world have; they must agree."""
    folder.mkdir()
    if target is not None:
        target.mkdir()
    argv = [sys.executable, str(SCRIPT), str(folder / "rendezvous"), str(source or ""), str(writers)]
    argv += [str(target or ""), "2"]
    environ = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'src'}", "WORLD_SIZE": str(world_size)}
    environ |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONWARNINGS": "ignore"}
    ranks = [
        subprocess.Popen(
            argv, env={**environ, "RANK": str(rank)}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for rank in range(world_size)
    ]
    try:
        outputs = [rank.communicate(timeout=LIMIT) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    for rank, (_, errors) in zip(ranks, outputs, strict=True):
        assert rank.returncode == 0, errors
    said = [json.loads(out.splitlines()[-1]) for out, _ in outputs]
    assert all(one == said[0] for one in said)
    return said[0]  # type: ignore[no-any-return]


@pytest.mark.timeout(3 * LIMIT)
def test_fsdp2_model_and_optimizer_after_4_to_2_to_4_go_on_bitwise_as_if_nothing_had_happened(tmp_path: Path) -> None:
    """Thread 27 (torchtitan 1136): with fully_shard, uneven rows, AdamW's moments and steps."""
    began = run_world(tmp_path / "a", 4, None, 0, tmp_path / "four")
    two = run_world(tmp_path / "b", 2, tmp_path / "four", 4, tmp_path / "two")
    four = run_world(tmp_path / "c", 4, tmp_path / "two", 2, None)
    assert len(began["loaded"]) == 5 * 4  # three Linear or LayerNorm weights, two biases: value, moments, step
    assert two["loaded"] == began["loaded"]
    assert four["loaded"] == began["loaded"]
    assert four["later"] == began["later"]
    assert began["later"] != began["loaded"]
