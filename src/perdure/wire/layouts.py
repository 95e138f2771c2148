"""The heartbeat page: bytes that an agent and its workers share, one slot per worker.

Every field is an aligned 8-byte integer, written by one side only with one store, so that no lock and no system call is
needed and no torn value can be read. The page is an anonymous memory file: nothing is left when its last user ends.

    header   8 words   MAGIC  slots  stop_after  –
    slot    16 words   see `Slot`; words are counted from the slot's start
"""

from enum import IntEnum

MAGIC = 0x5045524455524531  # "PERDURE1"
WORDS_HEADER = 8
WORDS_SLOT = 16
NO_STEP = -1
NEVER_STOP = -1


class Header(IntEnum):
    """Words of the header; written by the agent."""

    MAGIC = 0
    SLOTS = 1
    STOP_AFTER = 2
    """Step after which `run.steps` ends, NEVER_STOP: none."""


class Slot(IntEnum):
    """Words of a slot; written by the worker (the agent clears the slot before it starts one)."""

    PID = 0
    GENERATION = 1
    STEP = 2
    """Last finished step, NO_STEP: none."""
    STEP_AT = 3
    """CLOCK_MONOTONIC in ns of that finish."""
    PHASE = 4
    """A `LoopPhase`."""
    PHASE_AT = 5
    """CLOCK_MONOTONIC in ns of the phase's begin."""
    TELLS = 6
    """1: the script tells its steps and phases; 0: only the optimizer's hook does."""
    FIRST_STEP = 7
    """First step that this life of the worker does, NO_STEP: not told."""
    SAVES = 8
    """Checkpoint phases ended."""
    SAVES_STEP = 9
    """STEP when the last one ended."""
    BEATS = 10
    """Anything that counts as progress, for phases without steps."""


class LoopPhase(IntEnum):
    """What a worker is doing, as far as it tells."""

    START_UP = 0
    FIRST_STEP = 1
    TRAINING = 2
    CHECKPOINT = 3
    EVALUATION = 4
    OTHER = 5
    """A phase that the script named."""
    DONE = 6
    """The loop has ended; what follows (a last save) has no limit but the job's."""


def page_bytes(slots: int) -> int:
    """Size in bytes of a page with `slots` slots."""
    return 8 * (WORDS_HEADER + slots * WORDS_SLOT)


def slot_start(slot: int) -> int:
    """Index of the first word of `slot`."""
    return WORDS_HEADER + slot * WORDS_SLOT
