"""What `run.checkpoint` refuses of a policy before anything is set up."""

import pytest
import torch

import perdure
from perdure.errors import ConfigError


def test_parity_and_replicas_together_are_refused_at_once() -> None:
    policy = perdure.CheckpointPolicy(replicas=1, xor=4)
    with pytest.raises(ConfigError, match="replicas and xor protect from the same loss; give one of the two"):
        perdure.current_run().checkpoint(model=torch.nn.Linear(1, 1), policy=policy)


def test_parity_over_less_than_no_node_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"CheckpointPolicy\(xor=-1\): it must be at least 0"):
        perdure.current_run().checkpoint(model=torch.nn.Linear(1, 1), policy=perdure.CheckpointPolicy(xor=-1))
