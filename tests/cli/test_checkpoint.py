"""`perdure checkpoint`: what it prints, how it exits, and what it refuses."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.unit.store.a_checkpoint import a_state, a_stored, flip


def perdure(*words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-m", "perdure.cli.main", "checkpoint", *map(str, words)],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        env={**os.environ, "TERM": "dumb"},
    )


@pytest.fixture
def store(tmp_path: Path) -> Path:
    a_stored(tmp_path, tmp_path / "store", 10)
    a_stored(tmp_path, tmp_path / "store", 20)
    return tmp_path / "store"


NEW, OLD = "step-0000000020.1700000000-1", "step-0000000010.1700000000-1"


def test_ls_lists_what_can_be_restored_and_why_not(store):
    os.truncate(store / OLD / "__0_0.distcp", 10)
    done = perdure("ls", store)
    assert done.returncode == 0, done.stderr
    header, newer, older = done.stdout.splitlines()
    assert header.split() == ["checkpoint", "job", "step", "generation", "ranks", "size", "age", "verified", "state"]
    assert newer.split()[:5] == [NEW, "exp", "20", "1", "2"]
    assert newer.split()[-1] == "complete"
    assert older.rstrip().endswith("__0_0.distcp: has 10 of 155394 bytes") or "__0_0.distcp: has 10 of" in older


def test_ls_as_json_with_hashes_tells_a_flipped_bit(store):
    flip(store / NEW / "__1_0.distcp")
    rows = {row["name"]: row for row in json.loads(perdure("ls", store, "--json", "--verify").stdout)}
    assert (rows[OLD]["complete"], rows[OLD]["verified"]) == (True, "hashes")
    assert not rows[NEW]["complete"]
    assert rows[NEW]["problem"].startswith("__1_0.distcp, chunk 0")


def test_verify_of_good_ones_exits_with_0_and_of_a_bad_one_with_1_and_the_chunk(store):
    good = perdure("verify", store)
    assert (good.returncode, good.stdout) == (0, f"{NEW}: good\n{OLD}: good\n")
    flip(store / OLD / "tail-00001.msgpack")
    bad = perdure("verify", store)
    assert bad.returncode == 1
    assert f"{OLD}: not what was written\n  tail-00001.msgpack, chunk 0 (bytes 0 to" in bad.stdout
    assert perdure("verify", store / NEW).returncode == 0


def test_export_to_a_torch_file_gives_the_whole_state(store, tmp_path):
    done = perdure("export", store, tmp_path / "whole.pt")
    assert done.returncode == 0, done.stderr
    whole = torch.load(tmp_path / "whole.pt")
    assert torch.equal(whole["model"]["embed.weight"], a_state()["model.embed.weight"])
    assert whole["optimizer"]["param_groups"][0]["lr"] == 0.001


def test_export_to_a_folder_is_a_checked_copy_and_a_bad_one_is_refused(store, tmp_path):
    done = perdure("export", store, tmp_path / "copy", "--name", OLD)
    assert done.returncode == 0, done.stderr
    assert perdure("verify", tmp_path / "copy").stdout == "copy: good\n"
    assert perdure("export", store, tmp_path / "copy").returncode == 2
    flip(store / NEW / "__0_0.distcp")
    for target in ("other", "other.pt"):
        bad = perdure("export", store, tmp_path / target)
        assert bad.returncode == 1
        assert "__0_0.distcp" in bad.stderr
        assert not (tmp_path / target).exists()


def test_drop_asks_refuses_the_last_good_one_and_obeys_force(store):
    asked = perdure("drop", store, OLD)
    assert (asked.returncode, asked.stderr) == (2, "perdure: nobody is there to be asked; add --yes\n")
    assert perdure("drop", store, OLD, "--yes").stdout == f"{OLD}: dropped\n"
    last = perdure("drop", store, NEW, "--yes")
    assert last.returncode == 2
    assert "last good checkpoint" in last.stderr
    assert perdure("drop", store, NEW, "--yes", "--force").returncode == 0
    assert perdure("ls", store).stdout == "no checkpoints\n"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("ls", "/no/such/folder"), "there is no folder /no/such/folder"),
        (("ls", "nosuch://x"), "cannot be opened"),
        (("verify", "."), "there is no committed checkpoint in /"),
        (("drop", "."), "name the checkpoints to drop"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(words, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = perdure(*words)
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr
