# SPDX-License-Identifier: Apache-2.0
"""Code is generated once per purpose, matches the current form, and is freed with the form."""

import dataclasses
import gc
import logging
import os
import subprocess
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.static.nets import batch, captured, net
from torch import Tensor, fx, nn

from fleetlight import static
from fleetlight.errors import ConfigError
from fleetlight.static.coding import inductor
from fleetlight.static.coding.cleanup import clean
from fleetlight.static.coding.coder import Coder, shapes_of
from fleetlight.static.graph.form import Form, drop_unused, graph_of
from fleetlight.static.graph.state import Slot
from fleetlight.static.ops.reductions import reducing
from fleetlight.static.passes import FuseAllReduce, InsertAllReduce, Overlap
from fleetlight.static.running.runners import EVERYTHING

pytestmark = pytest.mark.slow


class CopyForm:
    """A pass that replaces the form by an equal copy."""

    name = "rewritten"

    def __call__(self, form: Form) -> Form:
        return dataclasses.replace(form)


def program() -> static.Program:
    model = net()
    return captured(model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_code_is_generated_once_per_purpose() -> None:
    coder, one = Coder(), program()
    purposes = [(("loss",), EVERYTHING), ((), EVERYTHING), (("loss",), ("forward",))]
    codes = [coder(one, *purpose) for purpose in purposes]
    assert len({id(code) for code in codes}) == 3
    assert all(coder(one, *purpose) is code for purpose, code in zip(purposes, codes, strict=True))


def test_a_rewritten_form_gets_new_code_and_frees_the_old() -> None:
    coder, one = Coder(), program()
    before = coder(one, ["loss"], EVERYTHING)
    form, code = weakref.ref(one.form), weakref.ref(before)
    del before
    one.passes = (CopyForm(),)
    coder(one, ["loss"], EVERYTHING)
    gc.collect()
    assert form() is None
    assert code() is None


def test_the_coder_keeps_no_program_alive() -> None:
    coder, one = Coder(), program()
    coder(one, ["loss"], EVERYTHING)
    known = weakref.ref(one)
    del one
    gc.collect()
    assert known() is None


@pytest.mark.sampled(4)
@pytest.mark.parametrize("value", [True, None, "inducter", 1])
def test_other_back_ends_are_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"compile=.*: expected 'fx' or 'inductor'"):
        static.Executor(compile=value)


def test_pulled_rows_have_a_dynamic_size_and_other_state_has_not() -> None:
    form = program().form
    rows = Slot("pulled", "rows of table", torch.zeros(0, 8))
    shapes = shapes_of(dataclasses.replace(form, state=(*form.state, rows)))
    assert set(shapes[: len(form.state)]) == {None}
    assert shapes[len(form.state) :] == [(None, None), (None, 8), (None,)]


# -- cleaning a graph changes no result and keeps every effect ------------------------------------

aten: Any = torch.ops.aten


def cleaned(graph: fx.Graph) -> fx.Graph:
    clean(graph)
    drop_unused(graph)
    graph.lint()
    return graph


def names(graph: fx.Graph) -> list[str]:
    """The operations, in order."""
    return [
        node.target.overloadpacket.__name__  # type: ignore[union-attr]
        for node in graph.nodes
        if isinstance(node.target, torch._ops.OpOverload)
    ]


def run(graph: fx.Graph, *inputs: Tensor) -> Any:
    return fx.Interpreter(fx.GraphModule({}, graph)).run(*inputs)


def test_cleaning_a_training_step_removes_only_redundant_nodes() -> None:
    model = net()
    program = captured(model, torch.optim.SGD(model.parameters(), lr=0.1))
    wanted = ["loss", "output", *(n.name for n in program.form.graph.nodes if "mm" in n.name)]
    full = fx.GraphModule({}, graph_of(program.form, wanted, ("forward", "backward")))
    less = cleaned(graph_of(program.form, wanted, ("forward", "backward")))
    assert not {"detach", "alias"} & set(names(less))
    assert len(less.nodes) < len(full.graph.nodes)
    inputs = [*(slot.tensor.detach() for slot in program.state), *batch(0).values()]
    with torch.no_grad():
        torch.manual_seed(0)
        expected = full(*(tensor.clone() for tensor in inputs))
        torch.manual_seed(0)
        found = run(less, *(tensor.clone() for tensor in inputs))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_every_fetch_is_kept() -> None:
    model = net()
    program = captured(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for node in program.form.graph.nodes:
        if isinstance(node.meta.get("val"), Tensor):
            graph = cleaned(graph_of(program.form, [node.name], EVERYTHING))
            assert len(graph.output_node().args[0]) == 1  # type: ignore[arg-type]


def chain(*steps: tuple[Any, ...], shape: tuple[int, ...] = (3, 4)) -> fx.Graph:
    """Each step takes the value of the step before; the graph returns the last."""
    graph = fx.Graph()
    node = graph.placeholder("x")
    value = torch.zeros(shape)
    for operation, *args in steps:
        node, value = graph.call_function(operation, (node, *args)), operation(value, *args)
        node.meta["val"] = value
    graph.output(node)
    return graph


SAME: list[tuple[list[tuple[Any, ...]], list[str]]] = [
    ([(aten.t.default,), (aten.t.default,)], []),
    ([(aten.t.default,)] * 3, ["t"]),
    ([(aten.neg.default,), (aten.detach.default,), (aten.alias.default,)], ["neg"]),
    ([(aten.neg.default,), (aten.view.default, [3, 4])], ["neg"]),
    ([(aten.neg.default,), (aten.view.default, [4, 3])], ["neg", "view"]),
    ([(aten.sum.dim_IntList, [0], True), (aten.view.default, [4])], ["sum"]),
    ([(aten.sum.dim_IntList, [-1], True), (aten.view.default, [3])], ["sum"]),
    ([(aten.sum.dim_IntList, [0], True), (aten.view.default, [2, 2])], ["sum", "view"]),
    ([(aten.sum.dim_IntList, [0]), (aten.view.default, [4, 1])], ["sum", "view"]),
]


def test_short_chains_are_simplified() -> None:
    x = torch.rand(3, 4)
    for steps, left in SAME:
        expected = x
        for operation, *args in steps:
            expected = operation(expected, *args)
        graph = cleaned(chain(*steps))
        assert names(graph) == left, steps
        torch.testing.assert_close(run(graph, x), expected, rtol=0, atol=0)


def test_a_sum_with_other_users_keeps_its_dimensions() -> None:
    graph = fx.Graph()
    total = graph.call_function(aten.sum.dim_IntList, (graph.placeholder("x"), [0], True))
    total.meta["val"] = torch.zeros(1, 4)
    flat = graph.call_function(aten.view.default, (total, [4]))
    flat.meta["val"] = torch.zeros(4)
    graph.output([total, flat])
    assert [tuple(value.shape) for value in run(cleaned(graph), torch.rand(3, 4))] == [(1, 4), (4,)]


def test_views_of_a_changed_tensor_see_the_change() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    before = graph.call_function(aten.t.default, (x,))
    graph.call_function(aten.add_.Tensor, (x, 1))
    after = graph.call_function(aten.t.default, (x,))
    graph.output([before, after])
    assert names(cleaned(graph)) == ["t", "add_"]
    assert [value.tolist() for value in run(graph, torch.zeros(2, 3))] == [[[1.0, 1.0]] * 3] * 2


# -- compiled programs equal generated Python, which runs wherever compilation fails --------------

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def warnings_only(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Collects the warnings of Fleetlight; compilers log much at lower levels."""
    with caplog.at_level(logging.WARNING):
        yield


def both(
    kind: Any, options: dict[str, Any], executor: static.Executor, runs: int = 6
) -> tuple[nn.Module, nn.Module]:
    """Trains once by generated Python and once by the executor; returns both models."""
    models = []
    for runner in (static.Executor(), executor):
        model = net()
        optimizer = kind(model.parameters(), **options)
        program = captured(model, optimizer)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)
        for number in range(runs):
            torch.manual_seed(number)
            runner.run(program, batch(number), ["loss"])
            schedule.step()
        models.append(model)
    return models[0], models[1]


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The messages of Fleetlight; some builds of torch also warn about CUDA."""
    return [one.getMessage() for one in caplog.records if one.name.startswith("fleetlight")]


@pytest.mark.long
@pytest.mark.contract
@pytest.mark.timeout(400)  # the first compilation with a torch also compiles its headers
@pytest.mark.parametrize(
    ("kind", "options"),
    [(torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}), (torch.optim.Adadelta, {"lr": 1.0})],
)
def test_a_program_compiles_once_and_computes_the_same(
    kind: Any,
    options: dict[str, Any],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With equal dropout, for batches of all sizes and learning rates."""
    if not inductor.has_compiler():
        pytest.skip("there is no C++ compiler")
    compiled, version = [], inductor._version
    monkeypatch.setattr(inductor, "_version", lambda *a: compiled.append(a) or version(*a))
    ours, theirs = both(kind, options, static.Executor(compile="inductor"))
    torch.testing.assert_close(theirs.state_dict(), ours.state_dict(), rtol=1e-9, atol=1e-12)
    assert len(compiled) == 1
    assert not messages(caplog)


@pytest.mark.long
@pytest.mark.contract
@pytest.mark.timeout(400)
def test_a_program_without_training_takes_batches_of_all_sizes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    if not inductor.has_compiler():
        pytest.skip("there is no C++ compiler")
    program = static.Program()
    with static.program_guard(program, static.Program()):
        doubled = static.data("x", [None, 3]) * 2
    executor = static.Executor(compile="inductor")
    for rows in (4, 7):
        [out] = executor.run(program, {"x": torch.ones(rows, 3)}, [doubled])
        assert out.tolist() == [[2.0] * 3] * rows
    assert not messages(caplog)


@pytest.mark.long
def test_dropout_differs_in_each_run() -> None:
    model = nn.Sequential(nn.Linear(8, 64), nn.Dropout(0.5)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    program = static.capture(model, lambda out, y: out.sum() + y.sum(), optimizer, batch(0))
    executor = static.Executor(compile="inductor")
    given = batch(0)
    outputs = [executor.run(program, given, ["output"])[0] for _ in range(3)]
    dropped = [float((output == 0).double().mean()) for output in outputs]
    assert all(0.4 < share < 0.6 for share in dropped)
    assert not torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[1], outputs[2])


@pytest.mark.long
def test_batches_that_fail_a_guard_are_compiled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a few versions, further sizes run as generated Python."""
    fitting = []

    def exactly(self: Any) -> Any:
        size = self._inputs[-1].shape[0]
        fitting.append(size)
        return lambda inputs: inputs[-1].shape[0] == size

    monkeypatch.setattr("fleetlight.static.coding.inductor.Examples.fit", exactly)
    monkeypatch.setattr(inductor, "_VERSIONS", 2)
    ours, theirs = both(torch.optim.SGD, {"lr": 0.1}, static.Executor(compile="inductor"))
    torch.testing.assert_close(theirs.state_dict(), ours.state_dict(), rtol=1e-9, atol=1e-12)
    assert fitting == [16, 7]


class Doubling:
    """Reductions of a worker whose only peer has the same gradients, with weight 3 of 4."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def begin(self, index: int, bucket: Tensor, inner: int | None) -> None:
        self.seen.append(f"begin {index}")

    def end(self, index: int, bucket: Tensor) -> None:
        self.seen.append(f"end {index}")
        bucket.mul_(3.0)


@pytest.mark.long
def test_reductions_are_called_in_order() -> None:
    found = []
    for compile in ("fx", "inductor"):
        model, doubling = net(), Doubling()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        passes = InsertAllReduce(), FuseAllReduce(), Overlap()
        program = captured(model, optimizer).apply(*passes)
        with reducing(doubling):
            executor = static.Executor(compile=compile)
            for number in range(3):
                torch.manual_seed(number)
                executor.run(program, batch(number), ["loss"])
        found.append((model.state_dict(), doubling.seen))
    torch.testing.assert_close(found[1][0], found[0][0], rtol=1e-9, atol=1e-12)
    assert found[1][1] == found[0][1]
    assert found[1][1][:1] == ["begin 0"]


def test_segments_that_fail_to_compile_run_as_python(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def failing(*args: Any) -> Any:
        raise RuntimeError("no such operation\nand much more")

    monkeypatch.setattr(torch._inductor, "compile", failing)
    ours, theirs = both(torch.optim.SGD, {"lr": 0.1}, static.Executor(compile="inductor"), 2)
    torch.testing.assert_close(theirs.state_dict(), ours.state_dict(), rtol=1e-9, atol=1e-12)
    # the segments before and after the dropout
    assert [record.getMessage().partition(" of a ")[2] for record in caplog.records] == [
        "program, which run as generated Python instead: RuntimeError: no such operation"
    ] * 2


WITHOUT = """
import logging, torch
logging.basicConfig(level=logging.WARNING)
from fleetlight import static
model = torch.nn.Linear(2, 1)
inputs = {"x": torch.ones(3, 2), "y": torch.zeros(3, 1)}
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
program = static.capture(model, torch.nn.functional.mse_loss, optimizer, inputs)
for _ in range(2):
    executor = static.Executor(compile="inductor")
    print("loss", float(executor.run(program, inputs, ["loss"])[0]))
"""


@pytest.mark.long
def test_a_missing_compiler_is_warned_about_once() -> None:
    environment = {**os.environ, "CXX": "no-such-compiler", "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT], env=environment, capture_output=True, text=True, timeout=90
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("loss") == 2
    assert done.stderr.count("needs a C++ compiler at run time, and there is none") == 1
    assert "no-such-compiler" in done.stderr
