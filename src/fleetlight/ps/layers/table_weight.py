# SPDX-License-Identifier: Apache-2.0
"""`TableWeight`: the Parameter of a table, which refuses computation.

A table's rows are on the parameter servers, so the Parameter in the model has no elements. Torch
would compute with it without an error: a penalty on it is zero. As with torch's own
`UninitializedParameter`, only the operations that optimizers, modules and tools need are allowed.

torch.tensor(w), torch.Tensor(w), torch.vmap and torch.func.grad do not dispatch to tensor
subclasses, and nn.init.orthogonal_(w) ignores empty tensors: these cannot be refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fleetlight.errors import PlanError
from fleetlight.torch_compat.tensors import is_swappable, without_functions

_ADVICE = (
    "for weight decay, set weight_decay in the param group of the table; for a penalty, use the "
    "rows that were looked up, such as layer(ids).square().sum(); to read rows, call "
    "fleet.rows(layer, ids); first values are those of initializer="
)
_AVERAGES_ADVICE = (
    "to average parameters, leave tables out: average [p for p in model.parameters() if p.numel()],"
    " or give AveragedModel(model, avg_fn=...) a function of (averaged, p, n) that returns averaged"
    " where it has no elements; "
)


def _direct(attribute: Any) -> Any:
    """A torch attribute read at every step, without the 5 us of `__torch_function__`."""

    def read(self: Tensor) -> Any:
        with without_functions():
            return attribute.__get__(self)

    def write(self: Tensor, value: Any) -> None:
        with without_functions():
            attribute.__set__(self, value)

    def remove(self: Tensor) -> None:
        with without_functions():
            attribute.__delete__(self)

    return property(read, write, remove)


class TablePlaceholder(Tensor):
    """A tensor without elements that belongs to a table: its weight, or a copy of that."""

    #: the name of the table, once known
    table_name: str
    grad = _direct(Tensor.grad)

    @property
    def _is_param(self) -> bool:
        return isinstance(self, TableWeight)

    @_is_param.setter
    def _is_param(self, value: bool) -> None:
        # nn.Parameter(copy) sets this on tensor subclasses: after module.to("meta"), or when
        # load_state_dict(assign=True) puts a copy into a module
        if value:
            self.__class__ = TableWeight

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func not in _ALLOWED and not _is_property(func) and not _is_own(func):
            check = _CONDITIONAL.get(func)
            if check is None or not check(*args, **kwargs):
                raise _refusal(func, args, kwargs)
        with without_functions():
            found = func(*args, **kwargs)
        is_copy = type(found) is Tensor and func is not _GRADIENT
        return _named_as(args[0], found) if is_copy else found

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        with without_functions():
            trained = "" if self.requires_grad else ", requires_grad=False"
            return (
                f"{type(self).__name__}({name_of(self)}, dim={self.shape[-1]}{trained}; "
                "its rows are on the parameter servers)"
            )

    def as_subclass(self, cls: type[Any]) -> Any:
        """Raise for classes that allow computation."""
        if not issubclass(cls, TablePlaceholder):
            raise refusal_of(name_of(self), "torch.Tensor.as_subclass")
        return super().as_subclass(cls)

    def __format__(self, spec: str) -> str:
        return format(repr(self), spec)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            with without_functions():
                copied = torch.empty_like(self.detach()).as_subclass(TablePlaceholder)
            copied.__dict__["table_name"] = name_of(self)
            memo[id(self)] = copied
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        # reading the file must not require Fleetlight
        with without_functions():
            return self.detach().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


class TableWeight(TablePlaceholder, nn.Parameter):
    """The Parameter of a table."""

    def __new__(cls, dim: int, name: str) -> TableWeight:
        """Create a weight for rows of `dim` numbers."""
        made = nn.Parameter(torch.empty(0, dim))
        stand_for(made, name)
        assert isinstance(made, TableWeight)
        return made

    # Parameter has no __init__ of its own
    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            with without_functions():
                copied = nn.Parameter(torch.empty_like(self.detach()), self.requires_grad)
            memo[id(self)] = stand_for(copied, name_of(self))
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        with without_functions():
            facts = self.shape[-1], str(self.dtype), self.requires_grad, name_of(self)
        return remade, facts


def remade(dim: int, dtype: str, requires_grad: bool, name: str) -> nn.Parameter:
    """Rebuild a weight that was pickled with its module."""
    empty = torch.empty(0, dim, dtype=getattr(torch, dtype.removeprefix("torch.")))
    return stand_for(nn.Parameter(empty, requires_grad), name)


def stand_for(weight: nn.Parameter, name: str) -> nn.Parameter:
    """Turn a Parameter into the weight of a table; the object stays the same."""
    with without_functions():
        if len(weight):
            weight.data = weight.data.new_empty(0, weight.shape[-1])
    weight.__class__ = TableWeight
    weight.__dict__["table_name"] = name
    return weight


def name_of(weight: Tensor) -> str:
    """The name of a placeholder's table."""
    return str(weight.__dict__.get("table_name", "a table"))


def give_name(weight: Tensor, name: str) -> None:
    """Set the name, which is known once the model is registered."""
    if isinstance(weight, TablePlaceholder):
        weight.__dict__["table_name"] = name


def refusal_of(name: str, operation: str, *, averages: bool = False) -> PlanError:
    """The error for an operation on the weight of a table, perhaps for a moving average."""
    return PlanError(
        f"{name}: {operation} was called on the weight of a table, which has no elements in this "
        "process, since its rows are on the parameter servers; "
        f"{_AVERAGES_ADVICE if averages else ''}{_ADVICE}"
    )


def _named_as(placeholder: Any, found: Tensor) -> Tensor:
    """Make the result of an operation a placeholder too, if it has no elements."""
    with without_functions():
        if not isinstance(placeholder, TablePlaceholder) or found.shape != placeholder.shape:
            return found
        copied = found.as_subclass(TablePlaceholder)
        copied.__dict__["table_name"] = name_of(placeholder)
        return copied


def _is_property(func: Any) -> bool:
    """True for reading or setting an attribute that does not compute."""
    return type(func) is _METHOD_WRAPPER and func not in _COMPUTED


def _is_own(func: Any) -> bool:
    """True for a lookup of a program, and for the first check of `Module.to`."""
    return getattr(func, "namespace", "") == "fleetlight" or is_swappable(func)


def _refusal(func: Any, args: Any, kwargs: Any) -> PlanError:
    placeholders = []
    for value in (*args, *kwargs.values()):
        flat = value if isinstance(value, (list, tuple)) else [value]
        placeholders += [one for one in flat if isinstance(one, TablePlaceholder)][:1]
    operation = torch.overrides.resolve_name(func) or getattr(func, "__name__", str(func))
    averages = len(placeholders) > 1 or (
        func in _DECAYING and not isinstance(placeholders[0], TableWeight)
    )
    return refusal_of(name_of(placeholders[0]), operation, averages=averages)


def _is_empty(_: Any, value: Any, *__: Any, **___: Any) -> bool:
    """True for an empty value, as `load_state_dict` assigns it."""
    with without_functions():
        return isinstance(value, Tensor) and value.dim() == 2 and not value.numel()


_GRADIENT = Tensor.grad.__get__  # type: ignore[union-attr]
_METHOD_WRAPPER = type(_GRADIENT)
#: properties that compute
_COMPUTED: frozenset[Any] = frozenset(
    getattr(getattr(Tensor, name), access)
    for name, access in (
        ("T", "__get__"),
        ("H", "__get__"),
        ("mT", "__get__"),
        ("mH", "__get__"),
        ("real", "__get__"),
        ("imag", "__get__"),
        ("real", "__set__"),
        ("imag", "__set__"),
        ("data", "__set__"),
    )
)
#: operations of moving averages on copies of parameters
_DECAYING: frozenset[Any] = frozenset((
    Tensor.mul_, Tensor.add_, Tensor.lerp_, Tensor.mul, Tensor.__mul__, Tensor.__rmul__,
    torch.lerp, torch.mul,
))  # fmt: skip
#: allowed operations, by purpose
_ALLOWED: frozenset[Any] = frozenset((
    # queries
    Tensor.size, Tensor.dim, Tensor.ndimension, Tensor.numel, Tensor.nelement, Tensor.__len__,
    Tensor.stride, Tensor.storage_offset, Tensor.is_contiguous, Tensor.element_size, Tensor.type,
    Tensor.is_floating_point, Tensor.is_complex, Tensor.is_signed, Tensor.is_pinned,
    Tensor.get_device, Tensor.data_ptr, Tensor.is_shared, Tensor.untyped_storage, Tensor.__hash__,
    Tensor.is_conj, Tensor.is_neg, Tensor.is_inference, Tensor.is_set_to, Tensor.__dir__,
    torch.is_floating_point, torch.is_complex, torch.numel, torch.is_conj, torch.is_neg,
    torch.is_inference,
    # gradients and hooks
    Tensor.requires_grad_, Tensor.retain_grad, Tensor.register_hook,
    Tensor.register_post_accumulate_grad_hook, Tensor.detach, Tensor.detach_, torch.detach,
    # module.to() and the like, share_memory()
    Tensor.to, Tensor.cpu, Tensor.cuda, Tensor.float, Tensor.double, Tensor.half, Tensor.bfloat16,
    Tensor.contiguous, Tensor.pin_memory, Tensor.share_memory_,
    # copies, and the initial state of optimizers
    Tensor.clone, torch.clone, torch.empty_like, torch.zeros_like, torch.ones_like,
    torch.full_like, Tensor.new_empty, Tensor.new_zeros,
))  # fmt: skip
#: operations allowed for some values only
_CONDITIONAL: dict[Any, Callable[..., bool]] = {
    Tensor.copy_: _is_empty,
    Tensor.data.__set__: _is_empty,  # type: ignore[attr-defined]
}

# files of parameters are read with weights_only=True
torch.serialization.add_safe_globals([remade])
