"""The result of one check of one subject: measured against expected, and where the limit came from."""

from enum import StrEnum

import msgspec


class Verdict(StrEnum):
    PASS = "pass"
    FAIL = "fail"
    WARN = "warn"
    SKIP = "skip"
    """Not applicable here (no such hardware); `reason` says why."""
    ERROR = "error"
    """The check itself failed, which says nothing about the subject."""


class CheckResult(msgspec.Struct, frozen=True, kw_only=True):
    """What one check found. Text for people is made from it, never kept instead of it."""

    check: str
    """Dotted name, as in `gpu.memory.bandwidth`."""
    subject: str
    """What was checked: a node, or a part of it as in `node-17/gpu-3`."""
    verdict: Verdict
    measured: float | str | None = None
    expected: float | str | None = None
    unit: str | None = None
    limit_source: str | None = None
    """Where `expected` came from: a vendor's document with its date, a baseline, a plan."""
    reason: str = ""
    """One sentence; required for everything but a pass."""

    def __post_init__(self) -> None:
        if self.verdict is not Verdict.PASS and not self.reason:
            raise ValueError(f"{self.check}: a {self.verdict} needs a reason")
