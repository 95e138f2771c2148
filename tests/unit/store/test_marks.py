"""A stored checkpoint that was found to be bad is marked, does not count, and may be pardoned."""

import msgspec
import pytest

pytest.importorskip("torch")

from perdure.agent.memory.marking import mark_all, unmarked
from perdure.errors import ConfigError
from perdure.store.checkpoints import list_stored, verify
from perdure.store.manifest import name_of, parse_name
from perdure.store.marks import by_hand, mark, unmark
from perdure.store.retention import retain
from perdure.vocab.checkpoint import Aside
from perdure.vocab.ids import JobId
from tests.unit.store.a_checkpoint import a_stored, an_id


@pytest.fixture
def store(tmp_path):
    for step in (1, 2, 3):
        a_stored(tmp_path, tmp_path / "store", step, job="exp")
    return str(tmp_path / "store")


def test_marked_one_is_listed_with_its_reason_and_is_still_what_was_written(store):
    asides = (Aside(checkpoint=an_id(3), line=an_id(0, 2).line, reason="the loss is nan"),)
    wanted = unmarked(list_stored(store), asides)
    assert [each.checkpoint for each, _ in wanted] == [an_id(3)]
    mark_all(store, wanted)
    newest = list_stored(store)[0]
    assert (newest.checkpoint, newest.aside) == (an_id(3), asides[0])
    assert unmarked(list_stored(store), asides) == ()
    assert verify(store, newest.path) == ()
    unmark(store, newest.path)
    assert list_stored(store)[0].aside is None


def test_marked_one_is_not_counted_as_kept(store):
    name = name_of(an_id(3))
    mark(store, name, by_hand(store, name, "spikes"))
    retain(store, 1, JobId("exp"))
    assert [one.checkpoint.step for one in list_stored(store)] == [3, 2]


def test_mark_of_what_is_not_there_is_refused(store):
    with pytest.raises(ConfigError, match="there is no checkpoint"):
        by_hand(store, "../elsewhere", "spikes")


def test_name_carries_the_turn_where_the_ranks_have_gone_back():
    turned = msgspec.structs.replace(an_id(7), turn=2)
    assert name_of(turned) == "step-0000000007.1700000000-1-2"
    assert parse_name(name_of(turned)) == turned
    assert parse_name("step-0000000007.1700000000-1-0") is None
