# SPDX-License-Identifier: Apache-2.0
"""The names in a program come from the module that owns its called modules."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from fleetlight import static
from fleetlight.static.definition import reset_default_programs
from fleetlight.static.writing.calls import owner_of

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    reset_default_programs()
    yield
    reset_default_programs()


class Net(nn.Module):
    """Like a model of Fleet: a method writes the program, and the model itself is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.Sequential(nn.Linear(3, 4), nn.Tanh())
        self.head = nn.Linear(4, 1)
        self.scale = nn.Parameter(torch.ones(1))

    def net(self) -> Tensor:
        out: Tensor = self.head(self.tower(static.data("x", [None, 3]))) * self.scale
        return out.mean()


def names(program: static.Program) -> set[str]:
    return {slot.name for slot in program.state if slot.kind == "parameter"}


def test_a_program_uses_the_names_of_the_model_that_writes_it() -> None:
    model = Net()
    static.minimize(torch.optim.SGD(model.parameters(), lr=0.1), model.net())
    program = static.default_main_program()
    assert program.model is model
    assert names(program) == set(model.state_dict())


def test_an_outer_model_does_not_change_names() -> None:
    model = Net()
    outer = nn.ModuleDict({"inner": model})
    assert owner_of([model.tower, model.head], []) is model
    assert owner_of([model.tower, model.head], [model.scale]) is model
    assert owner_of([model, outer], []) is outer


def test_modules_without_a_common_owner_are_numbered() -> None:
    first, second = nn.Linear(3, 2), nn.Linear(2, 1)
    second(first(static.data("x", [None, 3])))
    program = static.default_main_program()
    assert names(program) == {
        *("linear_0.weight", "linear_0.bias", "linear_1.weight", "linear_1.bias")
    }
    assert set(program.parameters()) == {*first.parameters(), *second.parameters()}


def test_two_possible_owners_are_ambiguous() -> None:
    first, second = nn.Linear(3, 2), nn.Linear(2, 1)
    one, other = nn.Sequential(first, second), nn.ModuleList([first, second])
    assert owner_of([first, second], []) is None
    # a module around both does not decide between them
    both = nn.ModuleList([one, other])
    assert owner_of([first, second], []) is None
    del both, other
    assert owner_of([first, second], []) is one


def test_a_shared_layer_is_restored_after_the_call() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.BatchNorm1d(3)
            self.again = nn.ModuleDict({"same": self.one})

        def forward(self, x: Tensor) -> Tensor:
            return self.again["same"](self.one(x))

    model = Twice()
    before = [*model.parameters(), *model.buffers()]
    model(static.data("x", [None, 3]))
    assert all(a is b for a, b in zip(before, [*model.parameters(), *model.buffers()], strict=True))


def test_parameters_are_those_of_called_modules() -> None:
    model = Net()
    model.unused = nn.Linear(2, 2)
    model.net()
    called = set(static.default_main_program().parameters())
    assert called == {*model.tower.parameters(), *model.head.parameters(), model.scale}
