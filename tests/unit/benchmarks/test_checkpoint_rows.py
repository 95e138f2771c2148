"""What the checkpoint benchmark makes of trials: a wrong ratio is a wrong claim."""

import pytest

from benchmarks.checkpoint_rows import Record, rows_of, table

TIERS = {"perdure memory": ("peer",)}


def a_record(*results: dict[str, object]) -> Record:
    record = Record()
    for result in results:
        record.add({"version": "1", "correct": True, **result})
    return record


def rows(ours: Record, peer: Record) -> dict[tuple[str, str], dict[str, object]]:
    return {
        (str(row["case"]), str(row["peer"])): row
        for row in rows_of(1, 64, TIERS, {"perdure memory": ours, "peer": peer})
    }


def test_ratio_of_a_peer_is_its_time_over_ours_with_the_furthest_apart_as_spread() -> None:
    row = rows(a_record({"warm_s": [0.1, 0.2, 0.4]}), a_record({"warm_s": [0.3, 0.6, 1.2]}))[
        "warm stall, memory", "peer"
    ]
    assert row["ratio"] == pytest.approx(3)
    assert (row["ratio_least"], row["ratio_most"]) == (pytest.approx(0.75), pytest.approx(12))


def test_ratio_to_memcpy_on_a_machine_that_slows_down_is_that_of_the_pairs() -> None:
    ours = a_record({"memcpy_s": [0.1, 1.0, 10.0], "warm_s": [0.2, 2.0, 20.0]})
    row = rows(ours, Record())["warm stall, memory", "memcpy"]
    assert row["ours_of_memcpy"] == pytest.approx(2)
    assert (row["ratio_least"], row["ratio_most"]) == (pytest.approx(0.5), pytest.approx(0.5))


def test_first_stalls_of_several_processes_are_compared_with_the_usual_memcpy() -> None:
    ours = a_record(*({"first_s": first, "memcpy_s": [0.1, 0.1]} for first in (0.1, 0.2, 0.3)))
    row = rows(ours, Record())["first stall, memory", "memcpy"]
    assert row["ours_of_memcpy"] == pytest.approx(2)
    assert row["ours_s"] == pytest.approx(0.2)


def test_a_peer_that_does_not_run_keeps_its_row_with_the_error() -> None:
    row = rows(a_record({"warm_s": [0.1]}), a_record({"error": "not installed"}))["warm stall, memory", "peer"]
    assert (row["error"], row["peer_s"], row["ratio"]) == ("not installed", None, None)


def test_drag_below_nothing_gives_no_ratio() -> None:
    row = rows(a_record({"drag_s": [-0.01, 0.1]}), a_record({"drag_s": [0.5]}))["drag, memory", "peer"]
    assert (row["ratio"], row["peer_s"]) == (None, 0.5)


def test_a_restore_of_other_values_is_told_in_the_row() -> None:
    row = rows(a_record({"restore_s": [0.1]}), a_record({"restore_s": [0.2], "correct": False}))[
        "restore, memory", "peer"
    ]
    assert row["peer_wrong"] is True


def test_table_with_a_failed_method_has_its_error_behind_its_name() -> None:
    assert table([("a method", "AssertionError: no GPU")]).splitlines()[1] == "a method  AssertionError: no GPU"
