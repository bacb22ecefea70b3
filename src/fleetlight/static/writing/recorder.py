# SPDX-License-Identifier: Apache-2.0
"""`Recorder`: records the operations on variables as a graph, with the state of the graph."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from fleetlight.errors import PlanError
from fleetlight.static.graph.aliases import written_to
from fleetlight.static.graph.feeds import Feed
from fleetlight.static.graph.lookups import Lookup
from fleetlight.static.graph.rng import CheckpointRng, draws
from fleetlight.static.graph.shape_guards import Shapes
from fleetlight.static.graph.state import Kind, Slot
from fleetlight.static.graph.variable import Variable
from fleetlight.static.ops.marks import LOOKS_AT_TRAINING, unless_testing
from fleetlight.static.writing import recurrent
from fleetlight.torch_compat.fakes import (
    ASKS_FOR_VALUES,
    TRACES,
    UnsupportedOperatorException,
    fakes_of,
    open_fake,
)
from fleetlight.torch_compat.operators import ITEM
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

#: the argument of a function that selects training, and its value in an evaluation
_SWITCHES: dict[Any, tuple[str, Any]] = {
    F.dropout: ("training", False),
    F.dropout1d: ("training", False),
    F.dropout2d: ("training", False),
    F.dropout3d: ("training", False),
    F.alpha_dropout: ("training", False),
    F.feature_alpha_dropout: ("training", False),
    F.batch_norm: ("training", False),
    F.rrelu: ("training", False),
    F.multi_head_attention_forward: ("training", False),
    F.instance_norm: ("use_input_stats", False),
    F.scaled_dot_product_attention: ("dropout_p", 0.0),
}
#: arguments of a recurrent net
_DROP, _TRAIN = 5, 6
#: for functions without a signature: the index of the argument, and its value in an evaluation
_PLACES: dict[Any, tuple[int, Any]] = {
    torch.dropout: (2, False),
    torch.alpha_dropout: (2, False),
    torch.feature_dropout: (2, False),
    torch.feature_alpha_dropout: (2, False),
    torch.batch_norm: (5, False),
    recurrent.lstm: (_TRAIN, False),
    recurrent.gru: (_TRAIN, False),
    torch.rnn_tanh: (_TRAIN, False),
    torch.rnn_relu: (_TRAIN, False),
}


def twin(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Twin | None:
    """The call with its twin in an evaluation, or None if both are equal."""
    if func in _PLACES:
        place, value = _PLACES[func]
        # a recurrent net has two such arguments: the dropout rate, and whether it trains
        if len(args) <= place or args[place] == value or (place == _TRAIN and not args[_DROP]):
            return None
        return Twin(func, args, kwargs, lambda: func(*_put(args, place, value), **kwargs))
    if func not in _SWITCHES:
        return None
    name, value = _SWITCHES[func]
    given = _arguments(func, name, args, kwargs)
    if given.get(name) == value or _keeps_no_statistics(func, given):
        return None
    changes = bool(given.get("inplace"))
    if "inplace" in given:
        given["inplace"] = False
    tested = {**given, name: value}
    return Twin(func, (), given, lambda: func(**tested), args[0] if changes else None)


@dataclasses.dataclass(frozen=True)
class Twin:
    """A call in training and its twin in an evaluation; neither changes its input."""

    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    #: the call of an evaluation
    tested: Callable[[], Any]
    #: the tensor that the caller wanted to change in place
    changes: Tensor | None = None

    def trained(self) -> Any:
        """Make the call of training."""
        return self.func(*self.args, **self.kwargs)


def _put(args: tuple[Any, ...], place: int, value: Any) -> tuple[Any, ...]:
    return (*args[:place], value, *args[place + 1 :])


def _arguments(
    func: Any, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    try:
        bound = inspect.signature(func).bind(*args, **kwargs)
    except ValueError:
        # scaled_dot_product_attention has no signature
        names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
        return {**dict(zip(names, args, strict=False)), name: kwargs.get(name, 0.0), **kwargs}
    bound.apply_defaults()
    return dict(bound.arguments)


def _keeps_no_statistics(func: Any, given: Mapping[str, Any]) -> bool:
    """Whether a norm uses the batch's statistics in an evaluation, too."""
    return func in (F.batch_norm, F.instance_norm) and given.get("running_mean") is None


#: functions of Python and NumPy that read the values of a tensor
_ASKS_VALUES = frozenset(
    (
        *("item", "tolist", "numpy", "__array__"),
        *("__float__", "__int__", "__bool__", "__index__", "__complex__"),
    )
)
#: torch's name of a dynamic size, or a multiple of one
_OPEN = re.compile(r"\b(?:\d+\*)?s\d+\b")
_COPIES = ("__deepcopy__", "__reduce_ex__")


def refuse_function(func: Any) -> None:
    """Refuse a torch function that needs values."""
    name = getattr(func, "__name__", "")
    if name in _ASKS_VALUES:
        raise _needs_values(name)
    if func in (Tensor.backward, torch.autograd.backward):
        raise PlanError(
            "backward() of a variable computes nothing, since a program has no values while it is "
            "written; minimize(optimizer, loss) writes backward and the step into it"
        )
    if name in _COPIES:
        raise PlanError(
            "a variable cannot be copied or pickled, since it has no value; save "
            "the program, or copy the model before you call it"
        )


def refuse_changes(func: Any, args: Sequence[Any], entries: Mapping[int, Any]) -> None:
    """Refuse to change a constant: changes of all runs would accumulate."""
    if func is ITEM:
        raise _needs_values("item")
    for value in written_to(func, args):
        entry = entries.get(id(value))
        if isinstance(value, Variable) or (entry and entry.slot.kind != "constant"):
            continue
        raise PlanError(
            f"{func.overloadpacket.__name__}: a tensor of shape {list(value.shape)}, neither "
            "parameter nor buffer, changes in place, so each run would continue with the changes "
            "of the previous one; create it from a tensor of the program, x.new_zeros(...), or "
            "register it as a buffer"
        )


@contextlib.contextmanager
def recording(func: Any) -> Iterator[None]:
    """Inside the block, `func` is recorded; explain failures in plain words."""
    name = getattr(func, "__name__", str(func)).partition(".")[0]
    was_silent, TRACES.disabled = TRACES.disabled, True
    try:
        yield
    except ASKS_FOR_VALUES as error:
        raise _needs_values(name) from error
    except UnsupportedOperatorException as error:
        raise PlanError(
            f"a program cannot have {name}, since it has dense tensors only ({error}); call it "
            "outside, or train eagerly"
        ) from error
    except (RuntimeError, ValueError) as error:
        if "not tracked with proxy" in str(error):
            raise PlanError(
                f"{name} computes with a dynamic size, which torch {torch.__version__} cannot "
                "write into a program; torch 2.13 can, or train eagerly"
            ) from error
        # torch's own errors, such as for shapes that do not match
        error.args = tuple(_OPEN.sub("any", a) if isinstance(a, str) else a for a in error.args)
        raise
    finally:
        TRACES.disabled = was_silent


def _needs_values(name: str) -> PlanError:
    return PlanError(
        f"the program reads the values of its tensors ({name.strip('_')}: an `if`, a loop, "
        ".item() or print), which do not exist while it is written: it is the same for all "
        "batches; use torch.where instead of an `if`, fetch what you want to print, or train "
        "eagerly"
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
        refuse_function(func)
        args, kwargs = tree_map(self._owned, (args, kwargs))
        if func in recurrent.WRITTEN_OUT:
            func = recurrent.written_out(func, args)
            # its operations are recorded one by one
            return self._with_twin(func, args, kwargs)
        with (
            without_functions(),
            recording(func),
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
        refuse_changes(func, args, self.entries)
        is_again = self.part == "backward"
        if (is_again or self.checkpoint_rng.is_watched) and draws(func, args, kwargs):
            return self.checkpoint_rng.drawn(self._written, func, args, kwargs, is_again)
        return self._written(func, args, kwargs)

    def _written(self, func: Any, args: Any, kwargs: Any) -> Any:
        last = root(self.graph).prev
        given, named = tree_map(self._without_values, (args, kwargs))
        with self._fakes, self._proxies, recording(func):
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
