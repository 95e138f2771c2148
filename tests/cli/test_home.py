"""The state folder: where it lies, who holds a job, where control is, and which token counts."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from perdure.cli.home import (
    ControlFile,
    Home,
    JobDir,
    find_home,
    hold_lock,
    publish_control,
    read_control,
    resolve_token,
    withdraw_control,
)
from perdure.errors import ConfigError, HostError
from perdure.vocab.generation import Address
from perdure.vocab.ids import Incarnation, JobId


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path / "home")


def job(home: Home, name: str = "exp7") -> JobDir:
    return home.job_dir(JobId(name))


@pytest.mark.parametrize(
    ("environ", "root"),
    [
        ({"PERDURE_HOME": "/p", "XDG_STATE_HOME": "/x", "HOME": "/h"}, "/p"),
        ({"PERDURE_HOME": "", "XDG_STATE_HOME": "/x", "HOME": "/h"}, "/x/perdure"),
        ({"XDG_STATE_HOME": "relative", "HOME": "/h"}, "/h/.local/state/perdure"),
        ({"HOME": "/h"}, "/h/.local/state/perdure"),
    ],
)
def test_home_lies_where_the_environment_says(environ, root):
    assert find_home(environ).root == Path(root)


def test_job_folder_is_made_for_its_owner_only(home):
    assert not home.job_dir(JobId("exp7"), create=False).path.exists()
    made = job(home)
    assert made.path.stat().st_mode & 0o777 == 0o700
    assert made.logs.is_dir()
    assert job(home) == made


def test_folder_that_cannot_be_made_is_refused_in_one_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="set PERDURE_HOME"):
        Home(tmp_path / "file").job_dir(JobId("exp7"))


def test_newest_job_is_the_one_that_was_started_last(home):
    assert home.newest() is None
    for age, name in ((30, "a"), (10, "b"), (20, "c")):
        with hold_lock(job(home, name)):
            pass
        os.utime(job(home, name).lock, (1e9 - age, 1e9 - age))
    assert [found.id for found in home.list_jobs()] == ["b", "c", "a"]
    assert home.newest() == job(home, "b")


def test_second_launcher_is_told_who_holds_the_job(home):
    held = job(home)
    code = (
        "import sys, pathlib; from perdure.cli.home import JobDir, hold_lock\n"
        "with hold_lock(JobDir(pathlib.Path(sys.argv[1]))): print('held', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(held.path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        with pytest.raises(ConfigError, match=f"exp7 is run by process {other.pid} on .* already"), hold_lock(held):
            pass
        other.kill()
        other.wait()
        with hold_lock(held):
            assert str(os.getpid()) in held.lock.read_text()


def test_control_is_published_replaced_and_withdrawn(home):
    where = job(home)
    assert read_control(where) is None
    first = ControlFile(address=Address("127.0.0.1", 1), pid=5, incarnation=Incarnation(5, 6, "boot"))
    second = ControlFile(address=Address("::1", 2), pid=7, incarnation=Incarnation(7, 8, "boot"), tls="/ca.pem")
    for control in (first, second):
        publish_control(where, control)
        assert read_control(where) == control
    assert where.control.stat().st_mode & 0o777 == 0o600
    assert sorted(path.name for path in where.path.iterdir()) == ["control", "logs"]
    withdraw_control(where)
    withdraw_control(where)
    assert read_control(where) is None


def test_damaged_control_file_is_reported(home):
    job(home).control.write_text("{")
    with pytest.raises(HostError, match="is damaged"):
        read_control(job(home))


def test_local_token_is_made_once_and_kept_private(home):
    token = resolve_token(home, job(home), {"PERDURE_TOKEN": "not-for-local-use"}, local=True)
    assert len(token) >= 32
    assert resolve_token(home, job(home), {}, local=True) == token
    assert job(home).token.stat().st_mode & 0o777 == 0o600


def test_token_of_several_machines_is_what_they_were_given(home):
    where = job(home)
    (home.root / "token").write_text("h" * 32)
    (home.root / "token").chmod(0o600)
    assert resolve_token(home, where, {}, local=False) == "h" * 32
    where.token.write_text("j" * 32)
    where.token.chmod(0o600)
    assert resolve_token(home, where, {}, local=False) == "j" * 32
    assert resolve_token(home, where, {"PERDURE_TOKEN": "e" * 32}, local=False) == "e" * 32
    with pytest.raises(ConfigError, match="PERDURE_TOKEN: the token must"):
        resolve_token(home, where, {"PERDURE_TOKEN": ""}, local=False)


def test_missing_token_is_refused_with_a_command_that_works(home):
    with pytest.raises(ConfigError) as caught:
        resolve_token(home, job(home), {}, local=False)
    said = str(caught.value)
    command = said[said.index("export ") : said.index(" once")]
    tools = f"{Path(sys.executable).parent}:/usr/bin:/bin"
    done = subprocess.run(
        ["bash", "-c", f"{command}; echo $PERDURE_TOKEN"],
        capture_output=True,
        text=True,
        env={"PATH": tools},
        check=True,
    )
    assert resolve_token(home, job(home), {"PERDURE_TOKEN": done.stdout.strip()}, local=False) == done.stdout.strip()
