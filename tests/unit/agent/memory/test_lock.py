"""Who owns a folder, and what of dead runs is removed."""

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from perdure.agent.memory.lock import Owner, remove_dead, take_lock
from perdure.errors import HostError
from perdure.host.proc import incarnation
from perdure.vocab.ids import Incarnation, JobId


def a_dead_one() -> Incarnation:
    process = subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE)
    life = incarnation(process.pid)
    process.communicate()
    return life


def an_owner(server: Incarnation, *owners: Incarnation) -> Owner:
    return Owner(job=JobId("job"), server=server, owners=owners)


def a_folder(base: Path, job: str, owner: Owner) -> Path:
    folder = base / job / "n0"
    os.close(take_lock(str(folder), owner))
    (folder / "own-0-0.slot").write_bytes(b"x" * 1000)
    return folder


def test_a_folder_of_a_dead_run_is_removed_and_others_are_not(tmp_path: Path) -> None:
    me, dead = incarnation(os.getpid()), a_dead_one()
    other_boot = msgspec.structs.replace(me, boot_id="another")
    gone = a_folder(tmp_path, "gone", an_owner(dead, dead))
    rebooted = a_folder(tmp_path, "rebooted", an_owner(other_boot, other_boot))
    kept = a_folder(tmp_path, "kept", an_owner(dead, me))
    mine = a_folder(tmp_path, "mine", an_owner(dead))
    assert set(remove_dead(str(tmp_path), spare=str(mine))) == {str(gone), str(rebooted)}
    assert not gone.parent.exists()
    assert kept.exists()
    assert mine.exists()


def test_a_folder_whose_lock_is_held_is_left_alone(tmp_path: Path) -> None:
    dead = a_dead_one()
    folder = tmp_path / "job" / "n0"
    fd = take_lock(str(folder), an_owner(dead))
    assert remove_dead(str(tmp_path), spare="") == ()
    assert folder.exists()
    os.close(fd)
    assert remove_dead(str(tmp_path), spare="") == (str(folder),)


def test_a_lock_that_is_garbage_is_nobody_to_judge(tmp_path: Path) -> None:
    folder = tmp_path / "job" / "n0"
    folder.mkdir(parents=True)
    (folder / "lock").write_text("{")
    assert remove_dead(str(tmp_path), spare="") == ()


def test_a_second_owner_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("perdure.agent.memory.lock._TRIES", 2)
    fd = take_lock(str(tmp_path / "f"), an_owner(incarnation(os.getpid())))
    with pytest.raises(HostError, match=f"process {os.getpid()} is the memory server"):
        take_lock(str(tmp_path / "f"), an_owner(incarnation(os.getpid())))
    os.close(fd)
