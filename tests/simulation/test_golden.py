"""One whole timeline, as it is today. A change of behaviour shows here; look at it, then run this file as a program."""

from pathlib import Path

from tests.simulation.seeds import outcome_of, timeline

GOLDEN = Path(__file__).with_name("golden.txt")
SEED = 26


def test_timeline_of_a_seed_is_the_golden_one() -> None:
    assert timeline(outcome_of(SEED).records) == GOLDEN.read_text()


if __name__ == "__main__":
    GOLDEN.write_text(timeline(outcome_of(SEED).records))
    print(f"wrote {GOLDEN}")
