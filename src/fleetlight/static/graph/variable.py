# SPDX-License-Identifier: Apache-2.0
"""`Variable`: a tensor of a program that is being written. It has a shape, and no values yet."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from torch import SymInt, Tensor

from fleetlight.torch_compat.tensors import tree_leaves, wrapper


class Writer(Protocol):
    """Who writes down what is done with variables."""

    def call(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A function of torch, as it was called."""

    def operation(self, func: Any, args: Any, kwargs: Any) -> Any:
        """An operation of torch, below autograd."""

    def name_of(self, variable: Variable) -> str:
        """The name by which it can be fetched."""

    def rename(self, variable: Variable, name: str) -> None:
        """Give it another name."""


class Variable(Tensor):
    """Whatever is done with it is written down in its program, for autograd as well."""

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
    """As feeds say it: torch's own names of open sizes tell nobody anything."""
    return "?" if isinstance(size, SymInt) else str(size)


def writer_of(values: Any) -> Writer:
    """Who writes the program of the variables among these values."""
    return next(v.writer for v in tree_leaves(values) if isinstance(v, Variable))


def is_variable(value: object) -> bool:
    """True for what a program computes with."""
    return isinstance(value, Variable)


def is_written(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """True where a call of a module is written down; fast, since every call asks."""
    return any(isinstance(a, Variable) for a in args) or any(
        isinstance(a, Variable) for a in kwargs.values()
    )


def has_variable(values: Any) -> bool:
    """True where some of these values belong to a program that is being written."""
    return any(isinstance(value, Variable) for value in tree_leaves(values))
