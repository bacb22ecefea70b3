# SPDX-License-Identifier: Apache-2.0
"""A program uses the state of the live module, whatever was assigned to it since."""

import copy
import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.static import kinds
from tests.static.nets import accuracy, batch, captured, net
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

from fleetlight import static
from fleetlight.errors import PlanError
from fleetlight.static.graph.fingerprint import entries, fingerprint, first_difference

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


# -- equal programs have one fingerprint; the first difference of others is named -----------------

ALONE = """
import torch
from tests.static.nets import captured, net
from fleetlight.static.graph.fingerprint import fingerprint
# tensors that came before give torch's sizes other names
captured(net(), None)
model = net()
print(fingerprint(captured(model, torch.optim.SGD(model.parameters(), lr=0.5)).form))
"""


def make_program(lr: float = 0.5, **options: Any) -> static.Program:
    model = net()
    return captured(model, torch.optim.SGD(model.parameters(), lr=lr, **options))


def difference_of(one: static.Program, other: static.Program) -> str:
    difference = first_difference(entries(one.form), entries(other.form), 1)
    assert (difference is None) == (fingerprint(one.form) == fingerprint(other.form))
    return difference or ""


@pytest.mark.long
def test_fingerprints_are_equal_in_another_process() -> None:
    found = subprocess.run(
        [sys.executable, "-c", ALONE], check=True, capture_output=True, text=True, timeout=100
    )
    assert found.stdout.strip() == fingerprint(make_program().form)


def test_parameter_values_and_batch_size_are_ignored() -> None:
    model, loss = net(), nn.functional.cross_entropy
    with torch.no_grad():
        model[0].weight.add_(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    other = static.capture(model, loss, optimizer, batch(3), {"accuracy": accuracy})
    assert difference_of(make_program(), other) == ""


class Product(nn.Module):
    def __init__(self, times: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.times = times

    def forward(self, x: Tensor) -> Tensor:
        return self.times(self.linear(x))


def product(times: Any, name: str = "output") -> static.Program:
    return static.capture(Product(times), None, None, {"x": torch.ones(2, 4)}, {name: torch.sum})


def test_the_first_different_operation_is_named() -> None:
    assert difference_of(product(torch.sin), product(torch.cos)) == (
        "operation 2: sin on worker 0, cos on worker 1"
    )


def test_different_arguments_are_shown_with_their_operation() -> None:
    difference = difference_of(product(lambda x: x * 2.0), product(lambda x: x * 2.5))
    assert difference == (
        "operation 2: aten.mul.Tensor(%4, 2.0) in forward: float32[batch, 4] on worker 0, "
        "aten.mul.Tensor(%4, 2.5) in forward: float32[batch, 4] on worker 1"
    )


def test_a_missing_entry_is_named() -> None:
    zero = entries(product(torch.sin).form)
    assert first_difference(zero, [*zero, ("fetch more", "value 3")], 2) == (
        "fetch more: value 3 on worker 2, nothing on worker 0"
    )
    assert first_difference([*zero, ("fetch more", "value 3")], zero, 2) == (
        "fetch more: value 3 on worker 0, nothing on worker 2"
    )


@pytest.mark.parametrize("options", [{"momentum": 0.5}, {"weight_decay": 0.1}])
def test_optimizer_options_are_compared(options: dict[str, float]) -> None:
    assert difference_of(make_program(), make_program(**options))


def test_fetch_names_are_compared() -> None:
    assert "fetch" in difference_of(product(torch.sin, "total"), product(torch.sin, "sum"))


def test_device_numbers_are_ignored() -> None:
    """Each worker has its own GPU."""
    texts = []
    for device in ("cuda:0", "cuda:1"):
        program = product(lambda x: x + torch.zeros(4, device="cpu"))
        graph, _ = program.form.copied()
        for node in graph.nodes:
            if node.op == "call_function":
                node.kwargs = {**node.kwargs, "device": torch.device(device)}
        texts.append(entries(program.form.rewritten(graph, "moved")))
    assert texts[0] == texts[1]


# -- the evaluation of a program equals the model in eval mode and changes no state ---------------


@pytest.mark.parametrize("name", kinds.KINDS)
def test_evaluation_equals_the_model_in_eval_mode(name: str) -> None:
    model = kinds.of(kinds.KINDS[name])
    executor, program = static.Executor(), kinds.captured(model)
    # let running statistics differ from those of the batch
    executor.run(program, kinds.batch(0))
    evaluation = program.clone(for_test=True)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    rng = torch.get_rng_state()
    given = kinds.batch(1)
    (found,) = executor.run(evaluation, given, ["loss"])
    assert torch.equal(torch.get_rng_state(), rng) or kinds.batch(1)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    model.eval()
    expected = kinds.loss_of(model(given["x"]), given["y"]).detach()
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


def test_evaluation_draws_no_random_numbers_and_needs_no_label() -> None:
    evaluation = kinds.captured(kinds.of(lambda: kinds.encoder(0.5))).clone(for_test=True)
    (x,) = (kinds.batch(1)["x"],)
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
    program = kinds.captured(kinds.of(lambda: kinds.Headed(body(), kinds.flat)))
    static.Executor().run(program, kinds.batch(0))
    with pytest.raises(PlanError, match=words):
        program.clone(for_test=True)


class PassesTrainingFlag(nn.Module):
    """Passes its training flag to known functions."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            x = F.dropout(x, 0.3)
        return F.dropout(x * x.size(0), p=0.5, training=self.training)


def test_known_functions_accept_the_training_flag() -> None:
    model = kinds.of(lambda: kinds.Headed(PassesTrainingFlag(), kinds.flat))
    program = kinds.captured(model)
    given = kinds.batch(2)
    (found,) = static.Executor().run(program.clone(for_test=True), given, ["output"])
    torch.testing.assert_close(found, model.eval()(given["x"]).detach(), rtol=1e-9, atol=1e-12)


def test_models_in_eval_mode_can_be_captured() -> None:
    model = kinds.of(lambda: kinds.Headed(Branches(), kinds.flat)).eval()
    program = static.capture(model, None, None, {"x": kinds.batch(0)["x"]})
    (found,) = static.Executor().run(program, {"x": kinds.batch(1)["x"]}, ["output"])
    torch.testing.assert_close(found, model(kinds.batch(1)["x"]).detach())
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
