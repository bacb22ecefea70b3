# SPDX-License-Identifier: Apache-2.0
"""Module state is saved by name and loaded into the same objects."""

from collections.abc import Iterable
from typing import Any

import msgspec
import pytest
import torch
from tests.checkpoint.states import names
from torch import nn
from torch.optim import Optimizer

from fleetlight.checkpoint.state.model import ModelState, load_model_state, model_state
from fleetlight.checkpoint.state.optimizer import (
    OptimizerState,
    load_optimizer_state,
    optimizer_state,
)
from fleetlight.checkpoint.storage.manifest import OptimizerEntry
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


# -- an optimizer resumes exactly, whatever the order of its parameters ---------------------------

CASES: dict[str, tuple[type[Optimizer], dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.1}),
    "momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "adam": (torch.optim.Adam, {"lr": 0.01, "amsgrad": True}),
    "adam with a tensor rate": (torch.optim.Adam, {"lr": torch.tensor(0.01), "capturable": False}),
    "adam fused": (torch.optim.Adam, {"lr": 0.01, "fused": True}),
    "adamw": (torch.optim.AdamW, {"lr": 0.01, "betas": (0.5, 0.7)}),
    "adamax": (torch.optim.Adamax, {}),
    "nadam": (torch.optim.NAdam, {}),
    "radam": (torch.optim.RAdam, {}),
    "adagrad": (torch.optim.Adagrad, {"initial_accumulator_value": 0.1}),
    "adadelta": (torch.optim.Adadelta, {}),
    "adafactor": (torch.optim.Adafactor, {}),
    "asgd": (torch.optim.ASGD, {}),
    "rmsprop": (torch.optim.RMSprop, {"momentum": 0.5, "centered": True}),
    "rprop": (torch.optim.Rprop, {}),
    "lbfgs": (torch.optim.LBFGS, {"history_size": 3}),
}


def module() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()


def train(model: nn.Module, optimizer: Optimizer, steps: Iterable[int]) -> None:
    for step in steps:
        inputs = torch.randn(5, 3, generator=torch.Generator().manual_seed(step)).double()

        def closure(inputs: torch.Tensor = inputs) -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(inputs).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)


def through_json(state: OptimizerState) -> OptimizerState:
    entry = msgspec.json.decode(msgspec.json.encode(state.entry), type=OptimizerEntry)
    return OptimizerState(entry, state.tensors)


@pytest.mark.parametrize("case", CASES)
def test_a_resumed_run_equals_an_uninterrupted_one(case: str) -> None:
    kind, options = CASES[case]
    model, again = module(), module()
    optimizer = kind(model.parameters(), **options)
    train(model, optimizer, range(3))
    again.load_state_dict(model.state_dict())
    resumed = kind(again.parameters(), **options)
    state = through_json(optimizer_state(optimizer, names(model)))
    load_optimizer_state(resumed, names(again), state)
    train(model, optimizer, range(3, 6))
    train(again, resumed, range(3, 6))
    for left, right in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(left, right)


@pytest.mark.parametrize("case", CASES)
def test_state_and_options_are_restored_exactly(case: str) -> None:
    kind, options = CASES[case]
    model = module()
    optimizer, fresh = (kind(model.parameters(), **options) for _ in range(2))
    train(model, optimizer, range(2))
    load_optimizer_state(
        fresh, names(model), through_json(optimizer_state(optimizer, names(model)))
    )
    torch.testing.assert_close(dict(fresh.state), dict(optimizer.state), rtol=0, atol=0)
    for left, right in zip(fresh.param_groups, optimizer.param_groups, strict=True):
        assert left == right
        assert {key: type(value) for key, value in left.items()} == {
            key: type(value) for key, value in right.items()
        }


def two_groups(model: nn.Sequential, swapped: bool = False) -> torch.optim.Adam:
    first = {"params": list(model[0].parameters()), "lr": 0.1}
    second = {"params": list(model[2].parameters())[::-1] if swapped else model[2].parameters()}
    return torch.optim.Adam([second, first] if swapped else [first, second], lr=0.01)


def test_the_order_of_groups_and_parameters_does_not_matter() -> None:
    model = module()
    optimizer, swapped = two_groups(model), two_groups(model, swapped=True)
    train(model, optimizer, range(2))
    optimizer.param_groups[0]["lr"] = 0.25
    load_optimizer_state(swapped, names(model), optimizer_state(optimizer, names(model)))
    assert [group["lr"] for group in swapped.param_groups] == [0.01, 0.25]
    torch.testing.assert_close(dict(swapped.state), dict(optimizer.state), rtol=0, atol=0)


def test_differently_split_groups_load_if_options_agree() -> None:
    model = module()
    one = torch.optim.Adam(model.parameters(), lr=0.5)
    two = two_groups(model)
    load_optimizer_state(two, names(model), optimizer_state(one, names(model)))
    assert [group["lr"] for group in two.param_groups] == [0.5, 0.5]
    state = optimizer_state(two_groups(model), names(model))
    with pytest.raises(CheckpointError, match="was 2 groups with different options when saved"):
        load_optimizer_state(one, names(model), state)


def test_state_keeps_its_own_dtypes() -> None:
    model = module().bfloat16()
    optimizer, fresh = (torch.optim.SGD(model.parameters(), momentum=0.9) for _ in range(2))
    for param in model.parameters():
        optimizer.state[param]["momentum_buffer"] = torch.randn(param.shape).double()
    load_optimizer_state(fresh, names(model), optimizer_state(optimizer, names(model)))
    for param in model.parameters():
        assert fresh.state[param]["momentum_buffer"].dtype is torch.float64


def test_loaded_state_is_a_copy() -> None:
    model = module()
    optimizer, fresh = (torch.optim.Adam(model.parameters()) for _ in range(2))
    train(model, optimizer, range(1))
    state = optimizer_state(optimizer, names(model))
    load_optimizer_state(fresh, names(model), state)
    pointers = {tensor.data_ptr() for tensor in state.tensors.values()}
    for values in fresh.state.values():
        assert not {tensor.data_ptr() for tensor in values.values()} & pointers


def test_steps_are_counted_on_the_cpu_unless_a_kernel_reads_them() -> None:
    model, elsewhere = module(), module().to("meta")
    for fused, device in ((False, "cpu"), (True, "meta")):
        optimizer = torch.optim.Adam(model.parameters(), fused=fused)
        train(model, optimizer, range(1))
        moved = torch.optim.Adam(elsewhere.parameters())
        load_optimizer_state(moved, names(elsewhere), optimizer_state(optimizer, names(model)))
        state = moved.state[next(elsewhere.parameters())]
        assert (state["step"].device.type, state["exp_avg"].device.type) == (device, "meta")


def test_loading_an_empty_state_clears_the_state() -> None:
    model = module()
    optimizer, used = (torch.optim.Adam(model.parameters()) for _ in range(2))
    train(model, used, range(1))
    load_optimizer_state(used, names(model), optimizer_state(optimizer, names(model)))
    assert not used.state


def test_keys_added_by_a_scheduler_are_saved() -> None:
    model = module()
    optimizer, fresh = (torch.optim.SGD(model.parameters(), lr=0.3) for _ in range(2))
    torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    load_optimizer_state(fresh, names(model), optimizer_state(optimizer, names(model)))
    assert fresh.param_groups[0]["initial_lr"] == 0.3


def test_a_tensor_rate_keeps_its_object() -> None:
    model = module()
    saved, live = (torch.optim.Adam(model.parameters(), lr=torch.tensor(r)) for r in (0.5, 0.1))
    rate = live.param_groups[0]["lr"]
    load_optimizer_state(live, names(model), optimizer_state(saved, names(model)))
    assert live.param_groups[0]["lr"] is rate
    assert rate.item() == 0.5


def test_a_derived_class_is_saved_as_the_users_class() -> None:
    model = module()
    derived = type("Distributed", (torch.optim.Adam,), {"__module__": "fleetlight.anything"})
    state = optimizer_state(derived(model.parameters()), names(model))
    assert state.entry.class_name == "Adam"
    load_optimizer_state(torch.optim.Adam(model.parameters()), names(model), state)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda m: torch.optim.SGD(m.parameters()), "it is SGD here, but Adam in the checkpoint"),
        (lambda m: torch.optim.Adam(m[0].parameters()), r"'2.weight' of the checkpoint does not"),
    ],
)
def test_a_difference_of_an_optimizer_is_named_and_nothing_is_loaded(
    build: Any, message: str
) -> None:
    model = module()
    state = optimizer_state(torch.optim.Adam(model.parameters(), lr=0.7), names(model))
    optimizer = build(model)
    before = optimizer.param_groups[0]["lr"]
    with pytest.raises(CheckpointError, match=f"does not match the optimizer: .*{message}"):
        load_optimizer_state(optimizer, names(model), state)
    assert optimizer.param_groups[0]["lr"] == before


def test_another_shape_is_named() -> None:
    model, other = nn.Linear(2, 2), nn.Linear(3, 2)
    state = optimizer_state(torch.optim.Adam(model.parameters()), names(model))
    with pytest.raises(CheckpointError, match=r"'weight' is \(2, 3\) here, but \(2, 2\) in the"):
        load_optimizer_state(torch.optim.Adam(other.parameters()), names(other), state)


def test_an_entry_that_cannot_be_stored_is_named() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    optimizer.state[model.weight]["hook"] = print
    with pytest.raises(CheckpointError, match=r"weight\.hook cannot be saved: got a builtin"):
        optimizer_state(optimizer, names(model))


def test_a_parameter_of_another_model_is_an_error() -> None:
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters())
    with pytest.raises(CheckpointError, match=r"param_groups.0 has an entry for \(2, 2\), which"):
        optimizer_state(optimizer, {})
