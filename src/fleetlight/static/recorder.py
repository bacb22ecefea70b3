# SPDX-License-Identifier: Apache-2.0
"""`Recorder`: writes down what is done with variables, as a graph, and what the graph works on."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
from torch import Tensor, fx, nn
from torch._subclasses import FakeTensorMode
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.fx.experimental.proxy_tensor import (
    ProxyTorchDispatchMode,
    PythonKeyTracer,
    get_proxy_slot,
    track_tensor_tree,
)
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    GuardOnDataDependentSymNode,
    ShapeEnv,
    StatelessSymbolicContext,
)
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map

from fleetlight.errors import PlanError
from fleetlight.static.feeds import Feed
from fleetlight.static.marks import unless_testing
from fleetlight.static.state import Kind, Slot
from fleetlight.static.testing import Twin, twin
from fleetlight.static.variable import Variable

#: what a node belongs to: computing, its derivative, or the optimizer's step
Part = Literal["forward", "backward", "update"]


@dataclasses.dataclass
class Entry:
    """A tensor that has come into the program, and what stands for it there."""

    slot: Slot
    variable: Variable
    node: fx.Node


class Recorder:
    """One for each program."""

    def __init__(self) -> None:
        self.shapes = ShapeEnv(specialize_zero_one=False, duck_shape=False)
        self._fakes = FakeTensorMode(shape_env=self.shapes, allow_non_fake_inputs=True)
        self._tracer = PythonKeyTracer()
        self._tracer.root = nn.Module()
        self.graph = self._tracer.graph = fx.Graph(tracer_cls=PythonKeyTracer)
        self._proxies = ProxyTorchDispatchMode(self._tracer, "symbolic")
        #: by the identity of the live tensor, which the slot keeps alive
        self.entries: dict[int, Entry] = {}
        self.feeds: dict[str, tuple[Feed, Variable, fx.Node]] = {}
        #: names given to nodes
        self.names: dict[str, fx.Node] = {}
        self.part: Part = "forward"
        #: paths of the modules that are being called, the innermost last
        self.modules: list[str] = []
        self._module_of: dict[int, str] = {}
        #: how often something has been added
        self.version = 0
        #: what a module does that is called with variables
        self.calls: Callable[[nn.Module, Callable[[], Any]], Any] = lambda _, call: call()

    # -- what comes in

    def feed(self, feed: Feed, example: Tensor) -> Variable:
        """A tensor that each run is given."""
        kinds = [DimDynamic.DYNAMIC if s is None else DimDynamic.STATIC for s in feed.shape]
        context: Any = StatelessSymbolicContext(dynamic_sizes=kinds)
        fake = self._fakes.from_tensor(example.detach(), symbolic_context=context)
        variable = self._placeholder(feed.name, fake, requires_grad=False)
        self.feeds[feed.name] = (feed, variable, self.node_of(variable))
        return variable

    def state(self, kind: Kind, name: str, tensor: Tensor, slot: Slot | None = None) -> Variable:
        """A tensor that a program reads and changes where it is; the same one for the same."""
        found = self.entries.get(id(tensor))
        if found is None:
            fake = self._fakes.from_tensor(tensor.detach(), static_shapes=True)
            trains = kind == "parameter" and tensor.requires_grad
            variable = self._placeholder(f"{kind}_{len(self.entries)}", fake, trains)
            found = Entry(slot or Slot(kind, name, tensor), variable, self.node_of(variable))
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
        args, kwargs = tree_map(self._owned, (args, kwargs))
        with torch._C.DisableTorchFunctionSubclass(), _refusing_values(func):
            both = twin(func, args, kwargs)
            return func(*args, **kwargs) if both is None else _either(both)

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
            return self.state("parameter", "", value)
        return value

    def operation(self, func: Any, args: Any, kwargs: Any) -> Any:
        """An operation of torch, below autograd."""
        last = self.graph._root.prev
        given, named = tree_map(self._without_values, (args, kwargs))
        with self._fakes, self._proxies, _refusing_values(func):
            out = func(*given, **named)
        out = tree_map(lambda v: Variable(v, self) if isinstance(v, Tensor) else v, out)
        self._sign(last)
        return return_and_correct_aliasing(  # type: ignore[no-untyped-call]
            func, args, kwargs, out
        )

    def _without_values(self, value: Any) -> Any:
        if isinstance(value, Variable):
            return value.fake
        return self.state("constant", "", value).fake if isinstance(value, Tensor) else value

    def _sign(self, last: fx.Node) -> None:
        """Say of new nodes where they come from."""
        self.version += 1
        module = self._module()
        node = last.next
        while node.op != "root":
            node.meta["part"], node.meta["module"] = self.part, module
            node = node.next

    def _module(self) -> str:
        """The module whose forward, or whose derivative, is computed."""
        if self.part == "forward":
            module = self.modules[-1] if self.modules else ""
            self._module_of[torch._C._autograd._get_sequence_nr() - 1] = module
            return module
        node = torch._C._current_autograd_node()
        return "" if node is None else self._module_of.get(node._sequence_nr(), "")

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Inside the block, tensors made by sizes of variables are variables, too."""
        # what oneDNN computes by itself, a recurrent net as a whole, has no graph
        before = torch._C._get_mkldnn_enabled()
        torch._C._set_mkldnn_enabled(False)
        try:
            with _Sizes(self):
                yield
        finally:
            torch._C._set_mkldnn_enabled(before)

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
        return next((name for name, named in self.names.items() if named is node), node.name)

    def rename(self, variable: Variable, name: str) -> None:
        """Give it another name."""
        if not isinstance(name, str) or not name:
            raise PlanError(f"a name of a variable: got {name!r}, expected a string")
        if self.names.get(name, variable) not in (variable, self.node_of(variable)):
            raise PlanError(f"the name {name!r} belongs to another variable of this program")
        self.names[name] = self.node_of(variable)
        self.version += 1

    def taken(self) -> list[Feed]:
        """The feeds as the program takes them.

        A size that something looked at has become a constant: the feed then has it instead of None.
        """
        return [
            _taken(feed, variable.fake, self.shapes) for feed, variable, _ in self.feeds.values()
        ]


def _either(both: Twin) -> Any:
    """What an evaluation computes instead is written down beside what training does."""
    trained = both.trained()
    with torch.no_grad():
        tested = both.tested()
    if not isinstance(trained, Tensor):
        return type(trained)(
            unless_testing(one, other) for one, other in zip(trained, tested, strict=True)
        )
    out = unless_testing(trained, tested)
    return out if both.changes is None else both.changes.copy_(out)


class _Sizes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Writes down operations that have no variables but their sizes among their arguments."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(isinstance(v, (Variable, torch.SymInt)) for v in tree_leaves((args, kwargs))):
            return self._recorder.operation(func, args, kwargs)
        return func(*args, **kwargs)


def _taken(feed: Feed, fake: Tensor, shapes: ShapeEnv) -> Feed:
    sizes: list[int | None] = []
    ties: list[str | None] = []
    for size in fake.shape:
        found = shapes.replace(size.node.expr) if isinstance(size, torch.SymInt) else size
        constant = int(found) if not getattr(found, "free_symbols", None) else None
        sizes.append(constant)
        ties.append(None if constant is not None else str(found))
    return dataclasses.replace(feed, shape=tuple(sizes), ties=tuple(ties))


@contextlib.contextmanager
def _refusing_values(func: Any) -> Iterator[None]:
    """A program is written without values; whatever asks for one is refused."""
    try:
        yield
    except (GuardOnDataDependentSymNode, DataDependentOutputException) as error:
        name = getattr(func, "__name__", str(func)).strip("_").partition(".")[0]
        raise PlanError(
            f"the program looks at the values of its tensors ({name}: an `if`, a loop, .item() or "
            "print), which it does not have while it is written: it has one course for all "
            "batches; use torch.where in place of an `if`, fetch what you want to print, or train "
            "eagerly"
        ) from error


def signed(node: fx.Node) -> Part:
    """The part a node belongs to."""
    part: Part = node.meta.get("part", "forward")
    return part
