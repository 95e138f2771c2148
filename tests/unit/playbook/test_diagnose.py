"""From events to what they mean."""

import pytest

from perdure.errors import ConfigError
from perdure.playbook.diagnose import diagnose
from perdure.playbook.parse import parse_catalogue
from perdure.vocab import event as e
from perdure.vocab.fault import Diagnosis, Remedy, Scope
from perdure.vocab.ids import EventId, GenerationNumber, NodeId, Rank
from tests.unit.control.a_job import catalogue, node_id

FAULTS = catalogue()


def exited(code: int | None = 1, signal: int | None = None, **fields: object) -> e.WorkerExited:
    return e.WorkerExited(
        id=EventId("node-0/x/1"), at=1.0, node=NodeId("node-0"), generation=GenerationNumber(1), rank=Rank(3),
        local_rank=1, pid=77, exit_code=code, signal=signal, step=12, **fields,  # type: ignore[arg-type]
    )  # fmt: skip


def one(event: e.AnyEvent) -> Diagnosis:
    (diagnosis,) = diagnose([event], FAULTS)
    assert diagnosis.evidence == (event.id,)
    return diagnosis


def error(kind: str = "ValueError", message: str = "bad sample") -> e.WorkerError:
    return e.WorkerError(type=kind, message=message, where="train.py:7", traceback="Traceback …")


def test_exit_code_0_is_no_fault() -> None:
    assert diagnose([exited(0)], FAULTS) == ()


@pytest.mark.parametrize(
    ("event", "fault"),
    [
        (exited(error=error()), "worker.exception"),
        (exited(error=error("SyntaxError", "invalid syntax")), "worker.script-broken"),
        (exited(error=error("RuntimeError", "[pair.cc:547] Connection closed by peer [::1]:9")), "worker.peer-lost"),
        (exited(error=error("DistBackendError", "NCCL error: remote error, a peer left")), "worker.peer-lost"),
        (exited(7), "worker.exit-code"),
        (exited(1, log_tail="RuntimeError: Connection reset by peer"), "worker.peer-lost"),
        (exited(None, 11), "worker.signal"),
        (exited(None, 9), "worker.killed"),
    ],
)
def test_a_workers_end_is_told_apart(event: e.WorkerExited, fault: str) -> None:
    assert one(event).fault.id == fault


def test_a_kill_for_lack_of_memory_shows_the_figures_and_whose_fault_it_is() -> None:
    memory = e.MemoryEvidence(by="cgroup", limit=2**30, usage=2**30, rss=3 * 2**28, line="oom_kill 1")
    found = one(exited(None, 9, memory=memory))
    assert found.fault.id == "worker.out-of-memory"
    assert found.fault.remedy is Remedy.RETRY_ONCE
    assert "768.0 MiB" in found.what
    assert "1.0 GiB of 1.0 GiB" in found.what
    assert found.exit_code == 137


@pytest.mark.parametrize(("event", "code"), [(exited(7), 7), (exited(None, 15), 143), (exited(None, None), 1)])
def test_the_jobs_exit_code_is_the_workers_own(event: e.WorkerExited, code: int) -> None:
    assert one(event).exit_code == code


def test_what_happened_says_where_and_after_which_step() -> None:
    assert one(exited(error=error())).what == (
        "rank 3 on node-0 (pid 77) raised ValueError: bad sample at train.py:7 after step 12"
    )


def test_an_exception_is_the_same_on_every_rank_and_a_signal_is_not() -> None:
    import msgspec

    here, there = exited(error=error()), msgspec.structs.replace(exited(error=error()), rank=Rank(0))
    assert one(here).fingerprint == one(there).fingerprint
    here, there = exited(None, 11), msgspec.structs.replace(exited(None, 11), rank=Rank(0))
    assert one(here).fingerprint != one(there).fingerprint


def test_an_unkillable_worker_is_a_fault_of_its_node() -> None:
    event = e.WorkerUnkillable(id=EventId("u"), at=1.0, node=node_id(1), generation=GenerationNumber(1), rank=Rank(2),
                               pid=9, waited=5.0, process_state="D")  # fmt: skip
    assert one(event).fault.scope is Scope.NODE
    assert not one(event).counts_as_restart


def test_every_fault_that_is_diagnosed_is_in_the_catalogue_with_its_meaning() -> None:
    for fault in FAULTS.faults.values():
        assert fault.meaning
        assert fault.action
        assert fault.source


def test_a_catalogue_that_defines_a_fault_twice_is_refused() -> None:
    text = (
        '[[fault]]\nid="x"\ntitle="t"\nmeaning="m"\nscope="rank"\nblame="user"\nremedy="stop"\naction="a"\nsource="s"\n'
    )
    with pytest.raises(ConfigError, match="defines x twice"):
        parse_catalogue([text, text])


@pytest.mark.parametrize("text", ["[[fault", "[[fault]]\nid = 3\n", "[[faults]]\n"])
def test_a_catalogue_that_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        parse_catalogue([text])
