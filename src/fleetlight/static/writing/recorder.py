# SPDX-License-Identifier: Apache-2.0
"""`Recorder`: writes down what is done with variables, as a graph, and what the graph works on."""

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

#: what a node belongs to: computing, its derivative, or the optimizer's step; passes may put the
#: reduction of gradients between the last two
Part = Literal["forward", "backward", "reduction", "update"]


#: how torch calls a module
_CALL = nn.Module.__call__
#: functions that compute nothing
_QUESTIONS = ("__get__", "size", "dim", "is_floating_point", "numel", "stride", "is_contiguous")
#: views that torch can also make in place
_VIEWS = ("t", "transpose", "swapaxes", "swapdims", "squeeze", "unsqueeze", "detach", "as_strided")


@dataclasses.dataclass
class StateEntry:
    """A tensor that has come into the program, and what stands for it there."""

    slot: Slot
    variable: Variable
    node: fx.Node


class ModuleCall(NamedTuple):
    """One call of a module; several of the same one have different numbers."""

    path: str
    number: int


class Recorder:
    """One for each program."""

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
        #: those that the script gave, by node
        self._given: dict[fx.Node, str] = {}
        self.part: Part = "forward"
        #: the modules that are being called, the innermost last
        self.modules: list[ModuleCall] = []
        self._calls = 0
        self._calls_of: dict[int, tuple[ModuleCall, ...]] = {}
        #: the program that it writes, as long as there is one
        self.owner: Callable[[], object] = lambda: None
        self.chance = CheckpointRng()
        #: the module that has asked whether it trains, and has done nothing since
        self._looking: str | None = None
        #: how often something has been added
        self.version = 0
        #: what a module does that is called with variables
        self.calls: Callable[[nn.Module, Callable[[], Any]], Any] = lambda _, call: call()

    # -- what comes in

    def feed(self, feed: Feed, example: Tensor, is_invented: bool = False) -> Variable:
        """A tensor that each run is given; where its sizes are invented, none may be looked at."""
        is_open = [size is None for size in feed.shape]
        fake = open_fake(self._fakes, example.detach().contiguous(), is_open)
        variable = self._placeholder(feed.name, fake, requires_grad=False)
        node = self.node_of(variable)
        self.feeds[feed.name], self._given[node] = (feed, variable, node), feed.name
        if is_invented:
            self._invented.add(feed.name)
        return variable

    def state(self, kind: Kind, name: str, tensor: Tensor, slot: Slot | None = None) -> Variable:
        """A tensor that a program reads and changes where it is; the same one for the same."""
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

    # -- what is done with it

    def call(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A function of torch, above autograd."""
        unsupported.function(func)
        args, kwargs = tree_map(self._owned, (args, kwargs))
        if func in recurrent.WRITTEN_OUT:
            func = recurrent.written_out(func, args)
            # its operations are called one by one
            return self._either_way(func, args, kwargs)
        with (
            without_functions(),
            unsupported.of(func),
        ):
            return self._either_way(func, args, kwargs)

    def _either_way(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """As in training; where an evaluation does something else, that as well."""
        both = twin(func, args, kwargs)
        if both is None:
            if func.__name__ not in _QUESTIONS:
                self.note_look()
            return func(*args, **kwargs)
        self._looking = None
        return _either(both)

    def looks_at_training(self) -> None:
        """A module has asked whether it trains; what it does next tells why."""
        self.note_look()
        self._looking = self.modules[-1].path if self.modules else ""

    def note_look(self) -> None:
        """What was done next did not tell why."""
        if self._looking is not None:
            node = self.graph.call_function(LOOKS_AT_TRAINING, (self._looking or "the model",))
            node.meta["part"] = self.part
            self._looking = None

    def _owned(self, value: Any) -> Any:
        """What stands for a live tensor, before autograd has seen it."""
        if not isinstance(value, Tensor) or isinstance(value, Variable):
            return value
        entry = self.entries.get(id(value))
        if entry is not None:
            return entry.variable
        if value.requires_grad:
            if not value.is_leaf:
                raise PlanError(
                    f"a tensor of shape {list(value.shape)} was computed from parameters outside "
                    "of the program, which would take it for a constant; compute it in the forward "
                    "of a module that the program calls"
                )
            self._refuse_unseen()
            return self.state("parameter", "", value)
        return value

    def _refuse_unseen(self) -> None:
        """A module that nobody watches has its own tensors in place of the program's."""
        if nn.Module.__call__ is _CALL:
            raise PlanError(
                "a module was called with variables of a program that was run already; call all "
                "modules before the first run, or inside static.program_guard(program)"
            )

    def operation(self, func: Any, args: Any, kwargs: Any) -> Any:
        """An operation of torch, below autograd."""
        if torch.Tag.inplace_view in func.tags:
            return self._look_otherwise(func, args, kwargs)
        unsupported.changes(func, args, self.entries)
        is_again = self.part == "backward"
        if (is_again or self.chance.is_watched) and draws(func, args, kwargs):
            return self.chance.drawn(self._written, func, args, kwargs, is_again)
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

    def _look_otherwise(self, func: Any, args: Any, kwargs: Any) -> Any:
        """A tensor that is looked at in another way from now on, `x.t_()`.

        A graph asks for sizes where they are needed, which would be those of later; so it gets a
        view of its own.
        """
        variable, name = args[0], func.overloadpacket.__name__.removesuffix("_")
        if name not in _VIEWS or not isinstance(variable, Variable):
            raise PlanError(f"{name}_ of a tensor has no place in a program: make another tensor")
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
        """Say of new nodes where they come from."""
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
        """What an operation and those of its derivative have in common: autograd's number of it."""
        if self.part == "forward":
            return current_sequence_number()
        return current_derivative()

    def _calls_now(self, derivative: int | None) -> tuple[ModuleCall, ...]:
        """The modules whose forward, or whose derivative, is computed, the innermost last."""
        if derivative is None:
            return ()
        if self.part == "forward":
            calls = tuple(self.modules)
            # what autograd does not look at, such as the counter of a batch norm, has no number
            self._calls_of.setdefault(derivative, calls)
            return calls
        return self._calls_of.get(derivative, ())

    @contextlib.contextmanager
    def calling(self, path: str) -> Iterator[None]:
        """Inside the block, this module is called."""
        self._calls += 1
        self.modules.append(ModuleCall(path, self._calls))
        try:
            yield
        finally:
            self.modules.pop()

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Inside the block, tensors made by sizes of variables are variables, too."""
        # what oneDNN computes by itself, a recurrent net as a whole, has no graph
        with without_mkldnn(), _SizeRecorder(self):
            yield

    @contextlib.contextmanager
    def part_of(self, part: Part) -> Iterator[None]:
        """Inside the block, what is written belongs to this part."""
        before, self.part = self.part, part
        try:
            yield
        finally:
            self.part = before

    # -- names

    def node_of(self, variable: Variable) -> fx.Node:
        """The node that makes it."""
        if variable.writer is not self:
            raise PlanError(f"{variable!r} belongs to another program")
        node: fx.Node = get_proxy_slot(variable.fake, self._tracer).proxy.node
        return node

    def name_of(self, variable: Variable) -> str:
        """The name by which it can be fetched."""
        node = self.node_of(variable)
        return self._given.get(node, node.name)

    def rename(self, variable: Variable, name: str) -> None:
        """Give it another name."""
        if not isinstance(name, str) or not name:
            raise PlanError(f"a name of a variable: got {name!r}, expected a string")
        is_feed = name in self.feeds and self.feeds[name][2] is not self.node_of(variable)
        if is_feed or self.names.get(name, variable) not in (variable, self.node_of(variable)):
            raise PlanError(f"the name {name!r} belongs to another variable of this program")
        node = self.node_of(variable)
        self.names[name], self._given[node] = node, name
        self.version += 1

    def taken(self) -> list[Feed]:
        """The feeds as the program takes them, with what it found out about open sizes."""
        return [
            self.shapes.taken(feed, variable.fake, feed.name in self._invented)
            for feed, variable, _ in self.feeds.values()
        ]


def _either(both: Twin) -> Any:
    """What an evaluation computes instead is written down beside what training does."""
    trained = both.trained()
    with torch.no_grad():
        tested = both.tested()
    if not isinstance(trained, Tensor):
        # attention has no weights where nobody wants them
        return type(trained)(
            unless_testing(one, other) if isinstance(one, Tensor) else one
            for one, other in zip(trained, tested, strict=True)
        )
    out = unless_testing(trained, tested)
    return out if both.changes is None else both.changes.copy_(out)


class _SizeRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Writes down operations that have no variables among their arguments, and belong to a program.

    Those with a size of a variable; those that draw random numbers, which would be the same in
    each run; those on live state, when a checkpoint computes its forward again.
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
    """The part a node belongs to."""
    part: Part = node.meta.get("part", "forward")
    return part
