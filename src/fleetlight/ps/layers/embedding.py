# SPDX-License-Identifier: Apache-2.0
"""The layers whose rows are in a table: `SparseEmbedding`, `SparseEmbeddingBag`.

They behave like torch's, except that any int64 is an id, training inserts a row when it first reads
its id, and `weight` has no elements.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fleetlight.errors import ConfigError, PlanError, names_arguments
from fleetlight.kernels import sum_by
from fleetlight.kernels.ids.bags import Mode
from fleetlight.ps.layers.empty_state import warn_without_rows
from fleetlight.ps.layers.entries import EntryPolicy, ShowClickEntry
from fleetlight.ps.layers.handle import Counts, TableHandle, Visit
from fleetlight.ps.layers.lookup import embed, embed_bags
from fleetlight.ps.layers.table_weight import TableWeight
from fleetlight.ps.plan import DTYPES, EVICT, InitializerPlan
from fleetlight.ps.update import Floats, Ids
from fleetlight.ps.wire_forms import FORMS
from fleetlight.torch_compat.tensors import without_functions

#: ("uniform", low, high), ("normal", mean, std), ("constant", value) or "zeros"
Initializer = str | tuple[str, float] | tuple[str, float, float]
DEFAULT: Initializer = ("uniform", -0.05, 0.05)
_NUMBERS = {"uniform": 2, "normal": 2, "constant": 1, "zeros": 0}
#: shows and clicks of each id of a forward
Given = tuple[Floats | None, Floats | None]
_UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_SIZE = re.compile(rf"(\d+(?:\.\d+)?) ?({'|'.join(_UNITS)})")
COMBINERS = ("sum", "mean", "max")
#: rows that a cache keeps if the script sets no number
CACHE_ROWS = 100_000
DEVICE = "device"


class TableLayer(nn.Module):
    """Base of both layers: looks up rows of ids in a table."""

    #: replaces the lookup while a program is captured
    written: Callable[..., Tensor] | None = None

    @names_arguments
    def __init__(
        self,
        dim: int,
        *,
        optimizer: str | None = None,
        initializer: Initializer = DEFAULT,
        entry: EntryPolicy | None = None,
        padding_idx: int | None = None,
        table: str | None = None,
        wire: str | None = None,
        dtype: str | None = None,
        cache: str | None = None,
        cache_rows: int = CACHE_ROWS,
        memory: int | str | None = None,
        max_rows: int | None = None,
        evict: str | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(dim, int) or isinstance(dim, bool) or dim < 1:
            raise ConfigError(
                f"{type(self).__name__}: got dim={dim!r}, expected a positive integer"
            )
        if entry is not None and not isinstance(entry, EntryPolicy):
            raise ConfigError(
                f"{type(self).__name__}: got entry={entry!r}, expected a CountFilterEntry, a "
                "ProbabilityEntry, a ShowClickEntry or a ScoreEntry"
            )
        for name, got, known in (("wire", wire, tuple(FORMS)), ("dtype", dtype, DTYPES)):
            if got is not None and got not in known:
                raise ConfigError(
                    f"{type(self).__name__}: got {name}={got!r}, expected one of {known}, or None "
                    "for that of the strategy"
                )
        _check_cache(type(self).__name__, cache, cache_rows)
        _check_maximum(type(self).__name__, max_rows, evict, entry)
        self.dim = dim
        self.optimizer = optimizer
        self.initializer = initializer_plan(initializer)
        self.entry = entry
        self.padding_idx = padding_idx
        self.table = table
        self.wire = wire
        self.dtype = dtype
        #: where rows stay between lookups, and how many
        self.cache = cache
        self.cache_rows = cache_rows
        #: the bytes of rows that each server has in memory; None: all
        self.memory = memory_bytes(type(self).__name__, memory)
        #: the most rows of the table in the job, and which leave it first
        self.max_rows = max_rows
        self.evict = evict if max_rows is None else evict or EVICT[0]
        #: represents the table in `model.parameters()` and in param groups
        self.weight: nn.Parameter = TableWeight(dim, table or f"a {type(self).__name__}")
        self.handle: TableHandle | None = None
        self.register_load_state_dict_pre_hook(warn_without_rows)  # type: ignore[no-untyped-call]

    def extra_repr(self) -> str:
        """The arguments that `print(model)` shows."""
        names = (
            "padding_idx",
            "table",
            "entry",
            "wire",
            "dtype",
            "cache",
            "memory",
            "max_rows",
            "evict",
        )
        settings = {name: getattr(self, name) for name in names}
        return ", ".join(
            [str(self.dim), *(f"{k}={v!r}" for k, v in settings.items() if v is not None)]
        )

    def opened(self) -> TableHandle:
        """The table, once it is open."""
        if self.handle is None:
            raise PlanError(
                f"{type(self).__name__}: its table is not open yet; after fleet.init() "
                "register the model that holds it, model = fleet.distributed_model(model), and "
                "call that model"
            )
        return self.handle

    def rows(self, ids: Tensor, show: Tensor | None = None, click: Tensor | None = None) -> Tensor:
        """Return a row for each id; the row of padding is zero."""
        flat = ids_of(ids, type(self).__name__)
        self.opened().reached(flat)
        real = None if self.padding_idx is None else flat != self.padding_idx
        given = given_counts(show, click, len(flat), real)
        rows = self._rows(flat if real is None or real.all() else flat[real], given)
        if real is not None and not real.all():
            where = torch.from_numpy(np.flatnonzero(real)).to(rows.device)
            rows = rows.new_zeros(len(flat), self.dim).index_copy(0, where, rows)
        return rows.view(*ids.shape, self.dim)

    def _rows(self, flat: Ids, given: Given) -> Tensor:
        visit = self.opened().visit(flat, self.inserts())
        return embed(self.weight, visit, self.counts(visit, given), None)

    def inserts(self) -> bool:
        """True when a lookup inserts rows for unknown ids, since it trains them."""
        with without_functions():
            return torch.is_grad_enabled() and self.weight.requires_grad

    def counts(self, visit: Visit, given: Given) -> Counts:
        """Sum shows and clicks of each distinct id."""
        show, click = given
        if show is None and click is None:
            return None
        ids = len(visit.inverse)
        # with clicks only, every id counts as shown
        shown = np.ones(ids, np.float32) if show is None else show
        clicked = np.zeros(ids, np.float32) if click is None else click
        both = np.stack([shown, clicked], axis=1)
        summed = sum_by(both, visit.inverse, len(visit.wanted.ids))
        return np.ascontiguousarray(summed[:, 0]), np.ascontiguousarray(summed[:, 1])


class SparseEmbedding(TableLayer):
    """Like `torch.nn.Embedding` over all int64 ids, with rows on the parameter servers.

    Layers with the same `table` share its rows.

    Args:
        dim: the number of values in a row.
        optimizer: the rule of the rows, such as `"adagrad"`; by default that of the optimizer.
        initializer: the first values: `("uniform", low, high)`, `("normal", mean, std)`,
            `("constant", value)` or `"zeros"`.
        entry: when a row is inserted or trained: a `CountFilterEntry`, `ProbabilityEntry`,
            `ShowClickEntry` or `ScoreEntry`.
        padding_idx: an id whose row is zero and not trained.
        table: the name of the table; by default the path of the layer in the model.
        wire: how rows and gradients travel: `"fp32"`, `"bf16"`, `"fp16"` or `"int8"`.
        dtype: the type of the weights on servers: `"fp32"` or `"bf16"`.
        cache: `"device"` keeps rows in the memory of the worker's GPU.
        cache_rows: how many rows the cache keeps.
        memory: the bytes of rows that each server has in memory, such as `"8 GiB"`; None: all rows.
        max_rows: the most rows of the table in the job.
        evict: which rows leave a table with `max_rows` first.

    Raises:
        ConfigError: an argument is wrong.

    Example:
        >>> fleet.init()
        >>> model = fleet.distributed_model(fleet.nn.SparseEmbedding(4))
        >>> model(torch.tensor([[7, -1], [10**18, 7]])).shape
        torch.Size([2, 2, 4])
    """

    def forward(
        self, ids: Tensor, show: Tensor | None = None, click: Tensor | None = None
    ) -> Tensor:
        """Return rows for ids of any shape; a ShowClickEntry counts `show` and `click`."""
        if self.written is not None:
            return self.written(ids, show=show, click=click)
        return self.rows(ids, show, click)


class SparseEmbeddingBag(TableLayer):
    """Like `torch.nn.EmbeddingBag` over all int64 ids: sums, means or maxima of rows.

    Bags are the rows of 2-D ids, or start at `offsets` of 1-D ids.

    Args:
        dim: the number of values in a row.
        combiner: `"sum"`, `"mean"` or `"max"`.
        include_last_offset: True if `offsets` also has the end of the last bag.
        optimizer: the rule of the rows; by default that of the optimizer.
        initializer: the first values, as in `SparseEmbedding`.
        entry: when a row is inserted or trained, as in `SparseEmbedding`.
        padding_idx: an id that counts in no bag.
        table: the name of the table; by default the path of the layer in the model.
        wire: how rows and gradients travel: `"fp32"`, `"bf16"`, `"fp16"` or `"int8"`.
        dtype: the type of the weights on servers: `"fp32"` or `"bf16"`.
        cache: `"device"` keeps rows in the memory of the worker's GPU.
        cache_rows: how many rows the cache keeps.
        memory: the bytes of rows that each server has in memory, such as `"8 GiB"`; None: all rows.
        max_rows: the most rows of the table in the job.
        evict: which rows leave a table with `max_rows` first.

    Raises:
        ConfigError: an argument is wrong.

    Example:
        >>> fleet.init()
        >>> model = fleet.distributed_model(fleet.nn.SparseEmbeddingBag(4, "sum"))
        >>> model(torch.tensor([7, 9, 9]), offsets=torch.tensor([0, 2])).shape
        torch.Size([2, 4])
    """

    @names_arguments
    def __init__(
        self,
        dim: int,
        combiner: Mode = "mean",
        *,
        include_last_offset: bool = False,
        optimizer: str | None = None,
        initializer: Initializer = DEFAULT,
        entry: EntryPolicy | None = None,
        padding_idx: int | None = None,
        table: str | None = None,
        wire: str | None = None,
        dtype: str | None = None,
        cache: str | None = None,
        cache_rows: int = CACHE_ROWS,
        memory: int | str | None = None,
        max_rows: int | None = None,
        evict: str | None = None,
    ) -> None:
        super().__init__(
            dim,
            optimizer=optimizer,
            initializer=initializer,
            entry=entry,
            padding_idx=padding_idx,
            table=table,
            wire=wire,
            dtype=dtype,
            cache=cache,
            cache_rows=cache_rows,
            memory=memory,
            max_rows=max_rows,
            evict=evict,
        )
        if combiner not in COMBINERS:
            raise ConfigError(
                f"SparseEmbeddingBag: got combiner={combiner!r}, expected one of {COMBINERS}"
            )
        self.combiner: Mode = combiner
        self.include_last_offset = include_last_offset

    def forward(
        self,
        ids: Tensor,
        offsets: Tensor | None = None,
        per_sample_weights: Tensor | None = None,
        show: Tensor | None = None,
        click: Tensor | None = None,
    ) -> Tensor:
        """Bags are the rows of 2-D ids, or start at `offsets` of 1-D ids."""
        if self.written is not None:
            each = sample_weights(per_sample_weights, ids, self.combiner)
            return self.written(ids, offsets, each, show, click)
        flat = ids_of(ids, "SparseEmbeddingBag")
        self.opened().reached(flat)
        bounds = bag_bounds(ids, offsets, self.include_last_offset)
        weights = sample_weights(per_sample_weights, ids, self.combiner)
        real = None
        if self.padding_idx is not None and (flat == self.padding_idx).any():
            real = flat != self.padding_idx
        given = given_counts(show, click, len(flat), real)
        if real is not None:
            bounds = bounds_without(bounds, real)
            flat = flat[real]
            if weights is not None:
                weights = weights[torch.from_numpy(real).to(weights.device)]
        visit = self.opened().visit(flat, self.inserts())
        counts = self.counts(visit, given)
        return embed_bags(self.weight, weights, visit, bounds, self.combiner, counts)

    def extra_repr(self) -> str:
        """The arguments that `print(model)` shows."""
        return f"{super().extra_repr()}, combiner={self.combiner!r}"


def ids_of(ids: Tensor, layer: str) -> Ids:
    """Return the ids as a flat array of int64."""
    if not isinstance(ids, Tensor) or ids.dtype not in (torch.int64, torch.int32):
        got = str(ids.dtype) if isinstance(ids, Tensor) else type(ids).__name__
        raise ConfigError(
            f"{layer}: got ids of type {got}, expected a tensor of torch.int64 or torch.int32; "
            "write ids.long() if they are whole numbers"
        )
    if ids.device.type == "meta":
        raise ConfigError(
            f"{layer}: got ids on the device meta, which have a shape but no values; expected ids "
            "on the CPU or on a GPU; find the code that creates the batch on meta "
            "(torch.device('meta'), set_default_device)"
        )
    if ids.dtype == torch.int64 and ids.device.type == "cpu":
        return ids.numpy(force=True).reshape(-1)
    flat: Ids = ids.detach().reshape(-1).to("cpu", torch.int64).numpy()
    return flat


def bag_bounds(ids: Tensor, offsets: Tensor | None, include_last: bool) -> NDArray[np.int64]:
    """The start of each bag, and the end of the last one."""
    if ids.dim() == 2:
        if offsets is not None:
            raise ConfigError("SparseEmbeddingBag: got 2-D ids and offsets; give one of them")
        return np.arange(ids.shape[0] + 1, dtype=np.int64) * ids.shape[1]
    if ids.dim() != 1 or offsets is None:
        raise ConfigError(
            f"SparseEmbeddingBag: got ids of {ids.dim()} dimensions and "
            f"{'no ' if offsets is None else ''}offsets; expected 2-D ids, or 1-D ids and offsets"
        )
    bounds: NDArray[np.int64] = ids_of(offsets, "SparseEmbeddingBag offsets")
    if not include_last:
        bounds = np.append(bounds, ids.shape[0])
    if (
        len(bounds) == 0
        or bounds[0] != 0
        or bounds[-1] != ids.shape[0]
        or (np.diff(bounds) < 0).any()
    ):
        raise ConfigError(
            "SparseEmbeddingBag: offsets must start at 0, never decrease, and end at the number of "
            f"ids, {ids.shape[0]}; got {np.array2string(bounds, threshold=8)}"
        )
    return np.ascontiguousarray(bounds)


def bounds_without(bounds: NDArray[np.int64], real: NDArray[np.bool_]) -> NDArray[np.int64]:
    """The bounds of bags once only the ids in the mask `real` remain."""
    return np.concatenate(([0], np.cumsum(real)))[bounds].astype(np.int64)


def refuse_outside(ids: Ids, table: str, rows: int) -> None:
    """Raise for ids outside a table with a fixed number of rows."""
    if rows and len(ids) and (ids.min() < 0 or ids.max() >= rows):
        wrong = ids[(ids < 0) | (ids >= rows)][0]
        raise ConfigError(
            f"{table}: got id {wrong}, expected 0 to {rows - 1}; for ids of any size use "
            "fleet.nn.SparseEmbedding"
        )


def _check_cache(layer: str, cache: str | None, rows: int) -> None:
    if cache not in (None, DEVICE):
        raise ConfigError(
            f"{layer}: got cache={cache!r}, expected {DEVICE!r}, which keeps rows where the layer "
            "is, or None"
        )
    if not isinstance(rows, int) or isinstance(rows, bool) or rows < 1:
        raise ConfigError(f"{layer}: got cache_rows={rows!r}, expected a positive integer")
    if cache is None and rows != CACHE_ROWS:
        raise ConfigError(
            f"{layer}: got cache_rows={rows} without a cache; write cache={DEVICE!r} as well"
        )


def _check_maximum(
    layer: str, max_rows: int | None, evict: str | None, entry: EntryPolicy | None
) -> None:
    if max_rows is not None and (
        not isinstance(max_rows, int) or isinstance(max_rows, bool) or max_rows < 1
    ):
        raise ConfigError(
            f"{layer}: got max_rows={max_rows!r}, expected a positive integer, the most rows of "
            "the table on all servers together"
        )
    if evict is None:
        return
    if evict not in EVICT:
        raise ConfigError(f"{layer}: got evict={evict!r}, expected one of {EVICT}")
    if max_rows is None:
        raise ConfigError(
            f"{layer}: got evict={evict!r} without a maximum of rows; write max_rows= as well"
        )
    if evict == "score" and not isinstance(entry, ShowClickEntry):
        raise ConfigError(
            f"{layer}: evict='score' needs shows and clicks; write entry=fleet.ShowClickEntry() as "
            "well, or evict='count'"
        )


def memory_bytes(layer: str, memory: int | str | None) -> int | None:
    """Bytes, from a number or from a text such as `8GiB`."""
    if memory is None:
        return None
    if isinstance(memory, int) and not isinstance(memory, bool):
        size = memory
    else:
        found = _SIZE.fullmatch(memory) if isinstance(memory, str) else None
        size = int(float(found[1]) * _UNITS[found[2]]) if found else 0
    if size < 1:
        raise ConfigError(
            f"{layer}: got memory={memory!r}, expected the bytes of rows that each server has in "
            f"memory: a positive integer, or a text such as '8GiB' (units: {', '.join(_UNITS)})"
        )
    return size


def initializer_plan(initializer: Initializer) -> InitializerPlan:
    """Convert an initializer to its form in the plan."""
    name, *numbers = (initializer,) if isinstance(initializer, str) else initializer
    if name not in _NUMBERS or len(numbers) != _NUMBERS[name]:
        raise ConfigError(
            f"initializer: got {initializer!r}, expected ('uniform', low, high), "
            "('normal', mean, std), ('constant', value) or 'zeros'"
        )
    a, b = (*map(float, numbers), 0.0, 0.0)[:2]
    return InitializerPlan(name, a, b)


def sample_weights(
    weights: Tensor | None, ids: Tensor, combiner: str | None, layer: str = "SparseEmbeddingBag"
) -> Tensor | None:
    """The weight of each id, as a flat tensor."""
    if weights is None:
        return None
    if combiner != "sum":
        raise ConfigError(
            f"{layer}: per_sample_weights need combiner='sum', this one has {combiner!r}"
        )
    if weights.shape != ids.shape:
        raise ConfigError(
            f"{layer}: per_sample_weights have shape {tuple(weights.shape)}, expected that of the "
            f"ids, {tuple(ids.shape)}"
        )
    return weights.reshape(-1)


def given_counts(
    show: Tensor | None, click: Tensor | None, count: int, real: NDArray[np.bool_] | None
) -> Given:
    """Shows and clicks of the ids, without those of padding."""
    found: list[Floats | None] = []
    for name, value in (("show", show), ("click", click)):
        if value is None:
            found.append(None)
            continue
        flat = value.detach().reshape(-1).to("cpu", torch.float32).numpy()
        if len(flat) != count:
            raise ConfigError(
                f"{name}: got {len(flat)} numbers for {count} ids, expected one for each"
            )
        found.append(flat if real is None else flat[real])
    return found[0], found[1]
