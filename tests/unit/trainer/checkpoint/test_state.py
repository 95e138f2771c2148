"""What is gathered from models, optimizers and other objects has DCP's names, and can be put back."""

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.state_dict import get_state_dict

from perdure.errors import ConfigError
from perdure.trainer.checkpoint.layout import bind, drop_tied
from perdure.trainer.checkpoint.state import OBJECTS, TIED, State
from perdure.trainer.checkpoint.tail import decode, encode


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.body = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.1))
        self.head = nn.Linear(4, 7, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.embed(x)))


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2) -> None:
    for _ in range(steps):
        model(torch.randint(0, 7, (5,))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def snapshot(state: State) -> dict[str, Any]:
    gathered = state.gather()
    values = decode(encode([gathered.shared, gathered.own]))
    return {"tensors": {k: v.clone() for k, v in gathered.tensors.items()}, "shared": values[0], "own": values[1]}


def restored(state: State, saved: dict[str, Any]) -> None:
    wholes = {k: (tuple(v.shape), str(v.dtype).removeprefix("torch.")) for k, v in saved["tensors"].items()}
    targets = state.targets(wholes)
    assert set(targets) == set(saved["tensors"])
    with torch.no_grad():
        for name, tensor in saved["tensors"].items():
            assert targets[name].dtype == tensor.dtype
            targets[name].copy_(tensor)
    state.put(saved["shared"], saved["own"])


OPTIMIZERS = [
    lambda params: torch.optim.AdamW(params, lr=0.1),
    lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    lambda params: torch.optim.SGD(params, lr=0.1),
    lambda params: torch.optim.Adafactor(params, lr=0.1),
    lambda params: torch.optim.Adam(params, lr=torch.tensor(0.1)),
    lambda params: torch.optim.RMSprop(params, lr=0.1, centered=True),
]


@pytest.mark.parametrize("make", OPTIMIZERS)
def test_names_and_values_are_those_that_dcp_flattens(make: Any) -> None:
    model = Net()
    optimizer = make(model.parameters())
    trained(model, optimizer)
    gathered = State({"model": model, "optimizer": optimizer}).gather()
    model_state, optimizer_state = get_state_dict(model, optimizer)
    flat, _ = flatten_state_dict({"model": model_state, "optimizer": optimizer_state})
    assert {name for name, value in flat.items() if isinstance(value, torch.Tensor)} == set(gathered.tensors)
    assert {name for name, value in flat.items() if not isinstance(value, torch.Tensor)} == set(gathered.shared) - {
        OBJECTS
    }
    for name, value in flat.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, gathered.tensors[name])
        else:
            assert value == gathered.shared[name]


@pytest.mark.parametrize("make", OPTIMIZERS)
def test_optimizer_without_state_is_foreseen_untouched_and_then_made(make: Any) -> None:
    model = Net()
    optimizer = make(model.parameters())
    state = State({"model": model, "optimizer": optimizer})
    before = {name: tensor.clone() for name, tensor in state.gather().tensors.items()}
    foreseen = {**state.gather().tensors, **state.expected()}
    assert not optimizer.state
    assert all(param.grad is None for param in model.parameters())
    assert all(torch.equal(before[name], tensor) for name, tensor in state.gather().tensors.items())
    shape = bind(foreseen, 0, 1)
    trained(model, optimizer)
    assert bind(state.gather().tensors, 0, 1).hash == shape.hash
    saved = snapshot(state)

    other = Net()
    second = make(other.parameters())
    copied = State({"model": other, "optimizer": second})
    restored(copied, saved)
    for _ in range(3):
        torch.manual_seed(5)
        trained(model, optimizer)
        torch.manual_seed(5)
        trained(other, second)
    ours, theirs = copied.gather(), state.gather()
    assert all(torch.equal(ours.tensors[name], tensor) for name, tensor in theirs.tensors.items())


def test_restored_run_continues_bit_for_bit_with_dropout_and_schedulers() -> None:
    def make() -> tuple[nn.Module, torch.optim.Optimizer, Any, Any]:
        model = Net()
        optimizer = torch.optim.AdamW(
            [{"params": model.body.parameters(), "lr": 0.01}, {"params": [model.embed.weight, model.head.weight]}]
        )
        first = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=3)
        second = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4])
        return model, optimizer, [first, second], torch.amp.GradScaler("cpu")

    def loop(parts: tuple[Any, ...], steps: int) -> list[float]:
        losses = []
        for _ in range(steps):
            loss = parts[0](torch.randint(0, 7, (5,))).square().mean()
            loss.backward()
            parts[1].step()
            parts[1].zero_grad()
            for scheduler in parts[2]:
                scheduler.step()
            losses.append(loss.item())
        return losses

    names = ("model", "optimizer", "scheduler", "scaler")
    parts = make()
    loop(parts, 3)
    saved = snapshot(State(dict(zip(names, parts, strict=True))))
    expected = loop(parts, 4)
    again = make()
    restored(State(dict(zip(names, again, strict=True))), saved)
    assert loop(again, 4) == expected
    assert again[2][1].milestones == parts[2][1].milestones


def test_tied_parameters_are_kept_once_and_named() -> None:
    model = Net()
    model.head.weight = model.embed.weight
    gathered = State({"model": model}).gather()
    assert "model.head.weight" not in gathered.tensors
    assert gathered.shared[TIED] == {"model.head.weight": "model.embed.weight"}
    saved = snapshot(State({"model": model}))
    other = Net()
    other.head.weight = other.embed.weight
    restored(State({"model": other}), saved)
    assert torch.equal(other.head.weight, model.embed.weight)


def test_compiled_and_plain_models_have_the_same_names() -> None:
    model = Net()
    compiled = torch.compile(model)
    optimizer = torch.optim.AdamW(compiled.parameters())
    plain = State({"model": model, "optimizer": optimizer}).gather()
    wrapped = State({"model": compiled, "optimizer": optimizer}).gather()
    assert list(plain.tensors) == list(wrapped.tensors)
    assert plain.shared == wrapped.shared


def test_several_models_and_optimizers_by_dictionary_and_list() -> None:
    models = {"g": nn.Linear(2, 2), "d": nn.Linear(2, 2)}
    optimizers = [torch.optim.AdamW(model.parameters()) for model in models.values()]
    for model, optimizer in zip(models.values(), optimizers, strict=True):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    state = State({"model": models, "optimizer": optimizers})
    names = set(state.gather().tensors)
    assert {"model.g.weight", "model.d.bias", "optimizer.0.state.model.g.weight.exp_avg"} <= names
    saved = snapshot(state)
    other = {"g": nn.Linear(2, 2), "d": nn.Linear(2, 2)}
    restored(State({"model": other, "optimizer": [torch.optim.AdamW(m.parameters()) for m in other.values()]}), saved)
    assert torch.equal(other["d"].weight, models["d"].weight)


class Counting:
    """A user's object with tensors, numbers and keys that are no strings."""

    def __init__(self) -> None:
        self.state: dict[Any, Any] = {"mean": torch.zeros(3), "seen": {3: torch.ones(2)}, "shape": (1, 2), "n": 0}

    def state_dict(self) -> dict[Any, Any]:
        return self.state

    def load_state_dict(self, state: dict[Any, Any]) -> None:
        self.state = state


class Loader(Counting):
    def __iter__(self) -> Any:
        return iter(())


def test_any_object_with_a_state_comes_back_whole() -> None:
    average, loader = Counting(), Loader()
    average.state["mean"] += 2
    loader.state["n"] = 7
    state = State({"average": average, "stream": loader})
    gathered = state.gather()
    assert set(gathered.tensors) == {"average.mean", "average.seen.3"}
    assert gathered.own["state"]["stream"]["n"] == 7
    saved = snapshot(state)
    new = Counting(), Loader()
    restored(State({"average": new[0], "stream": new[1]}), saved)
    assert new[0].state["mean"].tolist() == [2, 2, 2]
    assert new[0].state["seen"][3].tolist() == [1, 1]
    assert (new[0].state["shape"], new[1].state["n"]) == ((1, 2), 7)


def test_random_numbers_go_on_where_they_were() -> None:
    state = State({"model": Net()})
    saved = snapshot(state)
    drawn = torch.rand(2)
    torch.manual_seed(99)
    restored(state, saved)
    assert torch.equal(torch.rand(2), drawn)


class Remembering(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)
        self.note = "new"

    def get_extra_state(self) -> Any:
        return {"note": self.note}

    def set_extra_state(self, state: Any) -> None:
        self.note = state["note"]


def test_extra_state_of_modules_is_kept() -> None:
    model = nn.Sequential(Remembering())
    model[0].note = "old"
    saved = snapshot(State({"model": model}))
    other = nn.Sequential(Remembering())
    restored(State({"model": other}), saved)
    assert other[0].note == "old"


def test_other_objects_than_were_saved_are_refused_by_name() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    saved = State({"model": model, "optimizer": optimizer, "scheduler": scheduler}).gather()
    with pytest.raises(ConfigError, match="only in the checkpoint: scheduler"):
        State({"model": model, "optimizer": optimizer}).put(saved.shared, None)
    with pytest.raises(ConfigError, match="only in the checkpoint: optimizer, scheduler"):
        State({"model": model}).put(saved.shared, None)
    with pytest.raises(ConfigError, match="not in the checkpoint: average"):
        State({"model": model, "optimizer": optimizer, "scheduler": scheduler, "average": Counting()}).put(
            saved.shared, None
        )


def test_object_without_a_state_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"run.checkpoint\(data=…\): int has no state_dict"):
        State({"data": 3})


def test_changed_state_is_laid_out_anew_and_moved_state_is_not() -> None:
    model = Net()
    state = State({"model": model})
    first = bind(state.gather().tensors, 0, 1)
    assert bind(state.gather().tensors, 0, 1, first) is first
    model.head.weight = nn.Parameter(torch.ones_like(model.head.weight))
    moved = bind(state.gather().tensors, 0, 1, first)
    assert moved is not first
    assert moved.layout is first.layout
    model.head = nn.Linear(4, 9, bias=False)
    assert bind(state.gather().tensors, 0, 1, moved).hash != first.hash


def test_odd_tensors_are_laid_out_row_major() -> None:
    tensors = {
        "zero": torch.tensor(3),
        "empty": torch.empty(0, 5),
        "turned": torch.arange(6.0).reshape(2, 3).t(),
        "half": torch.ones(3, dtype=torch.bfloat16),
    }
    bound = bind(tensors, 0, 1)
    assert [part.start % 64 for part in bound.layout.parts] == [0, 0, 0, 0]
    assert [part.nbytes for part in bound.layout.parts] == [0, 6, 24, 8]
    assert [part.name for part, _ in bound.rest] == ["turned"]


def test_sparse_tensors_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="the tensor model.w is sparse"):
        bind({"model.w": torch.eye(2).to_sparse()}, 0, 1)


def test_views_of_one_memory_that_differ_are_not_tied() -> None:
    whole = torch.arange(6.0)
    kept, tied = drop_tied({"a": whole, "b": whole[:3], "c": whole.view(2, 3), "d": whole.view(6)})
    assert (set(kept), tied) == ({"a", "b", "c"}, {"d": "a"})


def test_deep_copy_of_a_model_is_not_tied() -> None:
    model = nn.Linear(2, 2)
    kept, tied = drop_tied({"a": model.weight, "b": copy.deepcopy(model).weight})
    assert (len(kept), tied) == (2, {})
