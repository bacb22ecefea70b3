# SPDX-License-Identifier: Apache-2.0
"""Wrappers of torch around a module are detected, during a forward and outside."""

import ctypes
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from fleetlight.torch_compat import c10d, fakes, tracing
from fleetlight.torch_compat.compiler import inductor
from fleetlight.torch_compat.modules import wrappers_in, wrappers_of
from fleetlight.torch_compat.tensors import assign, distinct_elements
from fleetlight.torch_compat.used_graphs import is_older, is_used, nodes_so_far

pytestmark = pytest.mark.contract


@pytest.fixture
def _process_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


class LooksUpWrappers(nn.Module):
    """Looks up its wrappers in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 1)
        self.seen: list[str] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen = list(wrappers_of(self))
        return self.linear(x)


@pytest.mark.usefixtures("_process_group")
def test_a_forward_detects_its_wrapper() -> None:
    model = LooksUpWrappers()
    model(torch.ones(1, 2))
    assert model.seen == []
    wrapped = DistributedDataParallel(model)
    wrapped(torch.ones(1, 2))
    assert model.seen == ["DistributedDataParallel"]
    assert list(wrappers_of(model)) == []
    assert list(wrappers_in(model)) == []
    assert list(wrappers_in(nn.Sequential(wrapped))) == ["DistributedDataParallel"]


def test_wrappers_of_submodules_are_detected() -> None:
    assert list(wrappers_in(nn.Sequential(nn.DataParallel(nn.Linear(2, 1))))) == ["DataParallel"]


@pytest.mark.usefixtures("_process_group")
def test_sharded_parameters_are_detected() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    mesh = init_device_mesh("cpu", (1,))
    sharded: Any = nn.Linear(2, 1)
    fully_shard(sharded, mesh=mesh)
    assert "a sharding into DTensors" in set(wrappers_in(sharded))
    with warnings.catch_warnings():
        # FSDP warns that one process has nothing to shard
        warnings.simplefilter("ignore")
        whole = FullyShardedDataParallel(nn.Linear(2, 1), device_id=torch.device("cpu"))
    assert "FSDP" in set(wrappers_in(whole))


# -- A graph is compiled to C++ if there is a compiler --------------------------------------------


def test_a_missing_compiler_raises_an_expected_error() -> None:
    from torch._inductor import config

    with config.patch({"cpp.cxx": ("/no/such/compiler",)}), pytest.raises((RuntimeError, OSError)):
        inductor.find_cpp_compiler()


@pytest.mark.slow
@pytest.mark.timeout(400)  # the first compilation with a torch also compiles its headers
def test_a_graph_is_compiled() -> None:
    try:
        inductor.find_cpp_compiler()
    except (RuntimeError, OSError) as error:
        pytest.skip(f"no C++ compiler: {error}")
    graph = fx.Graph()
    graph.output((graph.call_function(torch.ops.aten.mul.Tensor, (graph.placeholder("x"), 2)),))
    module = fx.GraphModule(nn.Module(), graph)
    mode = fakes.fakes_of(ShapeEnv(specialize_zero_one=False, duck_shape=False))
    example = fakes.open_fake(mode, torch.ones(4, 3), [True, False])
    with torch.no_grad():
        function = inductor.compiled(module, [example], mode)
    for rows in (4, 7):
        [out] = function(torch.ones(rows, 3))
        assert out.tolist() == [[2.0] * 3] * rows


# -- tensors that torch refuses to write as a whole are written through their distinct elements ---

VIEWS = {
    "whole": torch.zeros(3, 4),
    "scalar": torch.zeros(()),
    "empty": torch.zeros(0),
    "expanded": torch.zeros(4).expand(3, 4),
    "expanded scalar": torch.zeros(()).expand(2, 2),
    "permuted": torch.zeros(3, 4).t(),
    "both": torch.zeros(4).expand(3, 4).t(),
    "overlapping": torch.zeros(6).unfold(0, 3, 1),
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_assign_sets_every_element(view: Tensor) -> None:
    values = torch.full(view.shape, 7.0)
    assign(view, values)
    assert torch.equal(view, values)
    distinct_elements(view).add_(0.0)  # torch accepts this write


def test_each_distinct_element_appears_once() -> None:
    assert distinct_elements(torch.zeros(4).expand(3, 4)).shape == (1, 4)
    whole = torch.zeros(3, 4)
    assert distinct_elements(whole) is whole


# -- the graph of a loss shows whether its backward has run, for every kind of operation ----------

#: torch 2.9 reveals a saved tensor only by unpacking it
HAS_SAVED_DATA = hasattr(torch._C._autograd.SavedTensor, "data")
X, Y = torch.randn(5, 3), torch.zeros(5, dtype=torch.long)
NET = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
COMPUTED: list[int] = []


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 2


class DoubledWithoutState(Doubled):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2


def counted(x: Tensor) -> Tensor:
    COMPUTED.append(1)
    return NET(x)


def checkpointed(reentrant: bool) -> Tensor:
    out = checkpoint(counted, X.clone().requires_grad_(), use_reentrant=reentrant)
    assert isinstance(out, Tensor)
    return out.sum()


def on_cpu() -> Tensor:
    with torch.autograd.graph.save_on_cpu():
        return F.cross_entropy(NET(X), Y)


def narrow() -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return F.cross_entropy(NET(X), Y)


LOSSES: dict[str, Callable[[], Tensor]] = {
    "cross entropy": lambda: F.cross_entropy(NET(X), Y),
    "sum": lambda: NET(X).sum(),
    "list of tensors": lambda: torch.stack([p.norm() for p in NET.parameters()]).norm(),
    "function": lambda: Doubled.apply(NET(X)).sum(),  # type: ignore[no-untyped-call]
    "function without state": lambda: DoubledWithoutState.apply(NET(X)).sum(),  # type: ignore[no-untyped-call]
    "recomputed": lambda: checkpointed(False),
    "recomputed, reentrant": lambda: checkpointed(True),
    "lstm": lambda: nn.LSTM(3, 4)(X[None])[0].sum(),
    "saved elsewhere": on_cpu,
    "autocast": narrow,
}


@pytest.mark.parametrize("loss_of", LOSSES.values(), ids=LOSSES)
def test_a_graph_after_its_backward_is_used(loss_of: Callable[[], Tensor]) -> None:
    loss = loss_of()
    COMPUTED.clear()
    assert not is_used(loss)
    assert not (HAS_SAVED_DATA and COMPUTED)  # checking recomputes nothing
    loss.backward(retain_graph=True)
    assert not is_used(loss)
    loss.backward()
    COMPUTED.clear()
    assert is_used(loss)
    assert not (HAS_SAVED_DATA and COMPUTED)


def test_a_graph_without_saved_tensors_counts_as_unused() -> None:
    loss = NET[0].bias.sum()
    loss.backward()
    assert not is_used(loss)
    assert not is_used(torch.zeros((), requires_grad=True))


def test_a_loss_is_older_than_later_nodes() -> None:
    before = nodes_so_far()
    loss = NET(X).sum()
    assert not is_older(loss, before)
    assert is_older(loss, nodes_so_far())


# -- torch.distributed except its reducer, which tests/collective/reduction/test_ddp.py covers ----


@pytest.fixture
def group() -> Iterator[dist.ProcessGroup]:
    """A process group of one process, as a script opens it."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert dist.group.WORLD is not None
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


def test_all_gather_returns_the_tensor(group: dist.ProcessGroup) -> None:
    mine, gathered = torch.arange(3.0), torch.zeros(3)
    c10d.all_gather_single(gathered, mine, group).wait()
    assert torch.equal(gathered, mine)


def test_reduce_scatter_keeps_one_part_of_the_sum(group: dist.ProcessGroup) -> None:
    part = torch.zeros(3)
    c10d.reduce_scatter_single(part, torch.arange(3.0), group)
    assert part.tolist() == [0, 1, 2]


def test_the_store_of_a_group_accepts_further_keys(group: dist.ProcessGroup) -> None:
    store = c10d.PrefixStore("fleet", c10d.default_store())
    store.set("key", "value")
    assert store.get("key") == b"value"


def test_groups_get_one_more_reference_in_a_child(group: dist.ProcessGroup) -> None:
    before = sys.getrefcount(group)
    c10d.keep_groups_in_child()
    assert sys.getrefcount(group) == before + 1
    ctypes.pythonapi.Py_DecRef(ctypes.py_object(group))


def test_a_queued_callback_runs_at_the_end_of_backward() -> None:
    first, last = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    seen: list[str] = []
    last.register_hook(lambda _: c10d.queue_callback(lambda: seen.append("end")))
    for parameter in (first, last):
        parameter.register_post_accumulate_grad_hook(lambda _: seen.append("gradient"))
    (last * (first * 2)).sum().backward()
    assert seen == ["gradient", "gradient", "end"]


def test_backward_raises_the_error_of_a_callback() -> None:
    class OurError(Exception):
        """Must keep its type through backward."""

    def fail() -> None:
        raise OurError("at the end")

    parameter = nn.Parameter(torch.ones(1))
    parameter.register_hook(lambda _: c10d.queue_callback(fail))
    with pytest.raises(OurError, match="at the end"):
        (parameter * 2).sum().backward()


# -- A graph records operations as they are called, as programs do --------------------------------


class GraphRecorder:
    """A minimal graph recorder: a tracer, its mode, and fake tensors."""

    def __init__(self) -> None:
        self.fakes = fakes.fakes_of(ShapeEnv(specialize_zero_one=False, duck_shape=False))
        self.tracer = tracing.PythonKeyTracer()
        self.tracer.root = nn.Module()
        self.graph = self.tracer.graph = fx.Graph(tracer_cls=tracing.PythonKeyTracer)
        self.mode = tracing.ProxyTorchDispatchMode(self.tracer, "symbolic")

    def placeholder(self, name: str, example: Tensor, is_open: list[bool]) -> Any:
        fake = fakes.open_fake(self.fakes, example, is_open)
        proxy = self.tracer.create_proxy("placeholder", name, (), {}, name=name)
        with self.fakes, self.mode:
            tracing.track_tensor_tree(fake, proxy, constant=None, tracer=self.tracer)
        return fake

    def node_of(self, value: Any) -> fx.Node:
        proxy: Any = tracing.get_proxy_slot(value, self.tracer)
        node = getattr(proxy, "proxy", proxy).node
        assert isinstance(node, fx.Node)
        return node


def test_operations_are_recorded_and_can_be_run() -> None:
    recorder = GraphRecorder()
    x = recorder.placeholder("x", torch.ones(4, 3), [True, False])
    with recorder.fakes, recorder.mode:
        out = torch.ops.aten.mul.Tensor(x, 2)
    node = recorder.node_of(out)
    assert (node.op, node.target) == ("call_function", torch.ops.aten.mul.Tensor)
    assert node.args[0] is recorder.node_of(x)
    recorder.graph.output(node)
    assert fx.GraphModule(nn.Module(), recorder.graph)(torch.ones(5, 3)).tolist() == [[2.0] * 3] * 5


def test_an_untracked_tensor_has_no_node() -> None:
    recorder = GraphRecorder()
    fake = fakes.open_fake(recorder.fakes, torch.ones(2), [False])
    assert tracing.get_proxy_slot(fake, recorder.tracer, None) is None


class RecordsFunctions(tracing.TorchDispatchMode):
    """Records each function and calls it."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func)
        return tracing.return_and_correct_aliasing(func, args, kwargs or {}, func(*args))


def test_no_dispatch_bypasses_modes() -> None:
    x = torch.ones(2, 3)
    with RecordsFunctions() as mode:
        with tracing.no_dispatch():
            x.t_()
        assert x.shape == (3, 2)
        assert mode.seen == []
        x.add_(1)
        assert mode.seen == [torch.ops.aten.add_.Tensor]
