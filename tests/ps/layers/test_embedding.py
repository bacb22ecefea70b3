# SPDX-License-Identifier: Apache-2.0
"""The layers of tables, compared with torch's `Embedding` and `EmbeddingBag`."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tests.ps.rows import DIM, ROWS, Kept, dense, handle, opened
from torch import Tensor, nn

from fleetlight.errors import ConfigError, PlanError
from fleetlight.ps.layers.embedding import SparseEmbedding, SparseEmbeddingBag, initializer_plan
from fleetlight.ps.layers.entries import CountFilterEntry
from fleetlight.ps.plan import InitializerPlan


def compare(ours: nn.Module, kept: Kept, torchs: Any, call: Callable[[Any], Tensor]) -> None:
    """Check that outputs and gradients of rows are equal."""
    with torch.no_grad():
        torchs.weight.copy_(torch.from_numpy(kept.rows))
    mine, theirs = call(ours), call(torchs)
    torch.testing.assert_close(mine, theirs)
    pull = torch.randn(theirs.shape, generator=torch.Generator().manual_seed(1))
    (mine * pull).sum().backward()
    (theirs * pull).sum().backward()
    torch.testing.assert_close(dense(ours.weight), torchs.weight.grad)  # type: ignore[arg-type]


SHAPES = [(), (4,), (2, 3), (2, 1, 3), (0,), (3, 0)]


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_embedding_equals_torch_for_any_shape_of_ids(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    ids = torch.randint(0, ROWS, shape, generator=torch.Generator().manual_seed(2)).to(dtype)
    ours, kept = opened(SparseEmbedding(DIM))
    compare(ours, kept, nn.Embedding(ROWS, DIM), lambda layer: layer(ids))
    assert ours(ids).shape == (*shape, DIM)


def test_padding_is_zero_and_not_looked_up() -> None:
    ids = torch.tensor([[0, 1, 2], [2, 0, 0]])
    ours, kept = opened(SparseEmbedding(DIM, padding_idx=0))
    kept.rows[0] = 0
    compare(ours, kept, nn.Embedding(ROWS, DIM, padding_idx=0), lambda layer: layer(ids))
    assert kept.asked == [(4, [1, 2], True)]
    assert kept.noticed[0].tolist() == [0, 1, 2, 2, 0, 0]
    assert ours(torch.zeros(2, dtype=torch.int64)).tolist() == [[0.0] * DIM] * 2


BAGS: list[tuple[Any, Any]] = [
    ([[1, 2, 2], [3, 0, 9]], None),
    ([1, 2, 2, 3, 0, 9], [0, 3]),
    ([1, 2, 2, 3], [0, 0, 3, 4]),
    ([], [0, 0]),
]


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize(("ids", "offsets"), BAGS)
@pytest.mark.parametrize("padding", [None, 2])
def test_bags_equal_torch(mode: Any, ids: Any, offsets: Any, padding: int | None) -> None:
    given = [torch.tensor(ids, dtype=torch.int64)]
    given += [] if offsets is None else [torch.tensor(offsets)]
    ours, kept = opened(SparseEmbeddingBag(DIM, mode, padding_idx=padding))
    torchs = nn.EmbeddingBag(ROWS, DIM, mode=mode, padding_idx=padding)
    compare(ours, kept, torchs, lambda layer: layer(*given))


@pytest.mark.parametrize("last", [True, False])
def test_per_sample_weights_receive_gradients(last: bool) -> None:
    ids, offsets = torch.tensor([1, 2, 2, 3, 0]), torch.tensor([0, 2, 5] if last else [0, 2])
    ours, kept = opened(SparseEmbeddingBag(DIM, "sum", include_last_offset=last, padding_idx=3))
    torchs = nn.EmbeddingBag(ROWS, DIM, mode="sum", include_last_offset=last, padding_idx=3)
    grads = []

    def call(layer: Any) -> Tensor:
        weights = torch.linspace(1, 2, 5).requires_grad_()
        out: Tensor = layer(ids, offsets, per_sample_weights=weights)
        grads.append(weights)
        return out

    compare(ours, kept, torchs, call)
    mine, theirs = grads
    assert mine.grad is not None
    assert theirs.grad is not None
    unpadded = ids != 3
    torch.testing.assert_close(mine.grad[unpadded], theirs.grad[unpadded])
    assert float(mine.grad[~unpadded]) == 0


def test_lookups_without_gradient_do_not_insert_rows() -> None:
    ours, kept = opened(SparseEmbedding(DIM))
    with torch.no_grad():
        ours(torch.tensor([1]))
    ours.weight.requires_grad_(False)
    ours(torch.tensor([1]))
    assert [insert for _, _, insert in kept.asked] == [False, False]
    assert not ours(torch.tensor([1])).requires_grad


def test_shows_and_clicks_are_summed_by_id() -> None:
    ids = torch.tensor([[1, 2], [1, 0]])
    for layer in (
        SparseEmbedding(DIM, padding_idx=0),
        SparseEmbeddingBag(DIM, "sum", padding_idx=0),
    ):
        ours, _ = opened(layer)
        click = torch.tensor([[1, 0], [1, 1]])
        ours(ids, click=click).sum().backward()
        gradient: Any = ours.weight.grad
        [part] = gradient.parts
        counts = dict(
            zip(part.ids.tolist(), zip(part.shows, part.clicks, strict=True), strict=True)
        )
        assert counts == {1: (2, 2), 2: (1, 0)}
        with pytest.raises(ConfigError, match="show: got 3 numbers for 2 ids"):
            ours(ids[:, :1] + 1, show=torch.ones(3))


def test_rows_have_the_dtype_of_the_weight() -> None:
    ours, kept = opened(SparseEmbedding(DIM).double())
    out = ours(torch.tensor([3]))
    assert out.dtype == torch.float64
    out.sum().backward()
    assert dense(ours.weight)[3].tolist() == [1.0] * DIM
    np.testing.assert_allclose(out.detach().numpy()[0], kept.rows[3])


def test_copied_layers_share_the_table_and_unpickled_ones_have_none() -> None:
    ours, kept = opened(SparseEmbedding(DIM))
    assert copy.deepcopy(ours).handle is ours.handle
    loaded = pickle.loads(pickle.dumps(ours))
    with pytest.raises(PlanError, match=r"rows of table .* stayed on the parameter servers"):
        loaded(torch.tensor([1]))
    assert kept.asked == []


def test_layer_has_one_weight_and_a_repr() -> None:
    layer = SparseEmbedding(DIM, padding_idx=3, table="users", entry=CountFilterEntry(5))
    assert [p.shape for p in layer.parameters()] == [(0, DIM)]
    assert "3, padding_idx=3, table='users'" in repr(layer)
    assert "combiner='max'" in repr(SparseEmbeddingBag(DIM, "max"))
    assert "cache='device'" in repr(SparseEmbeddingBag(DIM, cache="device", cache_rows=9))
    assert "wire='bf16'" in repr(SparseEmbeddingBag(DIM, wire="bf16"))
    assert "memory=2048" in repr(SparseEmbeddingBag(DIM, memory="2KiB"))
    assert "max_rows=9, evict='age'" in repr(SparseEmbeddingBag(DIM, max_rows=9))


@pytest.mark.parametrize(
    ("memory", "size"),
    [(7, 7), ("8GiB", 8 << 30), ("1.5 MiB", 3 << 19), ("20B", 20), ("2TiB", 2 << 40), (None, None)],
)
def test_memory_is_a_number_of_bytes(memory: Any, size: int | None) -> None:
    assert SparseEmbedding(DIM, memory=memory).memory == size


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: SparseEmbedding(0), "got dim=0, expected a positive integer"),
        (lambda: SparseEmbedding(2.0), "got dim=2.0"),  # type: ignore[arg-type]
        (lambda: SparseEmbedding(2, entry="x"), "got entry='x', expected a CountFilterEntry"),  # type: ignore[arg-type]
        (lambda: SparseEmbeddingBag(2, "avg"), "got combiner='avg', expected one of"),  # type: ignore[arg-type]
        (
            lambda: SparseEmbedding(2, wire="bf32"),
            "SparseEmbedding: got wire='bf32', expected one of",
        ),
        (lambda: SparseEmbedding(2, cache="cuda"), "got cache='cuda', expected 'device'"),
        (lambda: SparseEmbedding(2, cache="device", cache_rows=0), "got cache_rows=0, expected"),
        (lambda: SparseEmbeddingBag(2, cache_rows=9), "got cache_rows=9 without a cache"),
        (lambda: SparseEmbedding(2, dtype="fp16"), "got dtype='fp16', expected one of"),
        (lambda: SparseEmbedding(2, memory="8GB"), r"got memory='8GB', expected .*'8GiB'"),
        (lambda: SparseEmbedding(2, memory=0), "got memory=0, expected the bytes of rows"),
        (lambda: SparseEmbedding(2, memory=True), "SparseEmbedding: got memory=True"),
        (lambda: SparseEmbeddingBag(2, memory="-1GiB"), "SparseEmbeddingBag: got memory='-1GiB'"),
        (lambda: SparseEmbedding(2, max_rows=0), "got max_rows=0, expected a positive integer"),
        (lambda: SparseEmbeddingBag(2, evict="age"), "without a maximum of rows; write max_rows="),
        (lambda: SparseEmbedding(2, max_rows=5, evict="size"), "got evict='size', expected one"),
        (lambda: SparseEmbedding(2, max_rows=5, evict="score"), "'score' needs shows and clicks"),
        (lambda: SparseEmbedding(2, initializer="one"), "initializer: got 'one', expected"),
        (lambda: SparseEmbedding(2, initializer=("uniform", 1.0)), "initializer: got"),
    ],
)
def test_invalid_constructor_arguments_are_refused(make: Callable[[], Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        make()


@pytest.mark.parametrize(
    ("call", "why"),
    [
        (lambda e, b: e(torch.tensor([1.0])), r"got ids of type torch\.float32, expected a tensor"),
        (lambda e, b: e([1]), "got ids of type list, expected a tensor"),
        (
            lambda e, b: e(torch.empty(2, dtype=torch.int64, device="meta")),
            "ids on the device meta",
        ),
        (
            lambda e, b: b(torch.empty(2, 1, dtype=torch.int32, device="meta")),
            "no values; expected",
        ),
        (lambda e, b: b(torch.tensor([1])), "got ids of 1 dimensions and no offsets"),
        (lambda e, b: b(torch.tensor([[1]]), torch.tensor([0])), "got 2-D ids and offsets"),
        (lambda e, b: b(torch.tensor([1]), torch.tensor([1])), "offsets must start at 0"),
        (lambda e, b: b(torch.tensor([1, 2]), torch.tensor([0, 3])), "offsets must start at 0"),
        (
            lambda e, b: b(torch.tensor([[1]]), per_sample_weights=torch.ones(1, 1)),
            "per_sample_weights need combiner='sum'",
        ),
    ],
)
def test_invalid_lookup_arguments_are_refused(call: Callable[[Any, Any], Any], why: str) -> None:
    embedding, bag = opened(SparseEmbedding(DIM))[0], opened(SparseEmbeddingBag(DIM, "mean"))[0]
    with pytest.raises(ConfigError, match=why):
        call(embedding, bag)


def test_initializer_arguments_become_plans() -> None:
    assert initializer_plan("zeros") == InitializerPlan("zeros", 0, 0)
    assert initializer_plan(("constant", 2)) == InitializerPlan("constant", 2, 0)
    assert initializer_plan(("normal", 0, 0.1)) == InitializerPlan("normal", 0, 0.1)


def test_handle_reports_looked_up_ids_if_a_callback_is_set() -> None:
    kept = Kept()
    table = handle(kept)
    table.reached(np.array([1]))
    kept.reached = None
    table.reached(np.array([2]))
    assert [ids.tolist() for ids in kept.noticed] == [[1]]
    assert table.visit(np.array([5, 5]), True).inverse.tolist() == [0, 0]
