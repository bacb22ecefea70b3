# SPDX-License-Identifier: Apache-2.0
"""`Variable`: a tensor of a program that is being written. It has a shape but no values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from torch import SymInt, Tensor

from fleetlight.torch_compat.tensors import tree_leaves, wrapper


class Writer(Protocol):
    """Records the operations on variables."""

    def call(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Record a call of a torch function."""

    def operation(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Record an operation below autograd."""

    def name_of(self, variable: Variable) -> str:
        """The name by which it can be fetched."""

    def rename(self, variable: Variable, name: str) -> None:
        """Give it another name."""


class Variable(Tensor):
    """Its program records every operation on it, including those of autograd."""

    fake: Tensor
    writer: Writer

    @staticmethod
    def __new__(cls, fake: Tensor, writer: Writer, requires_grad: bool = False) -> Variable:
        made = wrapper(
            cls,
            fake.size(),
            strides=fake.stride(),
            storage_offset=fake.storage_offset(),
            dtype=fake.dtype,
            device=fake.device,
            layout=fake.layout,
            requires_grad=requires_grad,
        )
        made.fake, made.writer = fake, writer
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return writer_of((args, kwargs)).call(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return writer_of((args, kwargs)).operation(func, args, kwargs or {})

    @property
    def name(self) -> str:
        """The name by which it can be fetched."""
        return self.writer.name_of(self)

    @name.setter
    def name(self, name: str) -> None:
        self.writer.rename(self, name)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        kind = str(self.fake.dtype).removeprefix("torch.")
        return f"Variable {self.name}: {kind}[{', '.join(map(_text, self.fake.shape))}]"

    def __format__(self, spec: str) -> str:
        return format(float(self), spec) if spec else repr(self)


def _text(size: int | SymInt) -> str:
    """A size as in feeds: torch's own names of dynamic sizes mean nothing to users."""
    return "?" if isinstance(size, SymInt) else str(size)


def writer_of(values: Any) -> Writer:
    """The writer of the first variable among these values."""
    return next(v.writer for v in tree_leaves(values) if isinstance(v, Variable))


def is_variable(value: object) -> bool:
    """Whether a value is a variable of a program."""
    return isinstance(value, Variable)


def is_written(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an argument of a module call is a variable; fast, since every call checks."""
    return any(isinstance(a, Variable) for a in args) or any(
        isinstance(a, Variable) for a in kwargs.values()
    )


def has_variable(values: Any) -> bool:
    """Whether a nested value has a variable."""
    return any(isinstance(value, Variable) for value in tree_leaves(values))
