"""What can never be kept is refused when it is asked for, in one sentence."""

import pytest

import perdure
from perdure.errors import ConfigError


class Counter:
    def state_dict(self) -> dict[str, int]:
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None:
        del state


@pytest.mark.parametrize(
    ("wish", "said"),
    [
        ({"policy": perdure.CheckpointPolicy(every=0)}, "every=0"),
        ({"policy": perdure.CheckpointPolicy(keep=0)}, "keep=0"),
        ({"policy": perdure.CheckpointPolicy(overhead=1.5)}, "overhead=1.5"),
        ({"store": "nosuch://bucket/folder"}, "nosuch"),
    ],
)
def test_wish_that_cannot_be_is_refused_at_once(wish: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        perdure.current_run().checkpoint(counter=Counter(), **wish)
