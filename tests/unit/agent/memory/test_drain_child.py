"""The child that writes to storage: whatever it does, the question has an answer."""

import sys

import anyio
import pytest

from perdure.agent.memory import drain
from perdure.agent.memory.drain import DrainChild
from perdure.vocab.checkpoint import CheckpointId
from perdure.vocab.ids import GenerationNumber
from perdure.wire.memory import DrainRequest

STARTED = "import sys, json; print(json.dumps({'id': 0}), flush=True)\n"
ANSWERS = (
    STARTED + "for line in sys.stdin: print(json.dumps({'id': json.loads(line)['id'], 'nbytes': 5}), flush=True)\n"
)
DIES_AT_ONCE = "raise SystemExit(3)"
DIES_WHEN_ASKED = STARTED + "sys.stdin.readline(); sys.stdout.write('{\"id\": 1'); sys.stdout.flush()\n"
TALKS_NONSENSE = STARTED + "sys.stdin.readline(); print('nonsense', flush=True); sys.stdin.read()\n"
SAYS_NOTHING = STARTED + "sys.stdin.read()\n"


def a_child(program: str) -> DrainChild:
    return DrainChild((sys.executable, "-S", "-c", program))


def a_request() -> DrainRequest:
    what = CheckpointId(attempt=1, generation=GenerationNumber(1), step=10)
    return DrainRequest(id=0, store="/s", name="n", checkpoint=what, slots={}, by_rank=("s",))


def test_a_child_lives_on_between_two_requests() -> None:
    async def ask() -> None:
        child = a_child(ANSWERS)
        replies = [await child.ask(a_request()), await child.ask(a_request())]
        assert [(reply.id, reply.nbytes, reply.error) for reply in replies] == [(1, 5, ""), (2, 5, "")]
        await child.close()

    anyio.run(ask)


@pytest.mark.parametrize("program", [DIES_AT_ONCE, DIES_WHEN_ASKED, TALKS_NONSENSE])
def test_a_child_that_fails_is_an_error_and_is_started_again(program: str) -> None:
    async def ask() -> None:
        child = a_child(program)
        assert "drain has died" in (await child.ask(a_request())).error
        child._argv = a_child(ANSWERS)._argv
        assert (await child.ask(a_request())).nbytes == 5
        await child.close()

    anyio.run(ask)


def test_a_child_that_says_nothing_is_given_up_at_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drain, "REPLY_WITHIN", 1.0)

    async def ask() -> None:
        child = a_child(SAYS_NOTHING)
        assert "has written nothing for 1 s" in (await child.ask(a_request())).error
        assert child._process is None

    anyio.run(ask)
