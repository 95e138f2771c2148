"""When a save is called slow, and by what it is explained."""

import mmap

import pytest
import torch

from perdure.trainer.checkpoint.copy import Copiers
from perdure.trainer.checkpoint.layout import bind
from perdure.trainer.checkpoint.slowness import Judge, Stopwatch, Took, explain, probe

GIB = 1 << 30


def took(whole: float, nbytes: int = GIB, **changes: object) -> Took:
    given = {"gathering": 0.001, "waiting": 0.0, "faults": 0, **changes}
    return Took(nbytes=nbytes, whole=whole, **given)  # type: ignore[arg-type]


def test_save_is_slow_beyond_three_times_the_copy_and_never_below_a_moment() -> None:
    rate = 10.0 * GIB
    assert not took(0.29).is_slow(rate)
    assert took(0.31).is_slow(rate)
    assert not took(0.04, nbytes=1000).is_slow(rate)


@pytest.mark.parametrize(
    ("save", "words"),
    [
        (took(2.0, gathering=1.5), "state_dict() of what is kept took 1.50 s of it"),
        (took(0.6, faults=262_144), "262144 pages were not in place (page faults)"),
        (took(2.0, waiting=1.6), "waited 1.60 s for a processor or for Python's lock"),
        (took(2.0, waiting=1.6, odd=("3 tensors are not contiguous",)), "3 tensors are not contiguous"),
        (took(2.0), "nothing that is measured explains it"),
    ],
)
def test_what_took_the_time_is_named(save: Took, words: str) -> None:
    """Thread 46 (dlrover 1225): page faults, a conversion, a busy machine; each with its figure."""
    said = explain(save, 10.0 * GIB)
    assert said.startswith(f"a save of 1.0 GiB kept training for {save.whole:.2f} s, a bare copy takes 0.10 s: ")
    assert words in said
    assert ("waited" in said) == (save.waiting > 0 and not save.odd)


def test_one_slow_save_says_nothing_the_second_in_a_row_does_and_no_third() -> None:
    judge = Judge(Copiers(1))
    slow, quick = took(60.0), took(0.001)
    assert [bool(judge.hear(each)) for each in (slow, quick, slow, None, slow, slow, slow, slow)] == [
        False,
        False,
        False,
        False,
        False,
        True,
        False,
        False,
    ]


def test_probe_measures_a_copy_and_leaves_nothing() -> None:
    rate = probe(Copiers(2), 4 << 20)
    assert 1e8 < rate < 1e12


def test_stopwatch_counts_pages_that_are_touched_for_the_first_time() -> None:
    bound = bind({"w": torch.ones(10).expand(3, 10).t()}, 0, 1)
    watch = Stopwatch()
    with mmap.mmap(-1, 512 * mmap.PAGESIZE) as area:
        for at in range(0, len(area), mmap.PAGESIZE):
            area[at] = 1
    found = watch.stop(bound)
    assert found is not None
    assert found.faults >= 1
    assert found.whole >= found.gathering >= 0
