# SPDX-License-Identifier: Apache-2.0
"""Programs train models of all kinds as eager code does; unsupported code is refused."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.errors import refuses
from tests.static import kinds
from tests.static.kinds import KINDS, batch, captured, loss_of
from torch import Tensor, nn

from fleetlight import static
from fleetlight.errors import PlanError
from fleetlight.static.writing.calls import owner_of

pytestmark = pytest.mark.slow

MORE: dict[str, Callable[[], nn.Module]] = {"buffers": kinds.ReplacesBuffers, "draws": kinds.Draws}


@pytest.mark.parametrize("name", [*KINDS, *MORE])
def test_programs_equal_eager_training_at_any_batch_size(name: str) -> None:
    kind = {**KINDS, **MORE}[name]
    ours, theirs = kinds.of(kind), kinds.of(kind)
    optimizer = torch.optim.SGD(theirs.parameters(), lr=0.1, momentum=0.9)
    program, executor = captured(ours), static.Executor()
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict(), rtol=0, atol=0)
    for number in range(3):
        given = batch(number)
        torch.manual_seed(number)
        optimizer.zero_grad()
        expected = loss_of(theirs(given["x"]), given["y"])
        expected.backward()
        optimizer.step()
        torch.manual_seed(number)
        (found,) = executor.run(program, given, ["loss"])
        torch.testing.assert_close(found, expected.detach(), rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict(), rtol=1e-9, atol=1e-11)


def test_each_of_several_outputs_has_a_name() -> None:
    given = batch(0)
    for kind, names in ((tuple, ["output_0", "output_1"]), (dict, ["scores", "double"])):
        one, other = static.Executor().run(captured(kinds.Several(kind).double()), given, names)
        torch.testing.assert_close(other, 2 * one)


def test_several_models_form_one_program() -> None:
    x, y = static.data("x", [None, 4]), static.data("y", [None], "int64")
    one, other = nn.Linear(4, 5), nn.Linear(5, 3)
    loss = F.cross_entropy(other(one(x).tanh()), y)
    parameters = [*one.parameters(), *other.parameters()]
    static.minimize(torch.optim.SGD(parameters, lr=0.1), loss)
    executor = static.Executor()
    executor.run(static.default_startup_program())
    before = [p.clone() for p in parameters]
    executor.run(feed={"x": torch.ones(2, 4), "y": [0, 1]})
    assert not any(torch.equal(p, b) for p, b in zip(parameters, before, strict=True))


def test_capturing_leaves_the_generator_unchanged() -> None:
    """Recomputed dropouts use torch's generator as a clock during recording."""
    model = kinds.of(kinds.recomputed)
    batch(0)
    before = torch.get_rng_state()
    static.capture(model, loss_of, torch.optim.SGD(model.parameters(), lr=0.1), batch(0))
    batch(0)
    assert torch.equal(torch.get_rng_state(), torch.get_rng_state())
    assert torch.equal(torch.get_rng_state(), before)


VALUES: list[Callable[[Tensor], Any]] = [
    lambda x: x.sum().item(),
    lambda x: float(x.sum()),
    lambda x: int(x.sum()),
    lambda x: 1 if x.sum() > 0 else 0,
    lambda x: f"{x.sum():.3f}",
    lambda x: "%.3f" % x.sum(),  # noqa: UP031
    lambda x: x.numpy(),
    lambda x: np.sin(x),
    lambda x: x.tolist(),
]


@pytest.mark.sampled(9)
@pytest.mark.parametrize("reads", VALUES)
def test_reading_values_is_refused(reads: Callable[[Tensor], Any]) -> None:
    with refuses(PlanError, "reads the values of its tensors", "torch.where instead of an `if`"):
        reads(static.data("x", [None, 4]))


def test_a_variable_prints_its_name_and_type() -> None:
    x = static.data("x", [None, 4])
    assert f"{x}" == str(x) == repr(x)
    assert str(x).startswith("Variable x: float32[")


OTHERS: list[tuple[Callable[[Tensor], Any], str]] = [
    (lambda x: x.sum().backward(), r"^backward\(\) of a variable .* minimize\(optimizer, loss\)"),
    (copy.deepcopy, "^a variable cannot be copied or pickled, since .*save the program"),
    (pickle.dumps, "^a variable cannot be copied or pickled"),
    (nn.LazyLinear(3), "^weight has no shape yet; call the model once with a batch"),
    (
        lambda x: (nn.Linear(4, 4).weight * 2) @ x.t(),
        "computed from parameters outside the program",
    ),
    (lambda x: x.t_().resize_(3), "a program cannot call resize_ on a tensor"),
]


@pytest.mark.sampled(6)
@pytest.mark.parametrize(("operation", "words"), OTHERS)
def test_unsupported_operations_are_refused(operation: Callable[[Tensor], Any], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        operation(static.data("x", [None, 4]))


def test_changing_a_constant_in_place_is_refused() -> None:
    class Adds(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            total = torch.zeros(4)
            total += x.sum(0)
            return total

    with refuses(PlanError, "add_: a tensor of shape [4]", "changes in place", "x.new_zeros"):
        Adds()(static.data("x", [None, 4]))


def test_variables_belong_to_their_program() -> None:
    one, other = static.Program(), static.Program()
    with static.program_guard(one):
        x = static.data("x", [None, 4])
    with static.program_guard(other):
        z = static.data("z", [None, 4])
    with pytest.raises(PlanError, match=r"^Variable x: .* belongs to another program$"):
        z + x
    # its own program remains writable
    y = x * 2
    executor = static.Executor()
    assert one.startup is not None
    executor.run(one.startup)
    assert executor.run(one, {"x": torch.ones(2, 4)}, [y])[0].sum() == 16


def test_replacing_a_buffer_by_another_shape_is_refused() -> None:
    class Grows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(1))

        def forward(self, x: Tensor) -> Tensor:
            self.seen = x.sum(0)
            return x

    with refuses(PlanError, "the forward has replaced seen; expected a tensor of shape [1]"):
        Grows()(static.data("x", [None, 4]))


def test_in_place_views_keep_dynamic_sizes() -> None:
    """A size is read from the tensor as it is at that time, here after t_()."""
    turned = (static.data("x", [None, 4]) * 1).t_()
    out = turned.new_ones(turned.shape) * turned
    executor = static.Executor()
    executor.run(static.default_startup_program())
    for size in (2, 5):
        assert executor.run(feed={"x": torch.ones(size, 4)}, fetch_list=[out])[0].shape == (4, size)
    # the program contains no in-place view, so no pass must handle one
    nodes = static.default_main_program().form.graph.nodes
    assert not [n for n in nodes if torch.Tag.inplace_view in getattr(n.target, "tags", ())]


def test_sparse_gradients_are_refused_with_advice() -> None:
    ids = static.data("ids", [None, 3], "int64")
    model = nn.Embedding(9, 2, sparse=True)
    with pytest.raises(PlanError, match=r"Embedding\(sparse=True\).*sparse=False.*servers"):
        static.minimize(torch.optim.SGD(model.parameters(), lr=1), model(ids).sum())
    weight = nn.Parameter(torch.ones(9, 2))
    with refuses(PlanError, "a program cannot have", ", since it has dense tensors only"):
        static.minimize(
            torch.optim.SGD([weight], lr=1), F.embedding(ids, weight, sparse=True).sum()
        )


def test_a_feed_is_fetched_by_its_own_name() -> None:
    # both names become a_b in Python
    one, other = static.data("a b", [None, 2]), static.data("a_b", [None, 2])
    feed = {"a b": torch.ones(1, 2), "a_b": torch.zeros(1, 2)}
    assert [one.name, other.name] == list(feed)  # type: ignore[attr-defined]
    executor = static.Executor()
    for wanted in ([one, other], list(feed)):
        found = executor.run(feed=feed, fetch_list=wanted)
        assert [value.sum().item() for value in found] == [2, 0]


def test_dynamic_sizes_are_printed_without_torch_symbols(caplog: pytest.LogCaptureFixture) -> None:
    x = static.data("x", [None, 4])
    assert repr(x.repeat(2, 1)) == "Variable repeat: float32[?, 4]"
    with pytest.raises(RuntimeError, match=r"but got \[any, 4\] X \[5, 3\]"):
        nn.Linear(5, 3)(x)
    with pytest.raises(RuntimeError, match=r"tensor a \(any\) must match .* tensor b \(any\)"):
        x + x.repeat(2, 1)
    # only the error, without the log lines of torch
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


# -- the names in a program come from the module that owns its called modules ---------------------


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
