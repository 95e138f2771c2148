"""How often this process has asked what to restore, and of which turn its saves are (decision 0013)."""

from perdure.errors import NoCheckpointError
from perdure.vocab.checkpoint import Aside, CheckpointId
from perdure.vocab.ids import GenerationNumber
from perdure.wire.layouts import NO_STEP
from perdure.wire.memory import Restore, RestorePlan


class Turns:
    """Of one life of a trainer. All ranks count alike, since they restore and save at the same places."""

    def __init__(self, attempt: int, generation: int) -> None:
        self._attempt, self._generation = attempt, GenerationNumber(generation)
        self._asked = 0
        self.turn = 0

    def name(self, step: int) -> CheckpointId:
        """Of what is saved after `step` now."""
        return CheckpointId(attempt=self._attempt, generation=self._generation, turn=self.turn, step=step)

    def ask(self, *, has_saved: bool, step: int | None = None, hold: bool = False) -> Restore:
        """The next question. The first one, too, begins a new turn where something has been saved before it."""
        self._asked += 2 if has_saved and not self._asked else 1
        return Restore(step=step, number=self._asked, hold=hold)

    def aside(self, checkpoint: CheckpointId, reason: str) -> Aside:
        """`checkpoint` was restored here, and is bad."""
        return Aside(checkpoint=checkpoint, line=self.name(0).line, reason=reason)

    def begin(self, plan: RestorePlan, done: int) -> int:
        """Go on from the answer; gives the next step to do. `done`: the last step before the question, NO_STEP: none.

        Raises NoCheckpointError where there is nothing to go back to, and steps were done: the state is not that of
        step 0 any more.
        """
        self.turn = plan.turn
        if plan.chosen.checkpoint is not None:
            return plan.chosen.checkpoint.step + 1
        if done != NO_STEP:
            raise NoCheckpointError(
                f"there is no checkpoint to go back to, and step {done} has been done since the start; start the job"
                " anew, or save before restore() is called again"
            )
        return 0
