"""When it is told that steps go on and nothing that is saved changes."""

from perdure.agent.memory.sameness import Sameness
from perdure.vocab.checkpoint import CheckpointId
from perdure.vocab.ids import GenerationNumber, Rank


def at(step: int, generation: int = 1) -> CheckpointId:
    return CheckpointId(attempt=1, generation=GenerationNumber(generation), step=step)


def heard(*notes: tuple[int, CheckpointId, str]) -> str:
    sameness = Sameness()
    for rank, checkpoint, data in notes:
        sameness.note(Rank(rank), checkpoint, data)
    return sameness.trouble


def test_a_later_step_with_the_same_bytes_is_told_with_its_rank_and_steps() -> None:
    """Thread 7 (NVIDIA-NeMo/RL 3312): of the first rank that it is seen of, and once."""
    said = heard((3, at(4), "a"), (3, at(6), "a"), (3, at(8), "a"), (1, at(4), "b"), (1, at(6), "b"))
    assert said.startswith("rank 3: the step moved from 4 to 6, but no byte")


def test_what_changes_and_what_cannot_change_is_not_told() -> None:
    assert heard((0, at(1), "a"), (0, at(2), "b"), (0, at(3), "a")) == ""
    assert heard((0, at(1), "a"), (1, at(2), "a")) == "", "replicas have the same bytes"
    assert heard((0, at(1), ""), (0, at(2), "")) == "", "no tensors"
    assert heard((0, at(5), "a"), (0, at(5, 2), "a"), (0, at(6, 2), "b")) == "", "what was restored is saved again"
