"""All ranks stop after one step that none of them has passed."""

from perdure.policy.draining import stop_after


def test_the_step_lies_ahead_of_the_furthest_by_what_is_done_in_a_second() -> None:
    assert stop_after([7, 9, 8], [0.1, 0.2, None]) == 20


def test_slow_steps_leave_two() -> None:
    assert stop_after([7], [30.0]) == 9


def test_nothing_known_leaves_two_from_the_start() -> None:
    assert stop_after([-1], [None]) == 1
    assert stop_after([], []) == 2
