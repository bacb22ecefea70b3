# SPDX-License-Identifier: Apache-2.0
"""`Recorder`: records the operations on variables as a graph, with the state of the graph."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, fx, nn

from fleetlight.errors import PlanError
from fleetlight.static.graph.feeds import Feed
from fleetlight.static.graph.lookups import Lookup
from fleetlight.static.graph.rng import CheckpointRng, draws
from fleetlight.static.graph.shape_guards import Shapes
from fleetlight.static.graph.state import Kind, Slot
from fleetlight.static.graph.variable import Variable
from fleetlight.static.ops.marks import LOOKS_AT_TRAINING, unless_testing
from fleetlight.static.writing import recurrent, unsupported
from fleetlight.static.writing.eval_twins import Twin, twin
from fleetlight.torch_compat.fakes import fakes_of, open_fake
from fleetlight.torch_compat.tensors import (
    current_derivative,
    current_sequence_number,
    tree_leaves,
    tree_map,
    without_functions,
)
from fleetlight.torch_compat.tracing import (
    ProxyTorchDispatchMode,
    PythonKeyTracer,
    TorchDispatchMode,
    get_proxy_slot,
    no_dispatch,
    return_and_correct_aliasing,
    root,
    track_tensor_tree,
    without_mkldnn,
)

#: the part of a node: the forward, its derivative, or the optimizer's step; passes may insert the
#: reduction of gradients between the last two
Part = Literal["forward", "backward", "reduction", "update"]


#: torch's own call of a module
_CALL = nn.Module.__call__
#: functions that compute no tensor
_QUESTIONS = ("__get__", "size", "dim", "is_floating_point", "numel", "stride", "is_contiguous")
#: views that torch can also make in place
_VIEWS = ("t", "transpose", "swapaxes", "swapdims", "squeeze", "unsqueeze", "detach", "as_strided")


@dataclasses.dataclass
class StateEntry:
    """A tensor of the state, with its variable and its node."""

    slot: Slot
    variable: Variable
    node: fx.Node


class ModuleCall(NamedTuple):
    """One call of a module; calls of the same module have different numbers."""

    path: str
    number: int


class Recorder:
    """Records one program."""

    def __init__(self) -> None:
        self.shapes = Shapes()
        self._fakes = fakes_of(self.shapes)
        self._tracer = PythonKeyTracer()
        self._tracer.root = nn.Module()
        self.graph = self._tracer.graph = fx.Graph(tracer_cls=PythonKeyTracer)
        self._proxies = ProxyTorchDispatchMode(self._tracer, "symbolic")
        #: by the identity of the live tensor, which the slot keeps alive
        self.entries: dict[int, StateEntry] = {}
        self.feeds: dict[str, tuple[Feed, Variable, fx.Node]] = {}
        #: calls of layers whose rows are in tables
        self.lookups: list[Lookup] = []
        self._invented: set[str] = set()
        #: names given to nodes
        self.names: dict[str, fx.Node] = {}
        #: the names of feeds and of the script, by node
        self._given: dict[fx.Node, str] = {}
        self.part: Part = "forward"
        #: the active calls of modules, the innermost last
        self.modules: list[ModuleCall] = []
        self._calls = 0
        self._calls_of: dict[int, tuple[ModuleCall, ...]] = {}
        #: a weak reference to its program
        self.owner: Callable[[], object] = lambda: None
        self.checkpoint_rng = CheckpointRng()
        #: the module that read `training`, until the next call shows why
        self._flag_reader: str | None = None
        #: increases with each addition
        self.version = 0
        #: calls a module with variables
        self.calls: Callable[[nn.Module, Callable[[], Any]], Any] = lambda _, call: call()

    # -- inputs

    def feed(self, feed: Feed, example: Tensor, is_invented: bool = False) -> Variable:
        """Add an input of each run; the program may not branch on sizes that are invented."""
        is_open = [size is None for size in feed.shape]
        fake = open_fake(self._fakes, example.detach().contiguous(), is_open)
        variable = self._placeholder(feed.name, fake, requires_grad=False)
        node = self.node_of(variable)
        self.feeds[feed.name], self._given[node] = (feed, variable, node), feed.name
        if is_invented:
            self._invented.add(feed.name)
        return variable

    def state(self, kind: Kind, name: str, tensor: Tensor, slot: Slot | None = None) -> Variable:
        """The variable of a tensor that the program reads and changes in place."""
        found = self.entries.get(id(tensor))
        if found is None:
            with without_functions():
                fake = self._fakes.from_tensor(tensor.detach(), static_shapes=True)
            trains = kind == "parameter" and tensor.requires_grad
            variable = self._placeholder(f"{kind}_{len(self.entries)}", fake, trains)
            found = StateEntry(slot or Slot(kind, name, tensor), variable, self.node_of(variable))
            self.entries[id(tensor)] = found
        return found.variable

    def _placeholder(self, name: str, fake: Tensor, requires_grad: bool) -> Variable:
        proxy = self._tracer.create_proxy("placeholder", name, (), {}, name=name)
        with self._fakes, self._proxies:
            track_tensor_tree(fake, proxy, constant=None, tracer=self._tracer)
        self.version += 1
        return Variable(fake, self, requires_grad)

    # -- operations

    def call(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Record a call of a torch function, above autograd."""
        unsupported.function(func)
        args, kwargs = tree_map(self._owned, (args, kwargs))
        if func in recurrent.WRITTEN_OUT:
            func = recurrent.written_out(func, args)
            # its operations are recorded one by one
            return self._with_twin(func, args, kwargs)
        with (
            without_functions(),
            unsupported.of(func),
        ):
            return self._with_twin(func, args, kwargs)

    def _with_twin(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call a function as in training, and also as in an evaluation if that differs."""
        both = twin(func, args, kwargs)
        if both is None:
            if func.__name__ not in _QUESTIONS:
                self.mark_flag_read()
            return func(*args, **kwargs)
        self._flag_reader = None
        return _either(both)

    def flag_read(self) -> None:
        """Note that a module has read `training`; its next call may show why."""
        self.mark_flag_read()
        self._flag_reader = self.modules[-1].path if self.modules else ""

    def mark_flag_read(self) -> None:
        """Mark a read of `training` that the next call did not explain."""
        if self._flag_reader is not None:
            node = self.graph.call_function(LOOKS_AT_TRAINING, (self._flag_reader or "the model",))
            node.meta["part"] = self.part
            self._flag_reader = None

    def _owned(self, value: Any) -> Any:
        """The variable of a live tensor, before autograd records it."""
        if not isinstance(value, Tensor) or isinstance(value, Variable):
            return value
        entry = self.entries.get(id(value))
        if entry is not None:
            return entry.variable
        if value.requires_grad:
            if not value.is_leaf:
                raise PlanError(
                    f"a tensor of shape {list(value.shape)} was computed from parameters outside "
                    "the program, which would make it a constant; compute it in the forward "
                    "of a module that the program calls"
                )
            self._refuse_unwatched()
            return self.state("parameter", "", value)
        return value

    def _refuse_unwatched(self) -> None:
        """Refuse parameters of a module whose calls are not recorded."""
        if nn.Module.__call__ is _CALL:
            raise PlanError(
                "a module was called with variables of a program that has run already; call all "
                "modules before the first run, or inside static.program_guard(program)"
            )

    def operation(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Record an operation of torch, below autograd."""
        if torch.Tag.inplace_view in func.tags:
            return self._view_in_place(func, args, kwargs)
        unsupported.changes(func, args, self.entries)
        is_again = self.part == "backward"
        if (is_again or self.checkpoint_rng.is_watched) and draws(func, args, kwargs):
            return self.checkpoint_rng.drawn(self._written, func, args, kwargs, is_again)
        return self._written(func, args, kwargs)

    def _written(self, func: Any, args: Any, kwargs: Any) -> Any:
        last = root(self.graph).prev
        given, named = tree_map(self._without_values, (args, kwargs))
        with self._fakes, self._proxies, unsupported.of(func):
            out = func(*given, **named)
        out = tree_map(lambda v: Variable(v, self) if isinstance(v, Tensor) else v, out)
        self._sign(last)
        return return_and_correct_aliasing(  # type: ignore[no-untyped-call]
            func, args, kwargs, out
        )

    def _view_in_place(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Record an in-place view such as `x.t_()` as a new view.

        A graph reads sizes at their use, so an in-place view would change earlier sizes.
        """
        variable, name = args[0], func.overloadpacket.__name__.removesuffix("_")
        if name not in _VIEWS or not isinstance(variable, Variable):
            raise PlanError(f"a program cannot call {name}_ on a tensor: make another tensor")
        view = getattr(torch.ops.aten, name)
        last = root(self.graph).prev
        given, named = tree_map(self._without_values, (args, kwargs))
        with self._fakes, self._proxies:
            variable.fake = view(*given, **named)
        self._sign(last)
        with no_dispatch():
            func(*args, **kwargs)
        return variable

    def _without_values(self, value: Any) -> Any:
        if isinstance(value, Variable):
            if value.writer is not self:
                raise PlanError(f"{value!r} belongs to another program")
            return value.fake
        return self.state("constant", "", value).fake if isinstance(value, Tensor) else value

    def _sign(self, last: fx.Node) -> None:
        """Set the part, the calls and the derivative of new nodes."""
        self.version += 1
        derivative = self._derivative_now()
        calls = self._calls_now(derivative)
        node = last.next
        while node.op != "root":
            node.meta["part"], node.meta["calls"] = self.part, calls
            node.meta["module"] = calls[-1].path if calls else ""
            node.meta["derivative"] = derivative
            node = node.next

    def _derivative_now(self) -> int | None:
        """Autograd's number, which an operation shares with its derivative."""
        if self.part == "forward":
            return current_sequence_number()
        return current_derivative()

    def _calls_now(self, derivative: int | None) -> tuple[ModuleCall, ...]:
        """The module calls of a node, or of the node whose derivative it is, the innermost last."""
        if derivative is None:
            return ()
        if self.part == "forward":
            calls = tuple(self.modules)
            # values outside autograd, such as the counter of a batch norm, have no number
            self._calls_of.setdefault(derivative, calls)
            return calls
        return self._calls_of.get(derivative, ())

    @contextlib.contextmanager
    def calling(self, path: str) -> Iterator[None]:
        """Inside the block, the module at `path` is active."""
        self._calls += 1
        self.modules.append(ModuleCall(path, self._calls))
        try:
            yield
        finally:
            self.modules.pop()

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Inside the block, tensors made with sizes of variables are variables, too."""
        # oneDNN computes a recurrent net as a whole, without a graph
        with without_mkldnn(), _SizeRecorder(self):
            yield

    @contextlib.contextmanager
    def part_of(self, part: Part) -> Iterator[None]:
        """Inside the block, new nodes belong to this part."""
        before, self.part = self.part, part
        try:
            yield
        finally:
            self.part = before

    # -- names

    def node_of(self, variable: Variable) -> fx.Node:
        """The node of a variable."""
        if variable.writer is not self:
            raise PlanError(f"{variable!r} belongs to another program")
        node: fx.Node = get_proxy_slot(variable.fake, self._tracer).proxy.node
        return node

    def name_of(self, variable: Variable) -> str:
        """The name by which it can be fetched."""
        node = self.node_of(variable)
        return self._given.get(node, node.name)

    def rename(self, variable: Variable, name: str) -> None:
        """Give a variable another name."""
        if not isinstance(name, str) or not name:
            raise PlanError(f"name of a variable: got {name!r}, expected a string")
        is_feed = name in self.feeds and self.feeds[name][2] is not self.node_of(variable)
        if is_feed or self.names.get(name, variable) not in (variable, self.node_of(variable)):
            raise PlanError(f"the name {name!r} belongs to another variable of this program")
        node = self.node_of(variable)
        self.names[name], self._given[node] = node, name
        self.version += 1

    def constrained_feeds(self) -> list[Feed]:
        """The feeds with the limits of their dynamic sizes."""
        return [
            self.shapes.constrained(feed, variable.fake, feed.name in self._invented)
            for feed, variable, _ in self.feeds.values()
        ]


def _either(both: Twin) -> Any:
    """Record both twins, joined by a mark."""
    trained = both.trained()
    with torch.no_grad():
        tested = both.tested()
    if not isinstance(trained, Tensor):
        # attention returns no weights unless they are requested
        return type(trained)(
            unless_testing(one, other) if isinstance(one, Tensor) else one
            for one, other in zip(trained, tested, strict=True)
        )
    out = unless_testing(trained, tested)
    return out if both.changes is None else both.changes.copy_(out)


class _SizeRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records operations of a program without variables among their arguments.

    These are operations with a size of a variable; random ones, which would otherwise be constants;
    and operations on live state when a checkpoint computes its forward again.
    """

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        entries = self._recorder.entries
        given = tree_leaves((args, kwargs))
        if any(isinstance(v, (Variable, torch.SymInt)) or id(v) in entries for v in given) or draws(
            func, args, kwargs
        ):
            return self._recorder.operation(func, args, kwargs)
        return func(*args, **kwargs)


def signed(node: fx.Node) -> Part:
    """The part of a node."""
    part: Part = node.meta.get("part", "forward")
    return part
