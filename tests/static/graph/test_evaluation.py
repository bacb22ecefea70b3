# SPDX-License-Identifier: Apache-2.0
"""The evaluation of a program equals the model in eval mode and changes no state."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.static import kinds
from tests.static.kinds import KINDS, Headed, batch, captured, flat, loss_of
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

from fleetlight import static
from fleetlight.errors import PlanError

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", KINDS)
def test_evaluation_equals_the_model_in_eval_mode(name: str) -> None:
    model = kinds.of(KINDS[name])
    executor, program = static.Executor(), captured(model)
    # let running statistics differ from those of the batch
    executor.run(program, batch(0))
    evaluation = program.clone(for_test=True)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    rng = torch.get_rng_state()
    given = batch(1)
    (found,) = executor.run(evaluation, given, ["loss"])
    assert torch.equal(torch.get_rng_state(), rng) or batch(1)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    model.eval()
    expected = loss_of(model(given["x"]), given["y"]).detach()
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


def test_evaluation_draws_no_random_numbers_and_needs_no_label() -> None:
    evaluation = captured(kinds.of(lambda: kinds.encoder(0.5))).clone(for_test=True)
    (x,) = (batch(1)["x"],)
    executor = static.Executor()
    before = torch.get_rng_state()
    one, other = (executor.run(evaluation, {"x": x}, ["output"])[0] for _ in range(2))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(one, other)


def test_the_output_of_a_dropout_is_fetched_by_its_variable() -> None:
    out = F.dropout(static.data("x", [None, 4]) * 2, 0.5)
    evaluation = static.default_main_program().clone(for_test=True)
    executor = static.Executor()
    executor.run(static.default_startup_program())
    assert torch.equal(
        executor.run(evaluation, {"x": torch.ones(3, 4)}, [out])[0], 2 * torch.ones(3, 4)
    )


class Noisy(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.rand_like(x)


class Branches(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if self.training else x


class AtTheEnd(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = x * 2
        if not self.training:
            y = y.softmax(-1)
        return y


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(4, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.count.add_(1)


OWN: list[tuple[Any, str]] = [
    (Noisy, r"^clone\(for_test=True\): rand_like draws random numbers, and nothing says what an "),
    (Branches, r"^clone\(for_test=True\): body reads self.training itself, and nothing says"),
    (AtTheEnd, r"body reads self.training itself.*capture model\.eval\(\) with optimizer="),
    (lambda: spectral_norm(nn.Linear(4, 4)), r"weight\.0 reads self\.training itself"),
    (Counts, r"^clone\(for_test=True\): add_ changes buffer body\.count and uses the changed"),
]


@pytest.mark.parametrize(("body", "words"), OWN)
def test_models_without_a_known_evaluation_are_refused(body: Any, words: str) -> None:
    program = captured(kinds.of(lambda: Headed(body(), flat)))
    static.Executor().run(program, batch(0))
    with pytest.raises(PlanError, match=words):
        program.clone(for_test=True)


class PassesTrainingFlag(nn.Module):
    """Passes its training flag to known functions."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            x = F.dropout(x, 0.3)
        return F.dropout(x * x.size(0), p=0.5, training=self.training)


def test_known_functions_accept_the_training_flag() -> None:
    model = kinds.of(lambda: Headed(PassesTrainingFlag(), flat))
    program = captured(model)
    given = batch(2)
    (found,) = static.Executor().run(program.clone(for_test=True), given, ["output"])
    torch.testing.assert_close(found, model.eval()(given["x"]).detach(), rtol=1e-9, atol=1e-12)


def test_models_in_eval_mode_can_be_captured() -> None:
    model = kinds.of(lambda: Headed(Branches(), flat)).eval()
    program = static.capture(model, None, None, {"x": batch(0)["x"]})
    (found,) = static.Executor().run(program, {"x": batch(1)["x"]}, ["output"])
    torch.testing.assert_close(found, model(batch(1)["x"]).detach())
    # the attribute is an ordinary one after the capture
    assert model.training is False
    assert "training" not in nn.Module.__dict__


@pytest.mark.parametrize("is_renamed", [False, True])
def test_fetching_a_random_value_of_an_evaluation_is_refused(is_renamed: bool) -> None:
    x = static.data("x", [None, 4])
    noisy = (x + torch.randn_like(x)).mean()
    plain = x * 2
    evaluation = static.default_main_program().clone(for_test=True)
    if is_renamed:
        noisy.name = "noisy"  # type: ignore[attr-defined]
    executor, feed = static.Executor(), {"x": torch.ones(3, 4)}
    assert executor.run(evaluation, feed, [plain])[0].sum() == 24
    with pytest.raises(PlanError, match=r"randn_like draws random numbers, and nothing says what"):
        executor.run(evaluation, feed, [noisy])
