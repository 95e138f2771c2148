"""`perdure run`'s command line against torchrun's own parser, and against files that are there or are not."""

import os
import stat
import subprocess
import sys

import pytest

from perdure.cli.command_line import split
from perdure.cli.devices import count_cores
from perdure.cli.flags import FLAGS
from perdure.cli.torchrun import parse
from perdure.errors import ConfigError
from perdure.wire.messages import Entry
from tests.torch_release import like_torchrun

ENV = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}

LINES = [
    "train.py",
    "--nnodes 1:4 --nproc-per-node 2 train.py --lr 3e-4",
    "--nnodes=2 --nproc_per_node=gpu --rdzv_id=7 --rdzv_backend=c10d --rdzv_endpoint=h:1 train.py --role x -r 2 -m",
    "--standalone -m pkg.mod a b",
    "--no_python ./prog -h",
    "-r 3 -t0:1,1:2 --local_ranks_filter 0,1 train.py",
    "-r3 -mt 1 pkg",
    "--stand --max-res 3 train.py",
    "--node-rank -1 train.py -1",
    "--role a --role=b --master_addr= --master-port 5 train.py",
    "--rdzv-conf timeout=9,read_timeout=3 --signals-to-handle SIGTERM --shutdown_timeout 3 train.py",
    "--virtual-local-rank --numa-binding node --run-path /x/train.py -- --y",
    "--log-dir /l --monitor_interval 0.5 --start_method fork --event-log-handler null --logs-specs default train.py",
]


def torchrun_reads(argv: list[str]) -> tuple[dict[str, object], list[str]]:
    from torch.distributed.run import get_args_parser

    parser = get_args_parser()
    found = vars(parser.parse_args(argv))
    program = [found.pop("training_script"), *found.pop("training_script_args")]
    return {dest: value for dest, value in found.items() if value != parser.get_default(dest)}, program


@like_torchrun
@pytest.mark.parametrize("line", LINES)
def test_line_is_split_as_torchruns_parser_splits_it(line):
    theirs, program = torchrun_reads(line.split())
    ours = split(line.split())
    if "--" not in program and "--" in ours.program:
        program.insert(1, "--")  # argparse drops it (Python 3.11); the script's arguments are left alone here
    assert list(ours.program) == program
    usual = {"event_log_handler": "null"}
    switches = {flag.dest for flag in FLAGS if flag.is_switch}
    given = {dest: value for dest, value in ours.flags.items() if usual.get(dest) != value}
    assert {dest: "1" if dest in switches else str(value) for dest, value in theirs.items()} == given


def test_every_flag_of_torchrun_is_known_with_its_variable():
    from torch.distributed.argparse_util import check_env, env
    from torch.distributed.run import get_args_parser

    known = {flag.dest: flag for flag in FLAGS}
    for action in get_args_parser()._actions:
        if not action.option_strings or action.dest == "help":
            continue
        flag = known[action.dest]
        assert not flag.is_added
        assert flag.is_switch == (action.nargs == 0)
        assert flag.pet == isinstance(action, env | check_env)
        assert set(action.option_strings) <= {flag.short, flag.name, "--" + flag.dest}


def test_command_line_is_understood_without_torch(tmp_path):
    (tmp_path / "train.py").write_text("")
    code = (
        "import sys; from perdure.cli.torchrun import parse; "
        "parse(['--nproc-per-node', 'auto', 'train.py'], {}); print('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, env=ENV, check=True
    )
    assert done.stdout == "False\n"


def test_script_is_launched_as_it_was_named(tmp_path, monkeypatch):
    (tmp_path / "train.py").write_text("")
    monkeypatch.chdir(tmp_path)
    request = parse(["--log-dir", "logs", "train.py", "--lr", "1"], {})
    assert (request.launch.entry, request.launch.target, request.launch.args) == (
        Entry.SCRIPT,
        "train.py",
        ("--lr", "1"),
    )
    assert request.job.command == ("train.py", "--lr", "1")
    assert request.output.log_dir == str(tmp_path / "logs")
    absolute = str(tmp_path / "train.py")
    assert parse(["--run-path", "--no-python", absolute], {}).launch.entry is Entry.SCRIPT


def test_program_is_found_in_path_or_by_its_path(tmp_path):
    tool = tmp_path / "tool"
    tool.write_text("#!/bin/sh\n")
    tool.chmod(0o755)
    assert parse(["--no-python", str(tool)], {}).launch.entry is Entry.PROGRAM
    assert parse(["--no-python", "tool"], {"PATH": str(tmp_path)}).launch.target == "tool"


def test_program_that_is_not_there_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plain").write_text("")
    (tmp_path / "train.py").write_text("")
    wrong = {
        ("nope.py",): f"there is no script nope.py in {tmp_path}",
        (str(tmp_path),): "is a folder",
        ("--run-path", "train.py"): f"write {tmp_path}/train.py",
        ("--no-python", "nope"): "there is no program nope",
        ("--no-python", "./plain"): "chmod",
        ("--no-python", "--preload", "a", "/bin/sh"): "--preload has no use",
    }
    for argv, words in wrong.items():
        with pytest.raises(ConfigError) as caught:
            parse(argv, {"PATH": str(tmp_path)})
        assert words in str(caught.value)


def test_certificate_and_key_come_together(tmp_path):
    files = {name: tmp_path / name for name in ("cert", "key", "ca")}
    for file in files.values():
        file.write_text("")
    cert, key, ca = (str(file) for file in files.values())
    tls = parse(["--tls-cert", cert, "--tls-key", key, "-m", "job"], {}).tls
    assert tls is not None
    assert (tls.cert, tls.key, tls.ca) == (cert, key, cert)
    only = parse(["--tls-ca", ca, "-m", "job"], {}).tls
    assert only is not None
    assert (only.cert, only.ca) == (None, ca)
    with pytest.raises(ConfigError, match="belong together"):
        parse(["--tls-cert", cert, "-m", "job"], {})
    with pytest.raises(ConfigError, match="a file that can be read"):
        parse(["--tls-ca", cert + "x", "-m", "job"], {})


def test_auto_means_cores_where_no_gpu_is_visible(tmp_path):
    request = parse(["--nproc-per-node", "auto", "-m", "job"], {"CUDA_VISIBLE_DEVICES": ""})
    assert request.job.workers_per_node == count_cores()
    assert parse(["--nproc-per-node", "cpu", "-m", "job"], {}).job.workers_per_node == count_cores()
    with pytest.raises(ConfigError, match="no NVIDIA GPU is visible"):
        parse(["--nproc-per-node", "gpu", "-m", "job"], {"CUDA_VISIBLE_DEVICES": ""})


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every file")
def test_script_without_permission_is_refused(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("")
    script.chmod(stat.S_IWUSR)
    with pytest.raises(ConfigError, match="cannot be read"):
        parse([str(script)], {})
