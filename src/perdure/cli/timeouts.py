"""The ladder of time limits, lease < stall limit < collective timeout < job limit: shown, and checked at start-up.

It does not know what sets the collective timeout in the script, nor a scheduler's limit for the job.
"""

from perdure.errors import ConfigError
from perdure.vocab.job import JobSpec, RecoveryRules, StallRules
from perdure.vocab.units import show_duration

WHOLE_JOB = 100 * 365 * 86400.0
"""A restart window that no job outlives: --max-restarts is then a total."""


def check_timeouts(job: JobSpec) -> None:
    """Raise ConfigError, with both values, where a limit of `job` contradicts the next one up the ladder."""
    rules, stalls = job.rules, job.stalls
    _require_less(
        ("the grace for a closed connection", rules.reconnect_grace),
        ("the lease", rules.lease),
        "raise keep_alive_interval in --rdzv-conf",
    )
    if stalls.fixed is not None:
        _require_less(
            ("the lease", rules.lease),
            ("--stall-limit", stalls.fixed),
            "a lost node would be taken for stalled workers; raise --stall-limit, "
            "or lower the lease by --rdzv-conf keep_alive_interval=1,keep_alive_max_attempt=3",
        )
        _require_less(
            ("--stall-limit", stalls.fixed),
            ("the collective timeout", stalls.collective_timeout),
            "the process groups would fail first; lower --stall-limit",
        )
    _require_less(
        ("the lease", rules.lease),
        ("the collective timeout", stalls.collective_timeout),
        "lower the lease by --rdzv-conf keep_alive_interval=1,keep_alive_max_attempt=3",
    )


def _require_less(low: tuple[str, float], high: tuple[str, float], advice: str) -> None:
    if low[1] >= high[1]:
        raise ConfigError(
            f"{low[0]} ({show_duration(low[1])}) must be shorter than {high[0]} ({show_duration(high[1])}): {advice}"
        )


def explain_timeouts(job: JobSpec) -> str:
    """The limits that hold for `job`, the ladder first, one line each."""
    stalls = job.stalls
    ladder = [
        ("lease", show_duration(job.rules.lease), "silence after which a node is lost"),
        ("stall limit", _show_stall_limit(stalls), "no progress after which a worker is ended"),
        ("collective timeout", show_duration(stalls.collective_timeout), "of the script's process groups"),
        ("job limit", "none", "the scheduler's, where there is one"),
    ]
    lines = [f"time limits of {job.id}; each must be shorter than the next", *_table(ladder), "others"]
    lines += _table([*_stall_rows(stalls), *_recovery_rows(job.rules)])
    return "\n".join(lines)


def _show_stall_limit(stalls: StallRules) -> str:
    if stalls.fixed is not None:
        return show_duration(stalls.fixed)
    return f"learned, from {show_duration(stalls.floor)}"


def _stall_rows(stalls: StallRules) -> list[tuple[str, str, str]]:
    rows = [
        ("start-up", show_duration(stalls.start_up), "stall limit until the loop is reached"),
        ("first step", show_duration(stalls.first_step), "stall limit of the first step, which may compile"),
        ("checkpoint", show_duration(stalls.checkpoint), "stall limit of a save, until learned"),
        ("evaluation", show_duration(stalls.evaluation), "stall limit of an evaluation, until learned"),
        ("stopped", show_duration(stalls.stopped_after), "a worker in state T for so long is ended"),
    ]
    if stalls.fixed is not None:
        return rows
    learned = f"stall limit is {stalls.factor:g} x p99 after {stalls.learn_after} steps, where the script tells them"
    untold = "stall limit before, and where it does not; needs absence of work too"
    return [
        ("learned", f"from {show_duration(stalls.floor)}", learned),
        ("untold", show_duration(stalls.untold), untold),
        *rows,
    ]


def _recovery_rows(rules: RecoveryRules) -> list[tuple[str, str, str]]:
    window = "the whole job" if rules.restart_window >= WHOLE_JOB else show_duration(rules.restart_window)
    return [
        ("reconnect", show_duration(rules.reconnect_grace), "a node whose connection closed may come back in it"),
        ("join", show_duration(rules.join_timeout), "wait for the fewest nodes at the start"),
        ("last call", show_duration(rules.last_call), "wait for more nodes after that"),
        ("restart window", window, f"in which workers may cause {rules.max_restarts} restarts"),
        ("hold", show_duration(rules.hold), "wait for a node when there are too few"),
        ("shutdown", show_duration(rules.shutdown_timeout), "to save and end after a signal"),
        ("flush", show_duration(rules.flush), "for the last checkpoint to reach storage when the job ends by itself"),
    ]


def _table(rows: list[tuple[str, str, str]]) -> list[str]:
    return [f"  {name:<20}{value:<24}{meaning}" for name, value, meaning in rows]
