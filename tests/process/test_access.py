"""Who may take part: tokens, certificates, versions, worlds, names; where Perdure listens; readers elsewhere."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec

from perdure.agent.config import AgentConfig, OutputConfig
from perdure.cli.programs import AgentStart, argv_of
from perdure.vocab.event import NodeLost, NodeReady, NodeRefused
from perdure.vocab.generation import Address
from perdure.vocab.ids import JobId, NodeId
from perdure.wire.messages import Entry, Launch
from tests.process.jobs import LIMIT, Job, script
from tests.process.machines import PORT, TOKEN, Launched, Machine, is_alive, machines, start_job, wait_until
from tests.process.ticks import ticks

ONE = ("--nnodes", "1", "--nproc-per-node", "1")
EXIT_USAGE = 2


def sentence(refused: Launched) -> str:
    """The one line that the user got, with exit code 2."""
    code = refused.end()
    said = [line for line in refused.output.splitlines() if line.startswith("perdure: ")]
    said = [line for line in said if "control at" not in line or "state in" not in line]
    assert "Traceback" not in refused.output, refused.output
    assert len(said) == 1, refused.output
    assert code == EXIT_USAGE, refused.output
    return said[0]


def assert_unharmed(job: Job, pids: dict[int, int]) -> None:
    assert job.workers() == pids
    assert all(is_alive(pid) for pid in pids.values())
    assert job.actions() == ["Begin"]


def certificate(folder: Path, name: str, address: str) -> tuple[str, str]:
    """(certificate, key) of its own, for an IP address."""
    cert, key = folder / f"{name}.pem", folder / f"{name}.key"
    subject = ("-subj", f"/CN={name}", "-addext", f"subjectAltName=IP:{address}", "-days", "2", "-nodes")
    kind = ("-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1")
    argv = ["openssl", "req", *kind, *subject, "-out", str(cert), "-keyout", str(key)]
    subprocess.run(argv, check=True, capture_output=True)
    return str(cert), str(key)


def other_version(machine: Machine, control: Address, program: tuple[str, ...], version: str) -> tuple[int, str]:
    """(exit code, stderr) of an agent of another Perdure."""
    launch = Launch(entry=Entry.SCRIPT, target=program[0], args=program[1:])
    config = AgentConfig(
        job=JobId("job"),
        node=NodeId(machine.name),
        control=control,
        address=machine.address,
        slots=1,
        world=f"1:1 nodes x 1 workers, role default, {' '.join(program)}",
        launch=launch,
        python=sys.executable,
        run_id="job",
        max_restarts=3,
        output=OutputConfig(log_dir=str(machine.folder)),
    )
    start = AgentStart(config=config, token=TOKEN, version=version, tls=None)
    fd = os.memfd_create("agent", 0)
    try:
        os.write(fd, msgspec.json.encode(start))
        os.lseek(fd, 0, os.SEEK_SET)
        argv = [word.replace("{fd}", str(fd)) for word in argv_of("agent")]
        done = subprocess.run(
            [*machine.prefix(), *argv],
            env=machine.environ({}),
            pass_fds=(fd,),
            capture_output=True,
            text=True,
            timeout=LIMIT,
        )
    finally:
        os.close(fd)
    return done.returncode, done.stderr


def test_strangers_get_one_sentence_and_the_job_goes_on(tmp_path: Path) -> None:
    """Wrong or no token, another world, id, name or version: refused with both values, exit code 2."""
    out = tmp_path / "out"
    program = (script("tick.py"), "--out", str(out))
    with machines(tmp_path, "ada", "bob", "cyd") as net:
        job, _ = start_job(net, "ada", ("bob",), *program, shape=ONE)
        job.wait_stepping(1)
        pids = job.workers()
        meeting = ("--rdzv-endpoint", f"{net['ada'].address}:{PORT}")

        def stranger(*words: str, **env: str | None) -> Launched:
            return net.start("cyd", "run", *meeting, *words, **env)

        wrong = "another-token-of-eight-and-more"
        cases = {
            "token": stranger(*ONE, *program, PERDURE_TOKEN=wrong),
            "late token": stranger("--rdzv-id", "job", *ONE, *program, PERDURE_TOKEN=wrong),
            "no token": stranger(*ONE, *program, PERDURE_TOKEN=None),
            "workers": stranger("--nnodes", "1", "--nproc-per-node", "3", *program),
            "arguments": stranger(*ONE, *program, "--steps", "7"),
            "id": stranger("--rdzv-id", "mine", *ONE, *program),
        }
        said = {name: sentence(launched) for name, launched in cases.items()}
        assert "refused our token" in said["token"]
        assert "refused our token" in said["late token"]
        assert "export PERDURE_TOKEN=" in said["no token"]
        assert "x 3 workers" in said["workers"]
        assert "x 1 workers" in said["workers"]
        assert said["arguments"].count("tick.py --out") == 2
        assert "--steps 7" in said["arguments"]
        assert "runs job job" in said["id"]
        assert "for job mine" in said["id"]
        assert job.output.count(f"refused a request of {net['cyd'].address}") >= 2

        code, text = other_version(net["cyd"], Address(net["ada"].address, PORT), program, "9.9.9")
        assert code == EXIT_USAGE
        assert "it runs Perdure 9.9.9, control runs " in text
        reasons = [refused.reason for refused in job.all(NodeRefused)]
        assert len(reasons) == 3, reasons
        assert_unharmed(job, pids)


def test_second_machine_of_the_same_name_is_refused(tmp_path: Path) -> None:
    """Containers may share host name and boot id; they must not take each other for the same node that came back."""
    out = tmp_path / "out"
    program = (script("tick.py"), "--out", str(out))
    with machines(tmp_path, "ada", "bob", "cyd") as net:
        job, _ = start_job(net, "ada", ("bob",), *program, shape=ONE)
        job.wait_stepping(1)
        pids = job.workers()
        net["cyd"].host_name = "bob"
        meeting = ("--rdzv-endpoint", f"{net['ada'].address}:{PORT}")
        said = sentence(net.start("cyd", "run", *meeting, *ONE, *program))
        assert f"the name bob is in use on bob ({net['bob'].address}," in said
        assert "--local-addr" in said
        assert_unharmed(job, pids)
        named = net.start("cyd", "run", *meeting, "--local-addr", net["cyd"].address, *ONE, *program)
        job.wait_event(NodeReady, where=lambda ready: ready.node == f"bob-{net['cyd'].address}")
        assert named.process.poll() is None, "it is a spare"
        assert_unharmed(job, pids)


def test_tls_with_a_certificate_of_ones_own(tmp_path: Path) -> None:
    """Control shows it; nodes and readers accept nothing else; nodes vouch for each other when it is away."""
    out, nodes = tmp_path / "out", ("bob", "cyd")
    program = (script("tick.py"), "--out", str(out))
    shape = ("--nnodes", "2", "--nproc-per-node", "1")
    with machines(tmp_path, "ada", *nodes, "dan") as net:
        meeting = ("--rdzv-endpoint", f"{net['ada'].address}:{PORT}")
        lease = ("--rdzv-conf", "keep_alive_interval=1,keep_alive_max_attempt=2")
        cert, key = certificate(tmp_path, "ours", net["ada"].address)
        wrong, _ = certificate(tmp_path, "wrong", net["ada"].address)
        secret = ("--tls-cert", cert, "--tls-key", key)
        job = net.start("ada", "control", "--rdzv-id", "job", *meeting, *shape, *lease, *secret, *program).job()
        for node in nodes:
            net.start(node, "run", *meeting, *shape, "--tls-ca", cert, *program)
        job.wait_stepping(1)
        pids = job.workers()

        plain = net.start("dan", "run", *meeting, *shape, *program)
        distrustful = net.start("dan", "run", *meeting, *shape, "--tls-ca", wrong, *program)
        late = net.start("dan", "run", "--rdzv-id", "job", *meeting, *shape, "--tls-ca", wrong, *program)
        assert "give this machine --tls-ca" in sentence(plain)
        assert "certificate by --tls-ca" in sentence(distrustful)
        assert "certificate by --tls-ca" in sentence(late)
        endpoint = ("--endpoint", f"{net['ada'].address}:{PORT}")
        assert net["dan"].perdure("why", *endpoint, "--tls-ca", cert).returncode == 0
        assert_unharmed(job, pids)

        os.kill(job.process.pid, signal.SIGKILL)
        away = time.monotonic()
        wait_until(lambda: {t.node for t in ticks(out) if t.at > away + 4.0} == set(nodes))
        assert all(is_alive(pid) for pid in pids.values())


def test_named_endpoint_is_bound_alone_and_a_taken_port_is_said(tmp_path: Path) -> None:
    program = (script("tick.py"), "--out", str(tmp_path / "out"))
    with machines(tmp_path, "ada") as net:
        meeting = ("--rdzv-endpoint", f"{net['ada'].address}:{PORT}")
        two = ("--nnodes", "2", "--nproc-per-node", "1")
        net.start("ada", "control", "--rdzv-id", "one", *meeting, *two, *program)
        wait_until(lambda: len(net["ada"].listening()) > 0)
        assert net["ada"].listening() == {Address(net["ada"].address, PORT)}
        for verb in ("control", "run"):
            second = net.start("ada", verb, "--rdzv-id", "two", *meeting, *two, *program)
            assert second.end() == 1
            assert f"port {PORT} on {net['ada'].address} is taken" in second.output
            assert "Traceback" not in second.output
            assert len(second.output.splitlines()) == 1, second.output


def test_local_use_listens_on_loopback_only(tmp_path: Path) -> None:
    program = (script("tick.py"), "--out", str(tmp_path / "out"))
    with machines(tmp_path, "ada") as net:
        words = ("--rdzv-id", "job", "--nnodes", "2", "--local-nodes", "2", "--nproc-per-node", "1")
        job = net.start("ada", "run", *words, *program, PERDURE_TOKEN=None).job()
        job.wait_stepping(1)
        found = net["ada"].listening()
        assert len(found) >= 4, "control, a store, two agents"
        assert {address.host for address in found} == {"127.0.0.1"}


def test_readers_on_other_machines_ask_control(tmp_path: Path) -> None:
    """`perdure why` and `perdure goodput` while the job runs, where there is no log."""
    program = (script("tick.py"), "--out", str(tmp_path / "out"))
    with machines(tmp_path, "ada", "bob", "cyd") as net:
        job, _ = start_job(net, "ada", ("bob",), *program, shape=ONE)
        job.wait_stepping(1)
        job.kill_worker(0)
        job.wait_stepping(2)
        asked = ("--endpoint", f"{net['ada'].address}:{PORT}")
        why = net["cyd"].perdure("why", *asked)
        assert why.returncode == 0, why.stderr
        assert "SIGKILL" in why.stdout
        goodput = net["cyd"].perdure("goodput", *asked, "--json")
        assert goodput.returncode == 0, goodput.stderr
        assert json.loads(goodput.stdout)
        denied = net["cyd"].perdure("why", *asked, PERDURE_TOKEN="another-token-of-eight-and-more")
        assert denied.returncode == 1
        assert denied.stderr.count("\n") == 1
        assert "refused our token" in denied.stderr
        assert job.all(NodeLost) == []
        net.isolate("ada")
        away = net["cyd"].perdure("why", *asked)
        assert away.returncode == 1
        assert away.stderr.count("\n") == 1, away.stderr
