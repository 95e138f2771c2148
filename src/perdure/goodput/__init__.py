"""Where the time went: every node-second of a job in exactly one phase, folded from its event log. Pure."""

from perdure.goodput.ledger import Ledger, account
from perdure.goodput.phases import Interval, Phase
from perdure.goodput.report import CauseRow, GoodputReport, GoodputRow, tabulate
from perdure.goodput.restarts import Restart

__all__ = [
    "CauseRow",
    "GoodputReport",
    "GoodputRow",
    "Interval",
    "Ledger",
    "Phase",
    "Restart",
    "account",
    "tabulate",
]
