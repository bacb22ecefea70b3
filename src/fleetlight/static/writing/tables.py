# SPDX-License-Identifier: Apache-2.0
"""Layers with a table in a program: each call records a lookup."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fleetlight.errors import ConfigError, PlanError
from fleetlight.ps.layers.embedding import SparseEmbeddingBag, TableLayer
from fleetlight.static.graph.lookups import ROWS, Lookup, look_up

_IDS = (torch.int64, torch.int32)


def has_table(module: nn.Module) -> bool:
    """Whether the rows of a layer are, or will be, in a table."""
    return isinstance(module, TableLayer) or is_sparse(module)


def is_sparse(module: nn.Module) -> bool:
    """Whether a layer of torch has sparse gradients, so that servers store its rows."""
    return isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse


@contextlib.contextmanager
def written(module: nn.Module, lookups: list[Lookup]) -> Iterator[None]:
    """Inside the block, layers of the module record lookups."""
    layers = [part for part in module.modules() if has_table(part)]
    before = [layer.__dict__.get(_place(layer)) for layer in layers]
    for layer in layers:
        layer.__dict__[_place(layer)] = _Writing(layer, lookups)
    try:
        yield
    finally:
        for layer, value in zip(layers, before, strict=True):
            del layer.__dict__[_place(layer)]
            if value is not None:
                layer.__dict__[_place(layer)] = value


def _place(layer: nn.Module) -> str:
    # the user may have wrapped the forward of our own layers
    return "written" if isinstance(layer, TableLayer) else "forward"


class _Writing:
    """Records a lookup of a layer."""

    def __init__(self, layer: nn.Module, lookups: list[Lookup]) -> None:
        self._layer = layer
        self._lookups = lookups

    def __call__(
        self,
        ids: Tensor,
        offsets: Tensor | None = None,
        per_sample_weights: Tensor | None = None,
        show: Tensor | None = None,
        click: Tensor | None = None,
    ) -> Tensor:
        layer, name = self._layer, type(self._layer).__name__
        if ids.dtype not in _IDS:
            raise ConfigError(
                f"{name}: got ids of type {ids.dtype}, expected torch.int64 or torch.int32; write "
                "ids.long() if they are whole numbers"
            )
        mode: Any = _mode(layer)
        if mode != ROWS:
            _check_bags(name, ids, offsets)
        weight: Tensor = layer.weight  # type: ignore[assignment]
        lookup = Lookup(
            layer,
            mode,
            trains=torch.is_grad_enabled() and weight.requires_grad,
            drops_padding=mode != ROWS or isinstance(layer, TableLayer),
        )
        self._lookups.append(lookup)
        facts = len(self._lookups) - 1, mode, lookup.includes_last
        return look_up(weight, ids, offsets, per_sample_weights, (show, click), facts)


def _mode(layer: nn.Module) -> Any:
    if isinstance(layer, SparseEmbeddingBag):
        return layer.combiner
    return layer.mode if isinstance(layer, nn.EmbeddingBag) else ROWS


def _check_bags(name: str, ids: Tensor, offsets: Tensor | None) -> None:
    if (ids.dim(), offsets is None) not in ((2, True), (1, False)):
        raise ConfigError(
            f"{name}: got ids of {ids.dim()} dimensions and {'no ' if offsets is None else ''}"
            "offsets; expected 2-D ids, or 1-D ids and offsets"
        )


def named(lookups: Sequence[Lookup], root: nn.Module) -> tuple[Lookup, ...]:
    """The lookups with the names of their tables on parameter servers."""
    paths = {id(module): path for path, module in root.named_modules()}
    owners: dict[int, str] = {}
    for module in root.modules():
        if has_table(module):
            owners.setdefault(id(module.weight), _table_of(module, paths))
    for lookup in lookups:
        owners.setdefault(id(lookup.layer.weight), _table_of(lookup.layer, paths))
    return tuple(
        Lookup(one.layer, one.mode, one.trains, one.drops_padding, owners[id(one.layer.weight)])
        for one in lookups
    )


def _table_of(layer: nn.Module, paths: dict[int, str]) -> str:
    name = getattr(layer, "table", None) or paths.get(id(layer)) or type(layer).__name__
    return str(name)


def refuse_without_servers(lookups: Sequence[Lookup], model: nn.Module) -> None:
    """Refuse lookups that train: only parameter servers step tables."""
    for lookup in named(lookups, model):
        name = type(lookup.layer).__name__
        if isinstance(lookup.layer, TableLayer):
            raise PlanError(
                f"{lookup.table}: parameter servers store the rows of a {name}, but "
                "this program has none: call fleet.init() and minimize with the optimizer that "
                "fleet.distributed_optimizer returned, or use torch.nn.Embedding"
            )
        if lookup.trains:
            raise PlanError(
                f"{lookup.table}: a program has no gradients of {name}(sparse=True); build "
                "it with sparse=False, or train with parameter servers (fleet.init(), and the "
                "optimizer that fleet.distributed_optimizer returned), which store its rows"
            )
