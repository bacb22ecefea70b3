# SPDX-License-Identifier: Apache-2.0
"""A graph as a Python function: arguments pass unchanged, values are freed after their last use."""

import linecache
import math
import operator
import traceback
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from fleetlight.errors import PlanError
from fleetlight.static.coding.buckets import keep_buckets
from fleetlight.static.coding.callables import _FUNCTIONS, _METHODS, callable_of
from fleetlight.static.coding.inductor import Examples, GraphSegment, segments, stays
from fleetlight.static.coding.python import function_of
from fleetlight.static.ops.marks import LAID_OUT
from fleetlight.static.ops.reductions import REDUCE, REDUCED, reducing


def taken(*values: Any, **named: Any) -> Any:
    return values, named


ODD: list[Any] = [
    *(1, -2.5, math.inf, -math.inf, True, None, "a'b", [1, [2.0]], (3,), (), []),
    *(slice(1, None, 2), torch.float16, torch.device("cpu"), torch.channels_last, range(3)),
]


@pytest.mark.parametrize("value", ODD, ids=repr)
def test_every_argument_passes_unchanged(value: Any) -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    # graphs hold lists and dicts of their own kinds
    graph.output(graph.call_function(taken, (x, [value, x]), {"named": value}))
    (first, (second, again)), named = function_of(graph)("given")
    assert (first, again, second, named) == ("given", "given", value, {"named": value})
    assert type(second) is type(value)


def test_generated_names_avoid_taken_names() -> None:
    graph = fx.Graph()
    inputs = [graph.placeholder(name) for name in ("run", "aten_add_Tensor", "slice", "taken")]
    total = graph.call_function(torch.ops.aten.add.Tensor, (inputs[1], inputs[1]))
    piece = graph.call_function(operator.getitem, (total, slice(0, 1)))
    graph.output(graph.call_function(taken, (*inputs, piece)))
    values = [torch.tensor([float(i), 5.0]) for i in range(4)]
    (*given, found), _ = function_of(graph)(*values)
    assert all(one is other for one, other in zip(given, values, strict=True))
    assert found.tolist() == [2.0]


def test_a_value_is_freed_after_its_last_use() -> None:
    alive: list[weakref.ref[Tensor]] = []

    def add_one(x: Tensor) -> Tensor:
        out = x + 1
        alive.append(weakref.ref(out))
        return out

    def count_alive(x: Tensor) -> int:
        return sum(one() is not None for one in alive)

    graph = fx.Graph()
    value = graph.placeholder("x")
    for _ in range(5):
        value = graph.call_function(add_one, (value,))
    graph.output([graph.call_function(count_alive, (value,))])
    # the argument under count still has a name
    assert function_of(graph)(torch.zeros(2)) == [1]


def test_a_call_without_users_still_runs() -> None:
    graph = fx.Graph()
    graph.call_function(torch.ops.aten.add_.Tensor, (graph.placeholder("x"), 1))
    graph.output([])
    x_value = torch.zeros(2)
    assert function_of(graph)(x_value) == []
    assert x_value.tolist() == [1.0, 1.0]


def test_a_traceback_shows_generated_lines_until_the_function_is_freed() -> None:
    graph = fx.Graph()
    graph.output(graph.call_function(torch.ops.aten.mm.default, (graph.placeholder("x"),) * 2))
    function = function_of(graph)
    with pytest.raises(RuntimeError) as caught:
        function(torch.zeros(2, 3))
    assert "= aten_mm(x, x)" in "".join(traceback.format_exception(caught.value))
    file = function.__code__.co_filename
    assert file in linecache.cache
    del function, caught
    assert file not in linecache.cache


def test_modules_are_not_called() -> None:
    graph = fx.Graph()
    graph.output(graph.call_module("layer", (graph.placeholder("x"),)))
    with pytest.raises(PlanError, match="no code for call_module 'layer'"):
        function_of(graph)


# -- buckets reuse their memory in each run, except those that a caller fetches -------------------

aten: Any = torch.ops.aten


class BucketRecorder:
    """Records the address and the content of each bucket."""

    def __init__(self) -> None:
        self.found: list[tuple[int, list[float]]] = []

    def begin(self, index: int, bucket: Tensor, inner: int | None) -> None:
        self.found.append((bucket.data_ptr(), bucket.tolist()))

    def end(self, index: int, bucket: Tensor) -> None:
        """The bucket keeps its values."""


def bucket_of(graph: fx.Graph) -> fx.Node:
    rows = [graph.placeholder("x"), graph.placeholder("y")]
    bucket = graph.call_function(aten.cat.default, (rows,))
    graph.call_function(REDUCE, (bucket, 0))
    return bucket


def ran(graph: fx.Graph) -> tuple[BucketRecorder, list[Any]]:
    """Runs the graph twice and keeps all results alive."""
    keep_buckets(graph)
    function, recorder, results = function_of(graph), BucketRecorder(), []
    with reducing(recorder):
        for value in (1.0, 2.0):
            results.append(function(torch.full([2], value), torch.full([1], -value)))
    return recorder, results


def test_bucket_memory_is_reused_and_refilled() -> None:
    graph = fx.Graph()
    pieces = graph.call_function(aten.split_with_sizes.default, (bucket_of(graph), [2, 1]))
    piece = graph.call_function(operator.getitem, (pieces, 1))
    graph.output([graph.call_function(aten.neg.default, (piece,))])
    recorder, results = ran(graph)
    (first, before), (second, after) = recorder.found
    assert first == second
    assert (before, after) == ([1.0, 1.0, -1.0], [2.0, 2.0, -2.0])
    assert [result[0].tolist() for result in results] == [[1.0], [2.0]]


def test_a_fetched_bucket_is_not_overwritten() -> None:
    graph = fx.Graph()
    pieces = graph.call_function(aten.split_with_sizes.default, (bucket_of(graph), [2, 1]))
    graph.output([graph.call_function(operator.getitem, (pieces, 1))])
    recorder, results = ran(graph)
    assert recorder.found[0][0] != recorder.found[1][0]
    assert [result[0].tolist() for result in results] == [[-1.0], [-2.0]]


def test_other_concatenations_are_allocated_in_each_run() -> None:
    graph = fx.Graph()
    rows = [graph.placeholder("x"), graph.placeholder("y")]
    graph.output([graph.call_function(aten.cat.default, (rows,))])
    _, results = ran(graph)
    assert [result[0].tolist() for result in results] == [[1.0, 1.0, -1.0], [2.0, 2.0, -2.0]]


# -- the fast callable of an operation returns what the operation returns -------------------------

X, Y = torch.rand(3, 3, generator=torch.Generator().manual_seed(0)) + 0.1, torch.eye(3) + 0.5
BATCH, IMAGE = torch.rand(2, 3, 3), torch.rand(2, 3, 4, 4)
RATE = torch.tensor(0.1, dtype=torch.float64)
ONE = torch.ones(())
WITH_DECAY = {"weight_decay": 0.1, "maximize": False}
ADAM = {"lr": RATE, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "amsgrad": False, **WITH_DECAY}
SGD = {"lr": RATE, "momentum": 0.9, "dampening": 0.0, "nesterov": True, "is_first_step": False}

CALLS: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = [
    *((op, (X,), {}) for op in (aten.abs.default, aten.neg.default, aten.exp.default)),
    *((op, (X,), {}) for op in (aten.log.default, aten.sqrt.default, aten.rsqrt.default)),
    *((op, (X,), {}) for op in (aten.relu.default, aten.relu_.default, aten.tanh.default)),
    *((op, (X,), {}) for op in (aten.sigmoid.default, aten.t.default, aten.detach.default)),
    *((op, (X,), {}) for op in (aten.argmax.default, aten.mean.default, aten.sum.default)),
    *((op, (X, Y), {}) for op in (aten.mul.Tensor, aten.div.Tensor, aten.pow.Tensor_Tensor)),
    *((op, (X, Y), {}) for op in (aten.mm.default, aten.mul_.Tensor, aten.copy_.default)),
    *((op, (X, Y), {}) for op in (aten.eq.Tensor, aten.ne.Tensor, aten.gt.Tensor, aten.ge.Tensor)),
    *((op, (X, 0.5), {}) for op in (aten.lt.Scalar, aten.le.Scalar, aten.div_.Scalar)),
    *((op, (X, Y), {"alpha": 2}) for op in (aten.add.Tensor, aten.sub.Tensor, aten.add_.Tensor)),
    (aten.bmm.default, (BATCH, BATCH), {}),
    (aten.div.Tensor_mode, (X, 0.2), {"rounding_mode": "floor"}),
    (aten.pow.Tensor_Scalar, (X, 2), {}),
    (aten.pow.Scalar, (0.9, X), {}),
    (aten.addmm.default, (X[0], X, Y), {"beta": 0.5}),
    (aten.baddbmm.default, (BATCH, BATCH, BATCH), {"alpha": 0.5}),
    (aten.sum.dim_IntList, (X, [0], True), {"dtype": torch.float64}),
    (aten.mean.dim, (X, [-1]), {}),
    (aten.amax.default, (X, [1], True), {}),
    (aten.argmax.default, (X, 1, True), {}),
    (aten.cumsum.default, (X, 0), {}),
    (aten._softmax.default, (X, 1, False), {}),
    (aten._softmax_backward_data.default, (X, Y, 1, torch.float32), {}),
    (aten._log_softmax.default, (X, 1, False), {}),
    (aten._log_softmax_backward_data.default, (X, Y, 1, torch.float32), {}),
    (aten.cat.default, ([X, Y], 1), {}),
    (aten.stack.default, ([X, Y], -1), {}),
    (aten.split_with_sizes.default, (X, [1, 2], 1), {}),
    (aten.clone.default, (X.t(),), {"memory_format": torch.contiguous_format}),
    (aten.as_strided.default, (X, [2, 2], [1, 3], 1), {}),
    (aten.transpose.int, (BATCH, 0, -1), {}),
    (aten.permute.default, (BATCH, [2, 0, 1]), {}),
    (aten.squeeze.dim, (BATCH[:, :1], 1), {}),
    (aten.unsqueeze.default, (X, -1), {}),
    (aten.select.int, (X, 0, 1), {}),
    (aten.index_select.default, (X, 0, torch.tensor([2, 0])), {}),
    (aten.expand.default, (X[:1], [4, -1]), {}),
    (aten.view.default, (X, [9]), {}),
    (aten.view.dtype, (X, torch.int32), {}),
    (aten.where.self, (X > 0.5, X, Y), {}),
    (aten.embedding.default, (X, torch.tensor([[0, 2]]), -1, False, False), {}),
    (aten.zeros_like.default, (X,), {"dtype": torch.int8, "pin_memory": False}),
    (aten.ones_like.default, (X.t(),), {"memory_format": torch.preserve_format}),
    (aten.native_dropout.default, (X, 0.5, True), {}),
    (aten.native_layer_norm.default, (X, [3], X[0], X[1], 1e-5), {}),
    (aten.native_batch_norm.default, (X, X[0], X[1], X[0], X[1], True, 0.1, 1e-5), {}),
    (
        aten.convolution.default,
        (IMAGE, torch.rand(2, 3, 2, 2), None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1),
        {},
    ),
    (aten._foreach_add_.Scalar, ([X, Y], 1), {}),
    (aten._foreach_mul.Tensor, ([X, Y], ONE), {}),
    (aten._foreach_addcdiv_.Scalar, ([X], [Y], [Y], 0.5), {}),
    (aten._fused_sgd_.tensor_lr, ([X], [Y], [Y]), {**SGD, **WITH_DECAY}),
    (aten._fused_adam_.tensor_lr, ([X], [Y], [Y], [Y], [], [ONE]), ADAM),
    (aten._fused_adamw_.tensor_lr, ([X], [Y], [Y], [Y], [], [ONE]), ADAM),
    (
        aten._fused_adagrad_.tensor_lr,
        ([X], [Y], [Y], [ONE]),
        {"lr": RATE, "lr_decay": 0.1, "eps": 1e-8, **WITH_DECAY},
    ),
    # values are undefined; only shape and type are compared
    (aten.empty_like.default, (torch.zeros(0, 3),), {"dtype": torch.float64}),
]


def fresh(value: Any) -> Any:
    return torch.utils._pytree.tree_map(
        lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, value
    )


#: all pytest workers must collect the same names, so values are not part of them
NAMES = [f"{operation}-{place}" for place, (operation, *_) in enumerate(CALLS)]


@pytest.mark.parametrize(("operation", "args", "kwargs"), CALLS, ids=NAMES)
def test_fast_callables_equal_their_operation(operation: Any, args: Any, kwargs: Any) -> None:
    ours, theirs = fresh((args, kwargs)), fresh((args, kwargs))
    torch.manual_seed(0)
    found = callable_of(operation)(*ours[0], **ours[1])
    torch.manual_seed(0)
    expected = operation(*theirs[0], **theirs[1])
    # some callables return the changed tensor where the operation returns None
    both = [(ours, theirs)] if expected is None else [(ours, theirs), (found, expected)]
    for one, other in both:
        leaves, others = (torch.utils._pytree.tree_leaves(value) for value in (one, other))
        assert len(leaves) == len(others)
        for leaf, twin in zip(leaves, others, strict=True):
            if isinstance(leaf, Tensor):
                torch.testing.assert_close(leaf, twin, rtol=0, atol=0, check_stride=True)


def test_every_fast_callable_is_compared() -> None:
    assert {operation.overloadpacket.__name__ for operation, *_ in CALLS} >= _FUNCTIONS | _METHODS


# -- which nodes are compiled together, and which remain calls ------------------------------------


def step() -> fx.Graph:
    """Two gradients reduced together, and a fused optimizer step."""
    graph = fx.Graph()
    x, parameter, rate = (graph.placeholder(name) for name in ("x", "parameter", "rate"))
    first = graph.call_function(aten.mul.Tensor, (x, parameter))
    pair = graph.call_function(aten.max.dim, (first, 0))
    flat = graph.call_function(aten.view.default, (first, [-1]))
    second = graph.call_function(aten.exp.default, (first,))
    largest = graph.call_function(operator.getitem, (pair, 0))
    rows = [flat, graph.call_function(aten.view.default, (second, [-1]))]
    bucket = graph.call_function(aten.cat.default, (rows,))
    graph.call_function(REDUCE, (bucket, 0))
    graph.call_function(REDUCED, (bucket, 0))
    half = graph.call_function(aten.mul.Tensor, (second, 0.5))
    laid = graph.call_function(LAID_OUT, (half, parameter))
    more = graph.call_function(aten.add.Tensor, (half, largest))
    options = {"lr": rate, "weight_decay": 0.0, "momentum": 0.0, "dampening": 0.0}
    options |= {"nesterov": False, "maximize": False, "is_first_step": False}
    graph.call_function(aten._fused_sgd_.tensor_lr, ([parameter], [laid], []), options)
    graph.output([more, bucket])
    return graph


def names(segment: GraphSegment) -> list[str]:
    return [node.name for node in segment.nodes]


def test_segments_end_at_calls_that_are_not_compiled() -> None:
    graph = step()
    first, second = segments(graph)
    graph.lint()
    assert names(first) == ["mul_tensor", "max_dim", "getitem", "exp_default"]
    assert names(second) == ["mul_tensor_1", "add_tensor"]
    staying = {node.name for node in graph.nodes if node.op == "call_function" and stays(node)}
    assert staying >= {"cat_default", "reduce_default", "reduced_default", "laid_out_default"}
    assert any("fused_sgd" in name for name in staying)


def test_segments_know_their_inputs_and_outputs() -> None:
    first, second = segments(step())
    assert [node.name for node in first.inputs] == ["x", "parameter"]
    assert [node.name for node in first.outputs] == ["mul_tensor", "getitem", "exp_default"]
    assert [node.name for node in second.inputs] == ["exp_default", "getitem"]
    own = second.graph()
    own.lint()
    assert [node.op for node in own.nodes].count("placeholder") == 2


def test_views_used_only_outside_move_after_the_segment() -> None:
    graph = step()
    first, _ = segments(graph)
    order = [node.name for node in graph.nodes]
    last = order.index(first.nodes[-1].name)
    assert order[last + 1 : last + 4] == ["view_default", "view_default_1", "cat_default"]


def test_a_lone_operation_is_not_compiled() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output(
        graph.call_function(aten.exp.default, (graph.call_function(aten.t.default, (x,)),))
    )
    assert list(segments(graph)) == []


# -- examples know which sizes are dynamic, and what the compiler assumed about them --------------


def doubled() -> tuple[fx.Graph, fx.Node, fx.Node]:
    """A weight and a batch; the batch is concatenated with itself."""
    graph = fx.Graph()
    weight, x = graph.placeholder("weight"), graph.placeholder("x")
    rows = graph.call_function(aten.mm.default, (x, weight))
    both = graph.call_function(aten.cat.default, ([rows, rows],))
    graph.output([both])
    return graph, rows, both


def inputs(size: int) -> list[Tensor]:
    return [torch.zeros(3, 4), torch.zeros(size, 3)]


def examples_for(size: int) -> tuple[Examples, fx.Node]:
    graph, _, both = doubled()
    return Examples(graph, inputs(size), [None, (None, 3)]), both


@pytest.mark.slow
def test_only_dynamic_sizes_are_symbolic() -> None:
    examples, both = examples_for(5)
    rows, columns = examples.of(both).shape
    assert isinstance(rows, torch.SymInt)
    assert columns == 4


def test_other_sizes_fit_without_assumptions() -> None:
    examples, _ = examples_for(5)
    assert all(examples.fit()(inputs(size)) for size in (2, 5, 64))


def test_a_guard_on_a_size_must_hold() -> None:
    examples, both = examples_for(5)
    assert examples.of(both).shape[0] <= 20
    fits = examples.fit()
    assert fits(inputs(10))
    assert not fits(inputs(11))


def test_a_specialised_size_fits_alone() -> None:
    examples, both = examples_for(5)
    assert int(examples.of(both).shape[0]) == 10
    fits = examples.fit()
    assert [size for size in range(1, 9) if fits(inputs(size))] == [5]


def test_a_guard_without_python_text_fits_its_size_alone(monkeypatch: Any) -> None:
    printer = "fleetlight.static.coding.inductor.as_python"
    for text in ("no python", "unknown(1)", "False"):
        examples, both = examples_for(5)
        assert examples.of(both).shape[0] <= 20
        with monkeypatch.context() as patch:
            patch.setattr(printer, lambda expr, text=text: text)
            fits = examples.fit()
        assert [size for size in range(1, 9) if fits(inputs(size))] == [5]
