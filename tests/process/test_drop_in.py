"""The word `torchrun` replaced by `perdure run`: an unchanged script sees, prints and leaves the same."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from perdure.vocab.event import WorkerExited
from tests.process.jobs import LIMIT, environment, perdure, running
from tests.torch_release import like_torchrun

DUMP = """
import json, os, sys
found = {
    "env": dict(os.environ),
    "argv": sys.argv,
    "orig_argv": sys.orig_argv[1:],
    "path": sys.path,
    "cwd": os.getcwd(),
    "names": [__name__, __package__, os.path.abspath(__file__)],
    "spec": __spec__ and __spec__.name,
    "main": sys.modules["__main__"].__dict__ is globals(),
    "flags": [sys.flags.safe_path, sys.flags.no_site, sys.flags.isolated, sys.flags.optimize],
    "modules": sorted(name for name in ("torch", "numpy") if name in sys.modules),
    "streams": [sys.stdout.encoding, sys.stdout.errors, sys.stderr.errors, sys.stdout.isatty()],
}
with open(f"dump-{os.environ['RANK']}.json", "w") as file:
    json.dump(found, file)
print("out of", os.environ["RANK"])
print("err of", os.environ["RANK"], file=sys.stderr)
"""
OURS = {
    *("PERDURE_ATTEMPT", "PERDURE_GENERATION", "PERDURE_JOB", "PERDURE_MEMORY", "PERDURE_NODE"),
    *("PYTORCH_NVML_BASED_CUDA_CHECK", "GLIBC_TUNABLES"),
}
"""What we add: torch.cuda.is_available() makes no CUDA context before the fork, and large copies pass the caches by."""
DIFFERENT = {
    *("MASTER_PORT", "TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_RUN_ID", "MASTER_ADDR"),
    "TORCHELASTIC_MAX_RESTARTS",
}
"""Ports, paths and ids (torchrun --standalone names the host, we name its loopback address); and our default of 3."""


def torchrun(folder: Path, *words: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", *words],
        cwd=folder,
        env=environment(folder / "home", env),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )


def dumps(folder: Path, ranks: int = 2) -> list[dict[str, Any]]:
    return [json.loads((folder / f"dump-{rank}.json").read_text()) for rank in range(ranks)]


def tree(folder: Path) -> list[str]:
    """Paths below, with the random part of torchrun's run folder cut off."""
    paths = [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()]
    return sorted(re.sub(r"^[^/]*", "RUN", path) for path in paths)


def lines_of_workers(text: str) -> list[str]:
    return sorted(line for line in text.splitlines() if re.match(r"\[\w+\d\]:|(out|err) of", line))


def both(tmp_path: Path, *words: str, files: dict[str, str]) -> tuple[Path, Path, list[str], list[str]]:
    """The folders and the workers' console lines, (theirs, ours, their lines, our lines)."""
    folders, shown = [], []
    for name in ("theirs", "ours"):
        folder = tmp_path / name / "same"
        for path, text in files.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(text)
        done = torchrun(folder, *words) if name == "theirs" else perdure(folder, "run", *words)
        assert done.returncode == 0, done.stderr
        folders.append(folder)
        shown.append([*lines_of_workers(done.stdout), *lines_of_workers(done.stderr)])
    return folders[0], folders[1], shown[0], shown[1]


def assert_same_view(theirs: dict[str, Any], ours: dict[str, Any], folders: tuple[Path, Path]) -> None:
    text = json.dumps(theirs).replace(str(folders[0].parent), str(folders[1].parent))
    theirs = json.loads(text)
    env, other = ours.pop("env"), theirs.pop("env")
    assert set(env) - OURS == set(other)
    assert {k: v for k, v in env.items() if k not in OURS | DIFFERENT} == {
        k: v for k, v in other.items() if k not in DIFFERENT
    }
    assert ours == theirs


@like_torchrun
def test_script_sees_what_it_sees_under_torchrun(tmp_path: Path) -> None:
    words = ("--nproc-per-node", "2", "--redirects", "3", "--tee", "0:3", "--local-ranks-filter", "0")
    words = (*words, "--log-dir", "logs", "sub dir/dump.py", "--lr", "3e-4", "${local_rank}")
    theirs, ours, their_lines, our_lines = both(tmp_path, *words, files={"sub dir/dump.py": DUMP})
    for rank in (0, 1):
        assert_same_view(dumps(theirs)[rank], dumps(ours)[rank], (theirs, ours))
    assert our_lines == their_lines == ["[default0]:out of 0", "[default0]:err of 0"]
    assert tree(ours / "logs") == tree(theirs / "logs")


@like_torchrun
@pytest.mark.parametrize("fork", [[], ["--no-fork-server"]])
def test_module_sees_what_it_sees_under_torchrun(tmp_path: Path, fork: list[str]) -> None:
    files = {"pkg/__init__.py": "", "pkg/dump.py": DUMP}
    if not fork:
        theirs, ours, _, _ = both(tmp_path, "-m", "pkg.dump", "a", files=files)
        assert_same_view(dumps(theirs, 1)[0], dumps(ours, 1)[0], (theirs, ours))
        return
    for path, text in files.items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(text)
    assert perdure(tmp_path, "run", *fork, "-m", "pkg.dump", "a").returncode == 0
    seen = dumps(tmp_path, 1)[0]
    assert seen["argv"] == [str(tmp_path / "pkg" / "dump.py"), "a"]
    assert (seen["spec"], seen["names"][:2], seen["main"]) == ("pkg.dump", ["__main__", "pkg"], True)


def test_record_writes_the_error_file_and_the_script_its_exit_code(tmp_path: Path) -> None:
    (tmp_path / "fail.py").write_text(
        "import os\n"
        "from torch.distributed.elastic.multiprocessing.errors import record\n\n"
        "@record\ndef main():\n    if os.environ['RANK'] == '1':\n        raise KeyError('no such shard')\n"
        "    import time\n    time.sleep(60)\n\nmain()\n"
    )
    words = ("--nproc-per-node", "2", "--max-restarts", "0", "--log-dir", "logs", "fail.py")
    with running(tmp_path, *words) as job:
        assert job.end() == 1
        (file,) = (tmp_path / "logs").glob("*/attempt_0/1/error.json")
        message = json.loads(file.read_text())["message"]
        assert "no such shard" in message["message"]
        assert "Traceback" in message["extraInfo"]["py_callstack"]
        error = job.all(WorkerExited)[0].error
        assert error is not None
        assert (error.type, error.where.rpartition("/")[2]) == ("KeyError", "fail.py:7")


def test_program_that_is_not_python_runs_as_it_is(tmp_path: Path) -> None:
    words = ("--nproc-per-node", "2", "--no-python", "sh", "-c", "echo $RANK of $WORLD_SIZE >said-$LOCAL_RANK; exit 0")
    assert perdure(tmp_path, "run", *words).returncode == 0
    assert [(tmp_path / f"said-{rank}").read_text() for rank in (0, 1)] == ["0 of 2\n", "1 of 2\n"]


LIBRARIES = """
import json, multiprocessing, os, sys
import argparse
import helper

def square(number):
    return number * number

if __name__ == "__main__":
    results = []
    for method in ("spawn", "fork", "forkserver"):
        with multiprocessing.get_context(method).Pool(1) as pool:
            results.append(pool.map(square, [3]))
    found = {"argparse": argparse.VALUE, "helper": helper.VALUE, "pools": results, "input": sys.stdin.read(),
             "threads": os.environ.get("OMP_NUM_THREADS"), "local": os.environ["LOCAL_RANK"], "cwd": os.getcwd(),
             "devices": os.environ.get("CUDA_VISIBLE_DEVICES")}
    with open(f"found-{os.environ['RANK']}.json", "w") as file:
        json.dump(found, file)
"""


@pytest.mark.parametrize("words", [[], ["--no-fork-server"], ["--run-path"]])
def test_folder_of_the_script_counts_as_under_python(tmp_path: Path, words: list[str]) -> None:
    """Its own argparse.py is the one that is imported, by the script and not by us; pools find `__main__`."""
    folder = tmp_path / "a folder"
    folder.mkdir()
    (folder / "train.py").write_text(LIBRARIES)
    (folder / "argparse.py").write_text("VALUE = 'mine'\n")
    (folder / "helper.py").write_text("VALUE = 'here'\n")
    env = {"PET_NPROC_PER_NODE": "2", "CUDA_VISIBLE_DEVICES": "4,5"}
    done = perdure(folder, "run", *words, "--virtual-local-rank", str(folder / "train.py"), env=env)
    assert done.returncode == 0, done.stderr
    for rank in (0, 1):
        found = json.loads((folder / f"found-{rank}.json").read_text())
        assert (found["argparse"], found["helper"], found["cwd"]) == ("mine", "here", str(folder))
        assert found["pools"] == [[9], [9], [9]]
        assert found["input"] == ""  # torchrun's ranks share the terminal's input; ours have none
        assert (found["threads"], found["local"], found["devices"]) == ("1", "0", str(4 + rank))


@pytest.mark.parametrize("words", [[], ["--no-fork-server"]])
def test_module_named_like_one_of_pythons_is_the_scripts_own(tmp_path: Path, words: list[str]) -> None:
    """Also where the folder of the script is the current one, and Perdure itself uses the module of that name."""
    (tmp_path / "random.py").write_text("VALUE = 'mine'\n")
    (tmp_path / "train.py").write_text("import random\nprint(random.VALUE, random.__name__)\n")
    done = perdure(tmp_path, "run", *words, "train.py")
    assert done.returncode == 0, done.stderr
    assert "mine random" in done.stdout


def test_number_of_threads_is_left_alone_with_one_worker_or_where_the_user_says(tmp_path: Path) -> None:
    (tmp_path / "say.py").write_text("import os\nprint('threads', os.environ.get('OMP_NUM_THREADS'))\n")
    clean = {"OMP_NUM_THREADS": ""} if "OMP_NUM_THREADS" in os.environ else {}
    assert not clean, "run the tests without OMP_NUM_THREADS"
    assert "threads None" in perdure(tmp_path, "run", "say.py").stdout
    said = perdure(tmp_path, "run", "--nproc-per-node", "2", "say.py", env={"OMP_NUM_THREADS": "3"}).stdout
    assert said.count("threads 3") == 2
