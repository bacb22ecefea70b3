# SPDX-License-Identifier: Apache-2.0
"""A program uses the state of the live module, whatever was assigned to it since."""

import copy
from typing import Any

import pytest
import torch
from tests.static.nets import batch, captured, net
from torch import nn

from fleetlight import static
from fleetlight.errors import PlanError

pytestmark = pytest.mark.slow


def program_after_a_run() -> tuple[Any, static.Program]:
    model = net()
    program = captured(model, torch.optim.SGD(model.parameters(), lr=0.1))
    static.Executor().run(program, batch(0))
    return model, program


def assign(model: Any) -> None:
    model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True)


def replace(model: Any) -> None:
    model[4].weight = nn.Parameter(model[4].weight.detach().clone())


def remove(model: Any) -> None:
    model[4].register_parameter("bias", None)


def narrower(model: Any) -> None:
    model[1].running_mean = model[1].running_mean.float()


def longer(model: Any) -> None:
    model[1].running_mean = torch.zeros(13).double()


CHANGES = [
    (assign, r"parameter 0\.weight: its module has another tensor"),
    (replace, r"parameter 4\.weight: its module has another tensor"),
    (remove, r"parameter 4\.bias: its module has nothing"),
    (narrower, r"buffer 1\.running_mean: .* torch\.float32"),
    (longer, r"buffer 1\.running_mean: .* shape \[13\]"),
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("change", "words"), CHANGES)
@pytest.mark.parametrize("for_test", [False, True])
def test_a_replaced_tensor_in_the_module_is_refused(
    change: Any, words: str, for_test: bool
) -> None:
    """Refused before any state changes."""
    model, program = program_after_a_run()
    if for_test:
        program = program.clone(for_test=True)
    change(model)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(PlanError, match=words + ".*; copy values into"):
        static.Executor().run(program, batch(1), ["loss"])
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


def test_values_copied_into_the_module_are_used() -> None:
    model, program = program_after_a_run()
    model.load_state_dict({k: torch.zeros_like(v) for k, v in model.state_dict().items()})
    (loss,) = static.Executor().run(program, batch(0), ["loss"])
    torch.testing.assert_close(loss.item(), torch.log(torch.tensor(3.0).double()).item())


def test_a_buffer_replaced_by_a_like_one_is_used() -> None:
    model, program = program_after_a_run()
    theirs = copy.deepcopy(model)
    for one in (model, theirs):
        one[1].running_mean = torch.full((12,), 5.0).double()
    given = batch(1)
    torch.manual_seed(1)
    static.Executor().run(program, given)
    torch.manual_seed(1)
    theirs(given["x"])
    torch.testing.assert_close(model[1].running_mean, theirs[1].running_mean)


def test_both_names_of_a_shared_tensor_are_checked() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = model[0].weight
    given = {"x": torch.ones(3, 2), "y": torch.zeros(3, 2)}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    program = static.capture(model, nn.functional.mse_loss, optimizer, given)
    static.Executor().run(program, given)
    model[1].weight = nn.Parameter(torch.ones(2, 2))
    with pytest.raises(PlanError, match=r"parameter 0\.weight: its module has another tensor"):
        static.Executor().run(program, given)
