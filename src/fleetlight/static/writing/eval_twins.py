# SPDX-License-Identifier: Apache-2.0
"""Twins of functions that compute differently in training and in an evaluation."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fleetlight.static.writing import recurrent

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
