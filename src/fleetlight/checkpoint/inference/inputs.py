# SPDX-License-Identifier: Apache-2.0
"""The inputs of an exported program: their names, types and shapes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec
import torch
from torch import Tensor

from fleetlight.checkpoint.formats.tensors import dtype_name
from fleetlight.errors import ConfigError, did_you_mean

Inputs = Tensor | Sequence[Tensor] | Mapping[str, Tensor]


class InputEntry(msgspec.Struct, frozen=True):
    """One input; None in `shape` is the batch dimension."""

    name: str
    dtype: str
    shape: tuple[int | None, ...]

    def __str__(self) -> str:
        return f"{self.name}: {self.dtype}{sizes_text(self.shape)}"


def sizes_text(shape: Iterable[int | None]) -> str:
    """`[?, 4]`."""
    return f"[{', '.join('?' if size is None else str(size) for size in shape)}]"


def describe_input(name: str, example: Tensor, has_batch: bool) -> InputEntry:
    """The entry of inputs like `example`."""
    shape = (None, *example.shape[1:]) if has_batch else tuple(example.shape)
    return InputEntry(name, dtype_name(example.dtype), shape)


def name_examples(
    forward: Callable[..., object], examples: Inputs
) -> tuple[dict[str, Tensor], bool]:
    """Example inputs by the names `forward` gives them, and whether it takes them by position."""
    by_name = isinstance(examples, Mapping)
    args = () if isinstance(examples, Mapping) else _as_tuple(examples)
    kwargs = dict(examples) if isinstance(examples, Mapping) else {}
    signature = inspect.signature(forward)
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError as error:
        raise ConfigError(
            f"the example inputs do not fit forward{signature}: {error}; "
            f"expected a tensor, a sequence in its order, or a dict with its names"
        ) from error
    named = kwargs if by_name else _flat(bound)
    for name, value in named.items():
        if not isinstance(value, Tensor):
            raise ConfigError(
                f"example input {name!r}: got a {type(value).__name__}, expected a tensor; "
                f"wrap the model in a module whose forward takes tensors only"
            )
    return named, not by_name


def bind_inputs(
    entries: Sequence[InputEntry], args: Sequence[Tensor], kwargs: Mapping[str, Tensor]
) -> list[Tensor]:
    """The inputs of a call in the order of `entries`, each checked against its entry."""
    names = [entry.name for entry in entries]
    if len(args) > len(names):
        raise ConfigError(f"got {len(args)} inputs, expected {len(names)}: {', '.join(names)}")
    given = dict(zip(names, args, strict=False))
    for name, value in kwargs.items():
        if name not in names:
            raise ConfigError(f"unknown input {name!r}; {did_you_mean(name, names)}")
        if name in given:
            raise ConfigError(f"input {name!r} was given twice, by position and by name")
        given[name] = value
    missing = [name for name in names if name not in given]
    if missing:
        raise ConfigError(f"missing input {missing[0]!r}; expected all of: {', '.join(names)}")
    for entry in entries:
        _check(entry, given[entry.name])
    _check_batch(entries, given)
    return [given[name] for name in names]


def _as_tuple(examples: Tensor | Sequence[Tensor]) -> tuple[Tensor, ...]:
    return (examples,) if isinstance(examples, Tensor) else tuple(examples)


def _flat(bound: inspect.BoundArguments) -> dict[str, Tensor]:
    """Arguments by name; those of `*xs` are called xs_0, xs_1, ..."""
    named: dict[str, Tensor] = {}
    for name, value in bound.arguments.items():
        if bound.signature.parameters[name].kind is inspect.Parameter.VAR_POSITIONAL:
            named.update({f"{name}_{i}": item for i, item in enumerate(value)})
        else:
            named[name] = value
    return named


def _check(entry: InputEntry, value: object) -> None:
    expected = f"{entry.dtype}{_shape_text(entry.shape)}"
    if not isinstance(value, Tensor):
        raise ConfigError(
            f"input {entry.name!r}: got a {type(value).__name__}, expected a tensor {expected}"
        )
    fits = len(value.shape) == len(entry.shape) and all(
        want in (None, got) for want, got in zip(entry.shape, value.shape, strict=True)
    )
    if not fits or value.dtype is not getattr(torch, entry.dtype):
        got = f"{dtype_name(value.dtype)}{_shape_text(tuple(value.shape))}"
        raise ConfigError(f"input {entry.name!r}: got {got}, expected {expected}")


def _check_batch(entries: Sequence[InputEntry], given: Mapping[str, Tensor]) -> None:
    batched = [entry.name for entry in entries if None in entry.shape]
    for name in batched:
        if given[name].shape[0] == 0:
            raise ConfigError(f"input {name!r} is an empty batch; expected at least one row")
        if given[name].shape[0] != given[batched[0]].shape[0]:
            raise ConfigError(
                f"input {name!r} has a batch of {given[name].shape[0]}, but {batched[0]!r} has one "
                f"of {given[batched[0]].shape[0]}; expected the same number of rows in both"
            )


def _shape_text(shape: Sequence[int | None]) -> str:
    return "[" + ", ".join("batch" if size is None else str(size) for size in shape) + "]"
