# SPDX-License-Identifier: Apache-2.0
"""The ids of many features, in the forms that scripts have them.

A form is recognised by its methods, so that torchrec is not imported.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any, cast

import torch
from torch import Tensor

from fleetlight.errors import ConfigError, did_you_mean

#: ids by feature, or torchrec's KeyedJaggedTensor
Features = Any
#: numbers of ids by feature: weights, shows or clicks
Numbers = Mapping[str, Tensor] | None
_EXPECTED = (
    "expected 2-D ids, a pair of 1-D ids and offsets, or a nested tensor with the layout "
    "torch.jagged"
)


@dataclasses.dataclass(frozen=True)
class FeatureIds:
    """The ids of one feature: 2-D, or 1-D with the start of each sample."""

    ids: Tensor
    offsets: Tensor | None
    #: True when the offsets end with the number of ids
    ends: bool
    weights: Tensor | None = None
    show: Tensor | None = None
    click: Tensor | None = None
    #: True for a nested tensor
    is_nested: bool = False

    @property
    def is_counted(self) -> bool:
        """True with shows or clicks."""
        return self.show is not None or self.click is not None


def feature_ids(
    given: Features,
    names: Collection[str],
    ends: bool,
    weights: Numbers,
    counts: tuple[Numbers, Numbers],
) -> dict[str, FeatureIds]:
    """The ids of each feature; `ends`: the offsets of a pair end with the number of ids."""
    if isinstance(given, Mapping):
        found = {name: _feature_ids(name, its, ends) for name, its in given.items()}
    elif all(hasattr(given, method) for method in ("keys", "values", "lengths")):
        found = _keyed_ids(given)
    else:
        raise ConfigError(
            f"EmbeddingCollection: got a {type(given).__name__}, expected a dict of ids by feature "
            "or a KeyedJaggedTensor of torchrec"
        )
    _check_names("the batch", found, names)
    missing = [name for name in names if name not in found]
    if missing:
        raise ConfigError(
            f"EmbeddingCollection: the batch has no ids of feature {missing[0]!r}, expected all of "
            f"{', '.join(names)}; a feature without ids in this batch has offsets of zeros"
        )
    for what, numbers in zip(("weights", "show", "click"), (weights, *counts), strict=True):
        for name, values in _numbers(what, numbers, names).items():
            more: Any = {what: values}
            found[name] = dataclasses.replace(found[name], **more)
    return found


def _numbers(what: str, given: Numbers, names: Collection[str]) -> dict[str, Any]:
    """The weights, shows or clicks of features, as tensors like their ids."""
    if given is None:
        return {}
    if not isinstance(given, Mapping) or not all(isinstance(its, Tensor) for its in given.values()):
        raise ConfigError(
            f"EmbeddingCollection: got {what} of type {type(given).__name__}, expected a dict of "
            "tensors by feature, with a number for each id"
        )
    _check_names(what, given, names)
    return {name: _flat(its) for name, its in given.items()}


def _flat(numbers: Any) -> Any:
    return numbers.values() if numbers.is_nested else numbers


def _check_names(what: str, given: Collection[str], names: Collection[str]) -> None:
    unknown = [name for name in given if name not in names]
    if unknown:
        raise ConfigError(
            f"EmbeddingCollection: {what} has {unknown[0]!r}, which is no feature of this layer; "
            f"{did_you_mean(str(unknown[0]), list(names))}"
        )


def _feature_ids(name: str, given: Any, ends: bool) -> FeatureIds:
    if isinstance(given, Tensor):
        if given.is_nested:
            return _nested_ids(name, given)
        if given.dim() == 2:
            return FeatureIds(given, None, ends)
        got = f"ids of {given.dim()} dimensions"
        advice = "; one id for each sample is ids.unsqueeze(1)" if given.dim() == 1 else ""
        raise ConfigError(f"EmbeddingCollection: feature {name!r} has {got}, {_EXPECTED}{advice}")
    if (
        isinstance(given, (tuple, list))
        and [isinstance(one, Tensor) for one in given] == [True] * 2
    ):
        ids, offsets = given
        if (ids.dim(), offsets.dim()) == (1, 1):
            return FeatureIds(ids, offsets, ends)
        got = f"a pair of {ids.dim()}-D ids and {offsets.dim()}-D offsets"
        raise ConfigError(f"EmbeddingCollection: feature {name!r} has {got}, {_EXPECTED}")
    got = type(given).__name__
    raise ConfigError(f"EmbeddingCollection: feature {name!r} has a {got}, {_EXPECTED}")


def _nested_ids(name: str, given: Any) -> FeatureIds:
    if given.layout != torch.jagged or given.dim() != 2:
        raise ConfigError(
            f"EmbeddingCollection: feature {name!r} has a nested tensor of {given.dim()} "
            f"dimensions with the layout {given.layout}, {_EXPECTED} and 2 dimensions"
        )
    whole = given if given.lengths() is None else given.contiguous()
    return FeatureIds(whole.values(), whole.offsets(), True, is_nested=True)


def _keyed_ids(given: Any) -> dict[str, FeatureIds]:
    """The features of a KeyedJaggedTensor: lengths of all samples, key by key."""
    keys, values, lengths = list(given.keys()), given.values(), given.lengths().reshape(-1)
    if len(lengths) % max(1, len(keys)):
        raise ConfigError(
            f"EmbeddingCollection: got {len(lengths)} lengths for {len(keys)} keys, expected the "
            "same number of samples for each key"
        )
    weights_of = getattr(given, "weights_or_none", lambda: None)
    weights = cast("Tensor | None", weights_of())
    size = len(lengths) // max(1, len(keys))
    offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    ends = offsets[::size].tolist() if size else [0] * (len(keys) + 1)
    if ends[-1] != len(values):
        raise ConfigError(
            f"EmbeddingCollection: the lengths of the KeyedJaggedTensor sum to {ends[-1]}, "
            f"expected the number of its values, {len(values)}"
        )
    found = {}
    for number, key in enumerate(keys):
        start, stop = ends[number], ends[number + 1]
        mine = offsets[number * size : (number + 1) * size + 1] - start
        each = None if weights is None else weights[start:stop]
        found[key] = FeatureIds(values[start:stop], mine, True, each)
    return found
