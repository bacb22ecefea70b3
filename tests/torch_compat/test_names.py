# SPDX-License-Identifier: Apache-2.0
"""What Fleetlight relies on in each name of torch that is not public."""

from __future__ import annotations

import ctypes
import sys
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.distributed.elastic.rendezvous import dynamic_rendezvous
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from fleetlight.torch_compat import c10d, fakes, modules, operators, optimizers, tensors, tracing
from fleetlight.torch_compat.compiler import inductor
from fleetlight.torch_compat.modules import wrappers_in, wrappers_of
from fleetlight.torch_compat.tensors import assign, distinct_elements
from fleetlight.torch_compat.used_graphs import is_older, is_used, nodes_so_far

pytestmark = pytest.mark.contract


def test_trees_are_flattened_and_unflattened() -> None:
    tree = {"a": [1, (2, 3)], "b": 4}
    leaves, spec = tensors.tree_flatten(tree)
    assert leaves == tensors.tree_leaves(tree) == [1, 2, 3, 4]
    assert tensors.tree_unflatten(leaves, spec) == tree
    assert tensors.tree_map(lambda x: 2 * x, tree) == {"a": [2, (4, 6)], "b": 8}
    assert len(tensors.tree_flatten_with_path(tree)[0]) == 4


def pair(a: float, b: float) -> list[Tensor]:
    return [torch.tensor([float(a)]), torch.tensor([float(b)])]


def values(tensors: Any) -> list[float]:
    return [float(tensor) for tensor in tensors]


def test_foreach_functions_compute_on_lists() -> None:
    assert values(optimizers.foreach_sub(pair(3, 4), pair(1, 1))) == [2, 3]
    assert values(optimizers.foreach_mul(pair(3, 4), torch.tensor(2.0))) == [6, 8]
    assert values(optimizers.foreach_norm(pair(-3, 4), 2.0)) == [3, 4]
    assert values(
        optimizers.foreach_clamp_max(optimizers.foreach_clamp_min(pair(-3, 4), -1), 1)
    ) == [-1, 1]
    changed = pair(1, 2)
    optimizers.foreach_add_(changed, pair(1, 1), alpha=2)
    optimizers.foreach_mul_(changed, 2)
    optimizers.foreach_sub_(changed, pair(1, 1))
    assert values(changed) == [5, 7]
    optimizers.foreach_copy_(changed, pair(8, 9))
    assert values(changed) == [8, 9]
    optimizers.foreach_zero_(changed)
    assert values(changed) == [0, 0]


def test_gradients_are_unscaled_and_infinities_found() -> None:
    gradients, found = pair(8, 4), torch.zeros(1)
    optimizers.foreach_unscale_(gradients, found, torch.tensor(0.25))
    assert values(gradients) == [2, 1]
    assert not found.item()
    optimizers.foreach_unscale_(pair(float("inf"), 1), found, torch.tensor(1.0))
    assert found.item()
    scale, growth = torch.tensor(4.0), torch.tensor(0, dtype=torch.int32)
    optimizers.foreach_update_scale_(scale, growth, found, 2.0, 0.5, 1)
    assert scale.item() == 2


class Shaped(Tensor):
    """Has a shape and no memory."""

    @staticmethod
    def __new__(cls, like: Tensor) -> Shaped:
        return tensors.wrapper(cls, like.shape, dtype=like.dtype, device=like.device)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise AssertionError(func)


def test_a_wrapper_subclass_has_a_shape() -> None:
    assert Shaped(torch.ones(2, 3)).shape == (2, 3)


class RecordsCalls(nn.Parameter):
    """Records the functions that it was called with."""

    seen: list[Any]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        RecordsCalls.seen.append(func)
        with tensors.without_functions():
            return func(*args, **(kwargs or {}))


def test_without_functions_bypasses_torch_function() -> None:
    RecordsCalls.seen = []
    tensor = RecordsCalls(torch.ones(2))
    with tensors.without_functions():
        assert tensor.sum().item() == 2
    assert RecordsCalls.seen == []
    tensor.sum()
    assert RecordsCalls.seen == [Tensor.sum]


def test_moving_a_module_checks_whether_parameters_swap() -> None:
    module = nn.Linear(1, 1, bias=False)
    module.weight = RecordsCalls(torch.ones(1, 1))
    RecordsCalls.seen = []
    module.to(torch.float64)
    assert len([func for func in RecordsCalls.seen if tensors.is_swappable(func)]) == 1
    assert not tensors.is_swappable(torch.ones)


def test_the_version_of_a_tensor_counts_writes() -> None:
    tensor = torch.zeros(2)
    before = tensors.version(tensor)
    tensor.add_(1)
    assert tensors.version(tensor) > before


def test_hooks_of_a_leaf_are_detected() -> None:
    leaf = nn.Parameter(torch.ones(1))
    assert not tensors.has_gradient_hooks(leaf)
    for register in (leaf.register_hook, leaf.register_post_accumulate_grad_hook):
        handle = register(lambda _: None)
        assert tensors.has_gradient_hooks(leaf)
        handle.remove()
        assert not tensors.has_gradient_hooks(leaf)


class ChecksAccumulation(torch.autograd.Function):
    """Checks in its backward whether the gradient of the leaf will be accumulated."""

    found: list[bool]

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        ChecksAccumulation.found.append(tensors.runs_in_backward(ctx.next_functions[0][0]))
        return gradient


def test_a_backward_knows_whether_it_accumulates() -> None:
    ChecksAccumulation.found = []
    leaf = nn.Parameter(torch.ones(1))
    ChecksAccumulation.apply(leaf).sum().backward()  # type: ignore[no-untyped-call]
    torch.autograd.grad(ChecksAccumulation.apply(leaf).sum(), leaf)  # type: ignore[no-untyped-call]
    assert ChecksAccumulation.found == [True, False]


def test_a_derivative_has_the_sequence_number_of_its_operation() -> None:
    x = torch.ones(1, requires_grad=True)
    y = x * 2
    number, seen = tensors.current_sequence_number(), []
    x.register_hook(lambda _: seen.append(tensors.current_derivative()))
    y.grad_fn.register_prehook(lambda _: seen.append(tensors.current_derivative()))  # type: ignore[union-attr]
    y.backward()
    assert number in seen
    assert tensors.current_derivative() is None


def test_an_activation_checkpoint_is_detected() -> None:
    seen = []

    def forward(x: Tensor) -> Tensor:
        seen.append(tensors.has_saved_tensor_hooks())
        return x * x

    checkpoint(forward, torch.ones(1, requires_grad=True), use_reentrant=False)
    assert seen == [True]
    assert not tensors.has_saved_tensor_hooks()


def test_the_dicts_of_a_module_are_live() -> None:
    norm = nn.BatchNorm1d(2)
    net = nn.Sequential(norm)
    assert modules.children(net) == {"0": norm}
    assert modules.parameters(norm)["weight"] is norm.weight
    assert modules.buffers(norm)["running_mean"] is norm.running_mean
    assert isinstance(norm, modules.BatchNorm)
    with pytest.raises(ValueError, match="expected 2D or 3D"):
        modules.check_batch_norm_input(norm, torch.ones(1, 1, 1, 1))
    given = {"0.weight": torch.zeros(2)}
    with modules.with_tensors(net, given):
        assert norm.weight is given["0.weight"]
    assert isinstance(norm.weight, nn.Parameter)
    copy: Any = OrderedDict(net.state_dict())
    modules.with_versions_of(net.state_dict(), copy)
    assert copy._metadata["0"]["version"] == 2


def test_a_step_can_be_counted_for_schedulers() -> None:
    sgd = torch.optim.SGD([nn.Parameter(torch.ones(1))])
    scheduler = torch.optim.lr_scheduler.StepLR(sgd, 1)
    optimizers.count_as_stepped(sgd)
    # a warning would be an error
    scheduler.step()
    assert hasattr(sgd.step, optimizers.SCHEDULED_STEP)


class ReadsFoundInf(torch.optim.SGD):
    """Reads found_inf, as GradScaler expects of an optimizer that unscales on its own."""

    seen: float | None = None

    def step(self, closure: Any = None) -> Any:
        found = getattr(self, "found_inf", None)
        self.seen = None if found is None else float(found)
        self.found_inf = self.grad_scale = None
        return super().step(closure)


def test_a_scaler_leaves_infinities_to_the_step() -> None:
    parameter = nn.Parameter(torch.ones(1))
    sgd = ReadsFoundInf([parameter], lr=0.0)
    optimizers.leave_scaling_to_step(sgd)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(parameter.sum() * float("inf")).backward()
    scaler.step(sgd)
    assert sgd.seen == 1.0
    scaler.update()
    parameter.grad = torch.ones(1)
    scaler.step(sgd)
    assert sgd.seen == 0.0
    optimizers.tell_infinity(scaler, sgd)
    scaler.update()
    assert scaler.get_scale() == 1.0
    assert optimizers.GROWTH_TRACKER in scaler.state_dict()


def test_a_traced_step_counts_as_compiling() -> None:
    with optimizers.traced_as_compiled():
        assert torch.compiler.is_compiling()
    assert not torch.compiler.is_compiling()


def test_operations_have_schemas_and_direct_forms() -> None:
    relu: Any = torch.ops.aten.relu.default
    assert isinstance(relu, operators.OpOverload)
    assert [a.name for a in operators.schema(relu).arguments] == ["self"]
    x = torch.tensor([-1.0, 2.0])
    direct, method = operators.direct_function("relu"), operators.direct_method("relu")
    assert direct is not None
    assert method is not None
    for form in (operators.unboxed(relu), direct, method):
        assert form(x).tolist() == [0, 2]
    assert operators.direct_function("no_such_operation") is None


@pytest.mark.parametrize("name", [n for n in operators.__all__ if n.isupper() and "SIZE" not in n])
def test_every_listed_operation_is_an_op_overload(name: str) -> None:
    assert isinstance(getattr(operators, name), operators.OpOverload)


def test_dynamic_sizes_have_hints_and_guards_a_text() -> None:
    mode = fakes.fakes_of(ShapeEnv(specialize_zero_one=False, duck_shape=False))
    fake = fakes.open_fake(mode, torch.ones(6, 3), [True, False])
    rows, columns = fake.shape
    assert isinstance(rows, torch.SymInt)
    assert (fakes.hint(rows), fakes.hint(columns), columns) == (6, 3, 3)
    fakes.check(rows > 2)
    assert fakes.as_python((rows > 4).node.expr).replace(" ", "").endswith(">4")
    with pytest.raises(fakes.ASKS_FOR_VALUES), mode:
        bool(fake.sum() > 0)


def test_nodes_can_be_renamed_and_erased() -> None:
    graph = fx.Graph()
    node = graph.placeholder("x")
    assert tracing.root(graph).prev is node
    tracing.rename(node, "other")
    assert node.name == "other"
    assert not tracing.was_erased(node)
    graph.erase_node(node)
    assert tracing.was_erased(node)


def test_without_mkldnn_restores_the_mode() -> None:
    before = torch.backends.mkldnn.is_available() and torch._C._get_mkldnn_enabled()
    with tracing.without_mkldnn():
        assert not torch._C._get_mkldnn_enabled()
    assert torch._C._get_mkldnn_enabled() == before


def test_a_rendezvous_state_has_nodes() -> None:
    state = c10d.empty_rendezvous_state(dynamic_rendezvous)
    one = c10d.rendezvous_node(dynamic_rendezvous, "host", 7, 0)
    state.participants[one] = 0
    assert (one.addr, one.pid, one.local_id) == ("host", 7, 0)
    assert not state.complete


@pytest.mark.parametrize(("mode", "weighed"), [(0, True), (0, False), (1, False), (2, False)])
def test_the_operations_inside_embedding_bag_give_its_gradients(mode: int, weighed: bool) -> None:
    rows = torch.arange(12.0).view(4, 3).sin().requires_grad_()
    places, starts = torch.tensor([3, 1, 3, 0]), torch.tensor([0, 1, 4])
    each = torch.tensor([0.5, 1, 2, 3], requires_grad=weighed) if weighed else None
    expected = nn.functional.embedding_bag(
        places,
        rows,
        starts,
        mode=("sum", "mean", "max")[mode],
        per_sample_weights=each,
        include_last_offset=True,
    )
    gradient = torch.arange(6.0).view(2, 3)
    expected.backward(gradient)  # type: ignore[no-untyped-call]
    given = rows.detach(), places, starts
    weights = None if each is None else each.detach()
    found, _, _, chosen = operators.BAGS(*given, False, mode, False, weights, True)
    assert torch.equal(found, expected.detach())
    owners, sizes = torch.tensor([0, 1, 1, 1]), torch.tensor([1, 3])
    summed = operators.BAGS_OF_GRADIENTS(
        gradient, places, owners, sizes, chosen, 4, False, mode, weights
    )
    torch.testing.assert_close(summed, rows.grad)
    if each is not None:
        dots = operators.BAGS_OF_WEIGHTS(gradient, *given, owners, mode)
        torch.testing.assert_close(dots, each.grad)


# -- wrappers of torch around a module are detected, during a forward and outside -----------------


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
