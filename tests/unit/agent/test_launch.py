"""What a worker is given, against what torchrun gives (tests/process compares with a real torchrun)."""

import msgspec
import pytest

from perdure.agent.config import AgentConfig, OutputConfig
from perdure.agent.launch import base_env, glibc_tunables, launch_for, line_prefix, spawn_argv, worker_env
from perdure.errors import ConfigError, WireError
from perdure.vocab.generation import Address, Assignment, Member
from perdure.vocab.ids import GenerationNumber, JobId, NodeId, Rank
from perdure.wire.messages import Duty, Entry, Launch, Orders

CONFIG = AgentConfig(
    job=JobId("j"),
    node=NodeId("b"),
    control=Address("127.0.0.1", 1),
    address="127.0.0.1",
    slots=2,
    world="w",
    launch=Launch(entry=Entry.SCRIPT, target="train.py", args=("--gpu", "${local_rank}", "$5", "$$")),
    python="/usr/bin/python3",
    run_id="run",
    max_restarts=3,
    output=OutputConfig(log_dir="/dev/null"),
)
ORDERS = Orders(
    version=1,
    job=JobId("j"),
    duty=Duty.RUN,
    generation=GenerationNumber(4),
    assignment=Assignment(
        number=GenerationNumber(4),
        members=(
            Member(node=NodeId("a"), first_rank=Rank(0), count=2),
            Member(node=NodeId("b"), first_rank=Rank(2), count=2),
            Member(node=NodeId("c"), first_rank=Rank(4), count=2),
        ),
        store_host=NodeId("a"),
    ),
    store=Address("10.0.0.1", 4000),
    restarts=2,
)


def changed(**fields: object) -> AgentConfig:
    return msgspec.structs.replace(CONFIG, **fields)


def test_worker_env_of_a_middle_node_names_its_place() -> None:
    env = worker_env(CONFIG, ORDERS, 1, "/logs/error.json")
    assert env == {
        "LOCAL_RANK": "1",
        "RANK": "3",
        "GROUP_RANK": "1",
        "ROLE_RANK": "3",
        "ROLE_NAME": "default",
        "LOCAL_WORLD_SIZE": "2",
        "WORLD_SIZE": "6",
        "GROUP_WORLD_SIZE": "3",
        "ROLE_WORLD_SIZE": "6",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "4000",
        "TORCHELASTIC_RESTART_COUNT": "2",
        "TORCHELASTIC_MAX_RESTARTS": "3",
        "TORCHELASTIC_RUN_ID": "run",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_ERROR_FILE": "/logs/error.json",
        "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        "PERDURE_GENERATION": "4",
        "PERDURE_NODE": "b",
        "PERDURE_ATTEMPT": "0",
        "PERDURE_JOB": "j",
    }


def test_worker_env_keeps_what_the_user_has_set() -> None:
    environ = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "3", "CUDA_VISIBLE_DEVICES": "4,5"}
    env = worker_env(CONFIG, ORDERS, 0, "", environ)
    assert (env["TORCH_NCCL_ASYNC_ERROR_HANDLING"], env["CUDA_VISIBLE_DEVICES"]) == ("3", "4,5")


@pytest.mark.parametrize(("visible", "device"), [(None, "1"), ("6, 7", "7")])
def test_virtual_local_rank_sees_one_device_as_0(visible: str | None, device: str) -> None:
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    env = worker_env(changed(virtual_local_rank=True), ORDERS, 1, "", environ)
    assert (env["LOCAL_RANK"], env["CUDA_VISIBLE_DEVICES"]) == ("0", device)


def test_virtual_local_rank_without_a_device_is_refused() -> None:
    with pytest.raises(ConfigError, match="local rank 1 has no device in CUDA_VISIBLE_DEVICES=6"):
        worker_env(changed(virtual_local_rank=True), ORDERS, 1, "", {"CUDA_VISIBLE_DEVICES": "6"})


@pytest.mark.parametrize("broken", [{"store": None}, {"assignment": None}])
def test_orders_that_name_no_store_or_part_are_refused(broken: dict[str, None]) -> None:
    with pytest.raises(WireError, match="generation 4"):
        worker_env(CONFIG, msgspec.structs.replace(ORDERS, **broken), 0, "")


def test_base_env_defaults_only_what_is_not_set() -> None:
    assert base_env(CONFIG, {})["OMP_NUM_THREADS"] == "1"
    assert base_env(CONFIG, {"OMP_NUM_THREADS": "8"})["OMP_NUM_THREADS"] == "8"
    assert base_env(changed(env={"OMP_NUM_THREADS": "4"}), {"OMP_NUM_THREADS": "8"})["OMP_NUM_THREADS"] == "4"
    assert "OMP_NUM_THREADS" not in base_env(changed(slots=1), {})
    assert "GLOO_SOCKET_IFNAME" not in base_env(CONFIG, {})
    assert base_env(CONFIG, {}, "eth1")["GLOO_SOCKET_IFNAME"] == "eth1"
    assert base_env(CONFIG, {"GLOO_SOCKET_IFNAME": "ib0"}, "eth1")["GLOO_SOCKET_IFNAME"] == "ib0"
    assert base_env(CONFIG, {"HOME": "/h"}).items() >= {"HOME": "/h", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}.items()


def test_large_copies_stream_unless_the_user_says_from_where() -> None:
    ours = "glibc.cpu.x86_non_temporal_threshold=0x100000"
    assert base_env(CONFIG, {})["GLIBC_TUNABLES"] == ours
    assert glibc_tunables("glibc.malloc.check=3") == f"glibc.malloc.check=3:{ours}"
    theirs = "glibc.cpu.x86_non_temporal_threshold=0x4000000:glibc.malloc.check=3"
    assert glibc_tunables(theirs) == theirs


def test_macros_are_replaced_as_in_torchrun() -> None:
    assert launch_for(CONFIG, 1).args == ("--gpu", "1", "$5", "$")
    program = changed(launch=Launch(entry=Entry.PROGRAM, target="./run-${local_rank}", args=("${local_rank}",)))
    assert launch_for(program, 1) == Launch(entry=Entry.PROGRAM, target="./run-${local_rank}", args=("1",))


def test_spawn_argv_runs_the_worker_module_or_the_program_itself() -> None:
    assert spawn_argv(CONFIG, 1, GenerationNumber(4), 9) == [
        *("/usr/bin/python3", "-u", "-m", "perdure.trainer.worker", "--heartbeat-fd", "9", "--slot", "1"),
        *("--generation", "4", "--kind", "script", "--target", "train.py", "--", "--gpu", "1", "$5", "$"),
    ]
    program = changed(launch=Launch(entry=Entry.PROGRAM, target="./a.out", args=("x",)))
    assert spawn_argv(program, 0, GenerationNumber(1), 9) == ["./a.out", "x"]


def test_line_prefix_fills_the_users_template() -> None:
    assert line_prefix(CONFIG, 3, 1) == "[default3]:"
    custom = changed(output=OutputConfig(log_dir="/dev/null", prefix="<${local_rank}/${rank} ${other}>"))
    assert line_prefix(custom, 3, 1) == "<1/3 ${other}>"
