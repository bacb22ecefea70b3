# SPDX-License-Identifier: Apache-2.0
"""Moved sparse layers of torch compute the same with remote rows."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
from tests.ps.rows import DIM, ROWS, Kept, dense, handle
from torch import Tensor, nn

from fleetlight.errors import ConfigError
from fleetlight.fleet.plan.remote_embedding import RemoteEmbedding, is_movable, rows_of


def moved(layer: Any) -> tuple[Any, Any, Kept]:
    """The local layer, the moved layer and its remote rows."""
    before, kept = copy.deepcopy(layer), Kept()
    kept.rows = rows_of(layer).copy()
    RemoteEmbedding(layer, handle(kept, rows=ROWS))
    return before, layer, kept


def compare(before: Any, after: Any, *given: Any, **named: Any) -> None:
    theirs, mine = before(*given, **named), after(*given, **named)
    torch.testing.assert_close(mine, theirs)
    pull = torch.randn(theirs.shape, generator=torch.Generator().manual_seed(1))
    (theirs * pull).sum().backward()
    (mine * pull).sum().backward()
    torch.testing.assert_close(dense(after.weight), before.weight.grad.to_dense())


def embedding(**options: Any) -> Any:
    torch.manual_seed(0)
    return moved(nn.Embedding(ROWS, DIM, sparse=True, **options))


def bag(mode: str = "mean", **options: Any) -> Any:
    torch.manual_seed(0)
    return moved(nn.EmbeddingBag(ROWS, DIM, sparse=True, mode=mode, **options))


@pytest.mark.parametrize("padding", [None, 2, -1])
def test_moved_embedding_equals_the_local_one(padding: int | None) -> None:
    """The padding row may be any; it is read and never changed."""
    before, after, _ = embedding(padding_idx=padding)
    compare(before, after, torch.tensor([[1, 2, 9], [9, 2, 1]]))
    assert after.weight.shape == (0, DIM)


@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("padding", [None, 2])
def test_moved_bag_equals_the_local_one(mode: str, padding: int | None) -> None:
    compare(*bag(mode, padding_idx=padding)[:2], torch.tensor([[1, 2, 2], [3, 0, 9]]))
    compare(
        *bag(mode, padding_idx=padding)[:2], torch.tensor([1, 2, 2, 3, 0]), torch.tensor([0, 3, 3])
    )


@pytest.mark.parametrize("padding", [None, 2])
def test_moved_bag_with_weights_equals_the_local_one(padding: int | None) -> None:
    ids, weights = torch.tensor([1, 2, 2, 3]), torch.tensor([1.0, 2.0, 3.0, 4.0])
    options: dict[str, Any] = {"include_last_offset": True, "padding_idx": padding}
    before, after, _ = bag("sum", **options)
    compare(before, after, ids, torch.tensor([0, 2, 4]), per_sample_weights=weights)
    before, after, _ = bag("sum", padding_idx=padding)
    compare(before, after, ids.view(2, 2), None, weights.view(2, 2))


def test_move_keeps_parameter_and_class() -> None:
    torch.manual_seed(0)
    layer = nn.Embedding(ROWS, DIM, sparse=True)
    weight = layer.weight
    RemoteEmbedding(layer, handle(Kept(), rows=ROWS))
    assert layer.weight is weight
    assert isinstance(layer, nn.Embedding)
    assert is_movable(layer)
    assert not is_movable(nn.Embedding(2, 2))


def test_evaluation_inserts_no_rows() -> None:
    _, after, kept = embedding()
    with torch.no_grad():
        after(torch.tensor([1]))
    after(torch.tensor([1]))
    assert [insert for _, _, insert in kept.asked] == [False, True]
    assert [ids.tolist() for ids in kept.noticed] == [[1], [1]]


def test_copied_layer_reads_the_same_rows() -> None:
    _, after, kept = embedding()
    twin = copy.deepcopy(after)
    np.testing.assert_array_equal(twin(torch.tensor([3])).detach()[0], kept.rows[3])
    twin(torch.tensor([3])).sum().backward()
    assert after.weight.grad is None
    assert dense(twin.weight)[3].tolist() == [1.0] * DIM


@pytest.mark.parametrize("wrong", [-1, ROWS])
def test_ids_out_of_range_are_refused(wrong: int) -> None:
    _, after, _ = embedding()
    with pytest.raises(ConfigError, match=rf"emb: got id {wrong}, expected 0 to 9; for ids of any"):
        after(torch.tensor([1, wrong]))
    empty: Tensor = after(torch.empty(0, dtype=torch.int64))
    assert empty.shape == (0, DIM)
