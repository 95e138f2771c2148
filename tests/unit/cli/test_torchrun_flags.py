"""What each flag of `perdure run` means. Module names serve as scripts, so that no file is touched."""

import re
import socket
import sys

import pytest

from perdure.cli.command_line import HelpRequested, split
from perdure.cli.devices import visible_gpus
from perdure.cli.flags import FLAGS, help_text
from perdure.cli.request import RunRequest, owns_endpoint
from perdure.cli.timeouts import WHOLE_JOB
from perdure.cli.torchrun import parse
from perdure.errors import ConfigError
from perdure.vocab.generation import Address
from perdure.wire.messages import Entry, Launch

HOST = socket.gethostname()


def run(line: str = "", **environ: str) -> RunRequest:
    """The request of `perdure run LINE -m job`."""
    return parse([*line.split(), "-m", "job"], environ)


def refusal(line: str = "", **environ: str) -> str:
    with pytest.raises(ConfigError) as caught:
        run(line, **environ)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# --- the line and the variables --------------------------------------------------------------------------------------


def test_script_arguments_that_look_like_flags_stay_the_scripts():
    line = split(["--nnodes", "2", "train.py", "--nnodes", "9", "--no", "--json", "--", "-x"])
    assert line.flags == {"nnodes": "2"}
    assert line.program == ("train.py", "--nnodes", "9", "--no", "--json", "--", "-x")


@pytest.mark.parametrize("flag", FLAGS, ids=lambda flag: flag.name)
def test_flag_with_dashes_underscores_and_equals_sign_is_one(flag):
    words = [] if flag.is_switch else ["3"]
    expected = {flag.dest: "1" if flag.is_switch else "3"}
    assert split([flag.name, *words, "x"]).flags == expected
    assert split(["--" + flag.dest, *words, "x"]).flags == expected
    assert flag.is_switch or split([f"--{flag.dest}=3", "x"]).flags == expected


@pytest.mark.parametrize(
    ("words", "flags"),
    [
        (["--stand"], {"standalone": "1"}),
        (["--nproc", "2"], {"nproc_per_node": "2"}),
        (["--te", "3"], {"tee": "3"}),
        (["-r3"], {"redirects": "3"}),
        (["-r", "3"], {"redirects": "3"}),
        (["-mt", "1"], {"module": "1", "tee": "1"}),
        (["--node-rank", "-1"], {"node_rank": "-1"}),
        (["--role", "a", "--role", "b"], {"role": "b"}),
        (["--"], {}),
    ],
)
def test_spellings_that_torchrun_takes_are_taken(words, flags):
    line = split([*words, "train.py", "-a"])
    assert (line.flags, line.program) == (flags, ("train.py", "-a"))


def test_abbreviation_never_means_a_flag_of_perdure():
    assert "--json" in refusal("--js")
    assert split(["--red", "1", "x"]).flags == {"redirects": "1"}


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--nproc_per_nod3 2", ["--nproc_per_nod3", "did you mean --nproc-per-node?"]),
        ("--frobnicate", ["knows no flag --frobnicate", "--help"]),
        ("-x", ["knows no flag -x"]),
        ("--st 1", ["--standalone or --start-method", "write it out"]),
        ("--standalone=1", ["takes no value"]),
        ("--role", ["--role needs a value"]),
    ],
)
def test_flag_that_is_not_understood_is_refused_with_advice(line, words):
    said = refusal(line)
    assert all(word in said for word in words), said


def test_help_is_asked_for_only_before_the_script():
    for word in ("-h", "--help", "-mh"):
        with pytest.raises(HelpRequested):
            parse([word], {})
    assert parse(["-m", "job", "--help"], {}).launch.args == ("--help",)


def test_help_names_every_flag_and_its_default():
    text = " ".join(help_text().split())
    for flag in FLAGS:
        assert flag.name in text
        assert f"[{flag.default}]" in text or not flag.default


def test_pet_variable_counts_where_the_flag_is_absent():
    assert run(PET_MAX_RESTARTS="7").job.rules.max_restarts == 7
    assert run("--max-restarts 1", PET_MAX_RESTARTS="7").job.rules.max_restarts == 1
    assert refusal(PET_MAX_RESTARTS="many").startswith("PET_MAX_RESTARTS (--max-restarts) is 'many', but must be")


def test_pet_switch_is_on_unless_zero():
    assert parse(["job"], {"PET_MODULE": "1"}).launch.entry is Entry.MODULE
    assert not run(PET_VIRTUAL_LOCAL_RANK="0").virtual_local_rank
    assert run("--virtual-local-rank", PET_VIRTUAL_LOCAL_RANK="0").virtual_local_rank
    assert "1 (on) or 0 (off)" in refusal(PET_STANDALONE="yes")


def test_variables_that_torchrun_does_not_read_are_not_read():
    assert run(PET_NUMA_BINDING="node", PET_LOGS_SPECS="x", PET_SPARES="1").numa_binding is None


# --- the job ---------------------------------------------------------------------------------------------------------


def test_bare_module_gives_one_node_with_one_worker():
    request = parse(["-m", "pkg.job", "--lr", "1"], {})
    job = request.job
    assert (job.min_nodes, job.max_nodes, job.workers_per_node, job.spares) == (1, 1, 1, 0)
    assert job.command == ("-m", "pkg.job", "--lr", "1")
    assert request.launch == Launch(entry=Entry.MODULE, target="pkg.job", args=("--lr", "1"))
    assert (request.endpoint, request.owner, request.python) == (None, None, sys.executable)
    assert [(n.name, n.order, n.standby) for n in request.nodes] == [("node-0", 0, False)]
    assert request.id_is_made
    assert re.fullmatch("run-[0-9a-f]{6}", job.id)


def test_id_none_is_replaced_and_a_given_one_kept():
    assert run("--rdzv-id none").id_is_made
    assert run("--rdzv-id exp:7").job.id == "exp:7"
    for wrong in ("a/b", "..", "a\x00b", "x" * 101):
        with pytest.raises(ConfigError, match="--rdzv-id is"):
            parse(["--rdzv-id", wrong, "-m", "job"], {})


def test_restarts_are_a_total_only_where_the_user_gives_them():
    usual, given, both = run().job.rules, run("--max-restarts 0").job.rules, run("--max-restarts 5 --restart-window 1h")
    assert (usual.max_restarts, usual.restart_window) == (3, 3600)
    assert (given.max_restarts, given.restart_window) == (0, WHOLE_JOB)
    assert (both.job.rules.max_restarts, both.job.rules.restart_window) == (5, 3600)


def test_times_reach_the_rules():
    request = run("--stall-limit 30s --hold 0 --shutdown-timeout 7 --monitor-interval 0.2")
    assert request.job.stalls.fixed == 30
    assert (request.job.rules.hold, request.job.rules.shutdown_timeout, request.poll_seconds) == (0, 7, 0.2)
    assert run(TORCH_ELASTIC_SHUTDOWN_TIMEOUT="4").job.rules.shutdown_timeout == 4
    assert run("--shutdown-timeout 5", TORCH_ELASTIC_SHUTDOWN_TIMEOUT="4").job.rules.shutdown_timeout == 5


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--stall-limit soon", ["--stall-limit: 'soon' is not a duration"]),
        ("--stall-limit 0", ["--stall-limit is '0'", "above 0"]),
        ("--restart-window 0s", ["--restart-window", "above 0"]),
        ("--stall-limit 3s", ["lease (5.00 s)", "--stall-limit (3.00 s)"]),
        ("--stall-limit 10m", ["--stall-limit (10 min 0 s)", "collective timeout (10 min 0 s)"]),
        ("--max-restarts -1", ["--max-restarts is '-1'", "at least 0"]),
        ("--monitor-interval 0", ["--monitor-interval is '0'", "above 0"]),
        ("--monitor-interval nan", ["--monitor-interval"]),
        ("--shutdown-timeout 1.5", ["--shutdown-timeout is '1.5'", "whole number"]),
        ("--master-port 70000", ["--master-port is '70000'", "from 1 to 65535"]),
        ("--nproc-per-node 0", ["at least 1 worker"]),
        ("--nproc-per-node two", ["must be a number, auto, gpu or cpu"]),
        ("--nproc-per-node xpu", ["give their number"]),
        ("--nproc-per-node=", ["must be a number, auto, gpu or cpu"]),
        ("--start-method thread", ["one of spawn, fork, forkserver"]),
        ("--numa-binding all", ["one of node, socket"]),
        ("--redirects 4", ["--redirects is '4'"]),
        ("--tee 0:3,1", ["--tee is '0:3,1'"]),
        ("--local-ranks-filter a", ["--local-ranks-filter is 'a'"]),
        ("--signals-to-handle SIGFOO", ["'SIGFOO' is no signal"]),
        ("--signals-to-handle SIGKILL", ["no program can handle"]),
        ("--preload a,,b", ["--preload is 'a,,b'"]),
        ("--preload a --no-fork-server", ["leave one out"]),
        ("--start-method fork --no-fork-server", ["contradict"]),
        ("--no-python", ["--module and --no-python contradict"]),
        ("--run-path", ["--module and --run-path contradict"]),
    ],
)
def test_wrong_value_is_refused_with_flag_value_and_remedy(line, words):
    said = refusal(line)
    assert all(word in said for word in words), said


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--rdzv-backend etcd-v2", ["brings its own control", "c10d or static"]),
        ("--event-log-handler console", ["own event log", "perdure why"]),
        ("--logs-specs mine", ["writes the log files itself"]),
    ],
)
def test_part_that_perdure_replaces_is_refused_with_the_reason(line, words):
    said = refusal(line)
    assert all(word in said for word in words), said


def test_start_method_is_accepted_with_a_note():
    assert run("--start-method spawn").notes == ()
    assert "no effect on scripts" in run("--start-method forkserver").notes[0]


def test_missing_script_is_refused():
    for argv in ([], ["--nnodes", "2"], ["--"]):
        with pytest.raises(ConfigError, match="no script is given"):
            parse(argv, {"PET_STANDALONE": "1"})


# --- shape and meeting point -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "low", "high", "spares", "standby"),
    [
        ("--local-nodes 3", 3, 3, 0, [False, False, False]),
        ("--local-nodes 3 --spares 1", 2, 2, 1, [False, False, True]),
        ("--local-nodes 3 --spares 1 --nnodes 2", 2, 2, 1, [False, False, True]),
        ("--local-nodes 2 --nnodes 1:4", 1, 4, 0, [False, False]),
        ("--standalone --nnodes 1:4", 1, 4, 0, [False]),
        ("--standalone --nnodes 1", 1, 1, 0, [False]),
    ],
)
def test_local_nodes_share_out_into_members_and_spares(line, low, high, spares, standby):
    request = run(line)
    assert (request.job.min_nodes, request.job.max_nodes, request.job.spares) == (low, high, spares)
    assert [node.standby for node in request.nodes] == standby
    assert [node.name for node in request.nodes] == [f"node-{i}" for i in range(len(standby))]
    assert request.endpoint is None


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--nnodes 2 --spares 1", ["2 nodes and 1 spare", "--local-nodes 3", "--rdzv-endpoint"]),
        ("--nnodes 1:4", ["1 to 4 nodes", "--local-nodes 4", "--rdzv-endpoint"]),
        ("--spares 1", ["1 node and 1 spare", "--local-nodes 2"]),
        ("--nnodes 2 --standalone", ["--local-nodes 2"]),
        ("--nnodes 2 --rdzv-backend c10d --rdzv-endpoint localhost:0", ["--local-nodes 2"]),
        ("--nnodes 3 --local-nodes 2", ["3 nodes", "2 would start"]),
        ("--nnodes 2 --local-nodes 3", ["--local-nodes 3 is more than", "--spares 1"]),
        ("--local-nodes 1 --spares 1", ["leaves no node to work"]),
        ("--nnodes 4:2", ["the fewest come first", "2:4"]),
        ("--nnodes 0", ["at least 1"]),
        ("--nnodes 1:2:3", ["MIN:MAX"]),
        ("--nnodes many", ["MIN:MAX"]),
        ("--node-rank 1", ["--node-rank 1 is beyond the last of 1 nodes"]),
        ("--node-rank -1", ["at least 0"]),
        ("--nnodes 2 --rdzv-endpoint h:1 --node-rank 2", ["ranks go from 0 to 1"]),
        ("--nnodes 2 --rdzv-backend c10d --rdzv-endpoint head:0", ["port 0", "head:29400"]),
        ("--rdzv-endpoint http://head:1", ["HOST:PORT"]),
        ("--rdzv-endpoint head:99999", ["HOST:PORT"]),
        ("--rdzv-endpoint fe80::1", ["[fd00::1]:29400"]),
        ("--master-addr a/b", ["a host name or an address"]),
    ],
)
def test_shape_that_cannot_come_about_is_refused(line, words):
    said = refusal(line)
    assert all(word in said for word in words), said


@pytest.mark.parametrize(
    ("line", "host", "port"),
    [
        ("--rdzv-backend c10d --rdzv-endpoint head", "head", 29400),
        ("--rdzv-backend c10d --rdzv-endpoint head:1234", "head", 1234),
        ("--rdzv-backend c10d --rdzv-endpoint [fd00::1]", "fd00::1", 29400),
        ("--rdzv-backend c10d --rdzv-endpoint [fd00::1]:99", "fd00::1", 99),
        ("--rdzv-endpoint head", "head", 29500),
        ("--nnodes 2 --master-addr 10.0.0.1", "10.0.0.1", 29500),
        ("--nnodes 2 --master-addr 10.0.0.1 --master-port 7", "10.0.0.1", 7),
        ("--nnodes 2 --master-port 7", "127.0.0.1", 7),
    ],
)
def test_endpoint_is_found_as_in_torchrun(line, host, port):
    request = run(line)
    assert request.endpoint == Address(host, port)
    assert (request.master_addr, request.master_port) == (None, 0)


def test_master_address_on_one_machine_is_the_stores():
    request = run("--master-addr 127.0.0.1 --master-port 4242")
    assert (request.endpoint, request.master_addr, request.master_port) == (None, "127.0.0.1", 4242)
    assert run("--local-nodes 2 --master-port 4242").master_port == 4242


def test_flag_that_torchrun_does_not_use_either_is_noted():
    assert "not used with --standalone" in run("--standalone --rdzv-endpoint h:1").notes[0]
    request = run("--rdzv-backend c10d --rdzv-endpoint h:1 --master-port 5")
    assert "--master-port is not used" in request.notes[0]
    assert request.master_port == 0


def test_owner_of_control_follows_backend_and_rank():
    static = "--nnodes 2 --rdzv-endpoint head:1"
    c10d = static + " --rdzv-backend c10d"
    assert run(static + " --node-rank 0").runs_control([])
    assert not run(static + " --node-rank 1").runs_control(["head"])
    assert run(static).runs_control(["head"])
    assert run(c10d + " --node-rank 1").runs_control(["head"])
    assert not run(c10d).runs_control(["other"])
    assert run(c10d + " --rdzv-conf is_host=true").runs_control(["other"])
    assert run("--local-nodes 2").runs_control([])


def test_job_is_local_only_where_nobody_else_can_come():
    assert run("--local-nodes 3").is_local([])
    assert run("--nnodes 2 --master-port 7").is_local([])
    assert run("--rdzv-backend c10d --rdzv-endpoint head:1").is_local(["head"])
    assert not run("--rdzv-backend c10d --rdzv-endpoint head:1").is_local(["other"])
    assert not run("--nnodes 2 --rdzv-backend c10d --rdzv-endpoint head:1").is_local(["head"])


@pytest.mark.parametrize(
    ("host", "owned"),
    [
        ("localhost", True),
        ("127.0.0.2", True),
        ("::1", True),
        ("10.0.0.5", True),
        ("10.0.0.6", False),
        ("fd00:0::1", True),
        ("HEAD.example.", True),
        ("head", False),
    ],
)
def test_endpoint_is_owned_by_the_machine_with_its_address(host, owned):
    assert owns_endpoint(Address(host, 1), ["10.0.0.5", "fd00::1", "head.example"]) is owned


def test_nodes_of_several_machines_are_named_by_host_and_place():
    base = "--nnodes 2 --spares 1 --rdzv-backend c10d --rdzv-endpoint head:1"
    assert [(n.name, n.standby) for n in run(base).nodes] == [(HOST, False)]
    assert [(n.name, n.order, n.standby) for n in run(base + " --node-rank 2").nodes] == [(f"{HOST}-2", 2, True)]
    assert run(base + " --local-addr 10.0.0.2").nodes[0].name == f"{HOST}-10.0.0.2"
    two = run(base + " --local-nodes 2 --node-rank 1").nodes
    assert [(n.name, n.standby) for n in two] == [(f"{HOST}-1", False), (f"{HOST}-2", True)]


def test_rendezvous_settings_reach_the_rules():
    rules = run("--rdzv-conf join_timeout=9,last_call_timeout=2,keep_alive_interval=1").job.rules
    assert (rules.join_timeout, rules.last_call, rules.lease) == (9, 2, 3)
    assert run("--rdzv-conf timeout=70,read_timeout=90").job.rules.join_timeout == 90
    assert run("--rdzv-conf store_type=tcp").job.rules == run().job.rules


@pytest.mark.parametrize(
    ("conf", "words"),
    [
        ("colour=red", ["has colour", "it knows join_timeout"]),
        ("close_timeout=3", ["close_timeout", "leave it out"]),
        ("store_type=file", ["store_type", "TCP only"]),
        ("join_timeout", ["KEY=VALUE"]),
        ("join_timeout=0", ["whole number above 0"]),
        ("is_host=maybe", ["true or false"]),
        ("keep_alive_interval=300", ["the lease (15 min 0 s)", "collective timeout"]),
    ],
)
def test_rendezvous_setting_that_cannot_hold_is_refused_by_name(conf, words):
    said = refusal(f"--rdzv-conf {conf}")
    assert all(word in said for word in words), said


# --- workers, output -------------------------------------------------------------------------------------------------


def test_omp_threads_are_one_only_for_several_workers_and_unset():
    assert run("--nproc-per-node 2").env == {"OMP_NUM_THREADS": "1"}
    assert run("--nproc-per-node 2", OMP_NUM_THREADS="4").env == {}
    assert run().env == {}


def test_output_settings_are_torchruns():
    output = run(
        "--log-dir /logs -r 0:1,12:3 --tee 3 --local-ranks-filter 1,0 --duplicate-stdout-filters a,,b,c",
        TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE="[${rank}] ",
    ).output
    assert (output.log_dir, output.redirects, output.tee) == ("/logs", {0: 1, 12: 3}, 3)
    assert (output.ranks_filter, output.stdout_filters, output.stderr_filters) == ((0, 1), ("a,b", "c"), ())
    assert output.prefix == "[${rank}] "
    assert run().output.log_dir == ""


def test_remaining_flags_reach_the_request():
    request = run("--preload numpy,a.b --virtual-local-rank --numa-binding node --json --explain-timeouts")
    assert (request.preload, request.fork_server, request.virtual_local_rank) == (("numpy", "a.b"), True, True)
    assert (request.numa_binding, request.json, request.explain) == ("node", True, True)
    assert run("--signals-to-handle SIGTERM,SIGUSR1").signals == ("SIGTERM", "SIGUSR1")
    assert not run("--no-fork-server").fork_server
    assert run(PYTHON_EXEC="/opt/python").python == "/opt/python"


def test_explanation_is_given_before_contradictions_are_refused():
    assert run("--stall-limit 3s --explain-timeouts").job.stalls.fixed == 3


@pytest.mark.parametrize(
    ("visible", "count"),
    [
        ("", 0),
        ("0,1", 2),
        ("1, 3", 2),
        ("0,-1,2", 1),
        ("0,9,1", 1),
        ("0,0", 0),
        ("none", 0),
        ("GPU-a,GPU-b,junk", 2),
        ("GPU-a,GPU-a", 0),
        ("MIG-a,MIG-b", 1),
    ],
)
def test_visible_gpus_are_counted_by_cudas_rules(visible, count):
    assert visible_gpus(visible, physical=4) == count
