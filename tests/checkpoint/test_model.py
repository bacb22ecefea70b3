# SPDX-License-Identifier: Apache-2.0
"""Module state is saved by name and loaded into the same objects."""

from typing import Any

import pytest
import torch
from torch import nn

from fleetlight.checkpoint.state.model import ModelState, load_model_state, model_state
from fleetlight.errors import CheckpointError


class Everything(nn.Module):
    """Each kind of state a module can have."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight
        self.norm = nn.BatchNorm1d(3)
        self.scale = nn.Parameter(torch.randn(()))
        self.none = nn.Parameter(torch.empty(0, 4))
        self.narrow = nn.Parameter(torch.randn(4).bfloat16())
        self.strided = nn.Parameter(torch.randn(4, 2).T)
        self.register_buffer("kept", torch.randint(9, (3,)))
        self.register_buffer("scratch", torch.randn(3), persistent=False)
        self.extra = {"calls": 3, "seen": (torch.randn(2), None)}

    def get_extra_state(self) -> dict[str, Any]:
        return self.extra

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.extra = state


def assert_equal(a: nn.Module, b: nn.Module) -> None:
    left, right = a.state_dict(), b.state_dict()
    assert list(left) == list(right)
    for name, value in left.items():
        if isinstance(value, torch.Tensor):
            assert value.dtype is right[name].dtype
            assert torch.equal(value, right[name]), name


def test_round_trip_keeps_every_object() -> None:
    source, target = Everything(), Everything()
    objects = {name: id(param) for name, param in target.named_parameters()}
    pointers = {name: param.data_ptr() for name, param in target.named_parameters()}
    scratch = target.scratch.clone()
    load_model_state(target, model_state(source))
    assert_equal(source, target)
    assert target.head.weight is target.embed.weight
    assert {name: id(param) for name, param in target.named_parameters()} == objects
    assert {name: param.data_ptr() for name, param in target.named_parameters()} == pointers
    assert torch.equal(target.scratch, scratch)
    assert target.extra["calls"] == 3
    assert torch.equal(target.extra["seen"][0], source.extra["seen"][0])
    assert target.extra["seen"][1] is None


def test_state_names_kinds_and_ties() -> None:
    state = model_state(Everything())
    assert state.aliases == {"head.weight": "embed.weight"}
    assert state.kinds["scale"] == "parameter"
    assert state.kinds["norm.running_mean"] == "buffer"
    assert state.kinds["_extra_state.seen.0"] == "extra"
    assert "scratch" not in state.tensors
    assert not any(tensor.requires_grad for tensor in state.tensors.values())


def test_the_state_is_not_a_copy() -> None:
    module = nn.Linear(2, 2)
    assert model_state(module).tensors["weight"].data_ptr() == module.weight.data_ptr()


def without(state: ModelState, name: str) -> ModelState:
    return ModelState(
        {key: value for key, value in state.tensors.items() if key != name}, state.kinds
    )


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (nn.Linear(3, 2), r"'weight' is float32\[2, 3\] here, but float32\[2, 2\] in the"),
        (nn.Linear(2, 2).half(), r"'weight' is float16\[2, 2\] here.*\(and 1 more difference\)"),
        (nn.Linear(2, 2, bias=False), "'bias' of the checkpoint does not exist here"),
        (nn.Bilinear(2, 2, 2), r"'weight' is float32\[2, 2, 2\] here"),
        (nn.LazyLinear(2), r"'weight' is without a shape yet \(run the model once first\) here"),
    ],
)
def test_a_difference_is_named_and_nothing_is_loaded(target: nn.Module, message: str) -> None:
    before = {name: p.detach().clone() for name, p in _with_data(target)}
    with pytest.raises(CheckpointError, match=rf"does not match the model: tensor {message}"):
        load_model_state(target, model_state(nn.Linear(2, 2)))
    for name, param in _with_data(target):
        assert torch.equal(param, before[name])


def _with_data(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(n, p) for n, p in module.named_parameters() if not nn.parameter.is_lazy(p)]


def test_a_missing_tensor_is_named() -> None:
    state = without(model_state(nn.Linear(2, 2)), "bias")
    with pytest.raises(CheckpointError, match="tensor 'bias' is not in the checkpoint; nothing"):
        load_model_state(nn.Linear(2, 2), state)


def pair(tied: bool) -> nn.Sequential:
    module = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    if tied:
        module[1].weight = module[0].weight
    return module


def test_tied_weights_load_into_untied_ones() -> None:
    source, target = pair(tied=True), pair(tied=False)
    load_model_state(target, model_state(source))
    assert torch.equal(target[0].weight, source[0].weight)
    assert torch.equal(target[1].weight, source[0].weight)


def test_untied_weights_load_into_tied_ones_only_if_equal() -> None:
    source, target = pair(tied=False), pair(tied=True)
    with pytest.raises(CheckpointError, match=r"'1.weight' and '0.weight' are one tensor here"):
        load_model_state(target, model_state(source))
    with torch.no_grad():
        source[1].weight.copy_(source[0].weight)
    load_model_state(target, model_state(source))
    assert torch.equal(target[0].weight, source[0].weight)


def test_a_module_loads_with_its_own_version() -> None:
    class Versioned(nn.Linear):
        _version = 2

        def _load_from_state_dict(self, state: Any, prefix: str, metadata: Any, *args: Any) -> None:
            assert metadata.get("version") == 2
            super()._load_from_state_dict(state, prefix, metadata, *args)

    load_model_state(nn.Sequential(Versioned(2, 2)), model_state(nn.Sequential(nn.Linear(2, 2))))


def test_the_state_is_a_plain_state_dict() -> None:
    source, target = Everything(), Everything()
    target.load_state_dict(model_state(source).state_dict())
    assert_equal(source, target)


def test_names_may_be_non_ascii() -> None:
    source, target = (nn.ModuleDict({"größe·層": nn.Linear(1, 1)}) for _ in range(2))
    load_model_state(target, model_state(source))
    assert_equal(source, target)
