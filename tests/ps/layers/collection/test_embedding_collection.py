# SPDX-License-Identifier: Apache-2.0
"""Collections of embeddings, in main memory and on a device."""

import copy
import sys
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.ps.layers.collection.tables import ROWS, Tables, dense, opened
from tests.ps.layers.devices import as_on_a_gpu
from torch import Tensor, nn

from fleetlight.errors import ConfigError, PlanError
from fleetlight.ps.layers.collection.embedding_collection import (
    EmbeddingCollection,
    EmbeddingFeature,
)
from fleetlight.ps.layers.embedding import SparseEmbedding, SparseEmbeddingBag
from fleetlight.ps.layers.entries import CountFilterEntry, ShowClickEntry

# `EmbeddingCollection`, compared with separate layers of torch and of Fleetlight.


#: two features share a table, one has a table of its own, one has a row for each id
FEATURES: dict[str, Any] = {
    "user": (3, "people", "sum"),
    "items": EmbeddingFeature(2, combiner="mean", padding_idx=1),
    "friend": (3, "people", "max"),
    "tags": EmbeddingFeature(4, combiner=None, padding_idx=0),
}
POOLED = ["user", "items", "friend"]


def ragged(random: torch.Generator, samples: int) -> tuple[Tensor, Tensor]:
    """Ids and the start of each sample."""
    lengths = torch.randint(0, 4, (samples,), generator=random)
    ids = torch.randint(0, ROWS, (int(lengths.sum()),), generator=random)
    return ids, lengths.cumsum(0) - lengths


def batch(seed: int, samples: int) -> dict[str, Any]:
    random = torch.Generator().manual_seed(seed)
    found: dict[str, Any] = {name: ragged(random, samples) for name in FEATURES}
    found["friend"] = torch.randint(0, ROWS, (samples, 2), generator=random)
    return found


def torchs(collection: EmbeddingCollection, tables: Tables) -> dict[str, Any]:
    """The layers of torch that do the same."""
    found: dict[str, Any] = {}
    for name in FEATURES:
        layer, numbered = collection[name], collection[name].handle
        assert numbered is not None
        weight = torch.from_numpy(tables.rows[numbered.number].copy())
        more: Any = {"padding_idx": layer.padding_idx}
        if isinstance(layer, SparseEmbeddingBag):
            more["mode"] = layer.combiner
        kind: Any = nn.EmbeddingBag if "mode" in more else nn.Embedding
        more["sparse"] = more.get("mode") != "max"
        found[name] = kind.from_pretrained(weight, freeze=False, **more)
    return found


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 99), st.integers(1, 6), st.booleans())
def test_results_and_gradients_equal_layers_of_torch(
    seed: int, samples: int, weighted: bool
) -> None:
    collection = EmbeddingCollection(FEATURES)
    tables = opened(collection)
    # torch reads the row of padding
    tables.rows[2][0] = 0
    theirs, ids = torchs(collection, tables), batch(seed, samples)
    weights = torch.rand(len(ids["user"][0]), requires_grad=True)
    copied = weights.detach().clone().requires_grad_()
    ours = collection(ids, {"user": weights} if weighted else None)
    assert list(ours) == list(FEATURES)
    for name, layer in theirs.items():
        form = ids[name] if isinstance(ids[name], tuple) else (ids[name],)
        its = form[:1] if name == "tags" else form
        more = {"per_sample_weights": copied} if weighted and name == "user" else {}
        expected = layer(*its, **more)
        torch.testing.assert_close(ours[name], expected)
        pull = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
        (expected * pull).sum().backward()
        (ours[name] * pull).sum().backward(retain_graph=True)
    grads = {name: layer.weight.grad.to_dense() for name, layer in theirs.items()}
    torch.testing.assert_close(dense(collection["user"].weight), grads["user"] + grads["friend"])
    for name in ("items", "tags"):
        torch.testing.assert_close(dense(collection[name].weight), grads[name])
    if weighted:
        torch.testing.assert_close(weights.grad, copied.grad)


def test_results_equal_separate_layers_bit_for_bit() -> None:
    collection = EmbeddingCollection(FEATURES)
    alone = nn.ModuleDict({
        "user": SparseEmbeddingBag(3, "sum", table="people"),
        "items_": SparseEmbeddingBag(2, "mean", padding_idx=1),
        "friend": SparseEmbeddingBag(3, "max", table="people"),
        "tags": SparseEmbedding(4, padding_idx=0),
    })  # fmt: skip
    opened(collection), opened(alone)
    ids = batch(5, 8)
    for name, ours in collection(ids).items():
        given = ids[name] if isinstance(ids[name], tuple) else (ids[name],)
        layer = alone[{"items": "items_"}.get(name, name)]
        theirs = layer(*given[: 1 if name == "tags" else 2])
        assert torch.equal(ours, theirs)
        theirs.sum().backward()
        ours.sum().backward(retain_graph=True)
    for name in ("items", "tags"):
        layer = alone[{"items": "items_"}.get(name, name)]
        assert torch.equal(dense(collection[name].weight), dense(layer.weight))  # type: ignore[arg-type]


def test_one_lookup_asks_each_table_once_for_all_features() -> None:
    collection = EmbeddingCollection(FEATURES)
    tables, ids = opened(collection), batch(1, 5)
    sum(value.sum() for value in collection(ids).values()).backward()
    [asked] = tables.asked
    assert [one.table for one in asked] == [0, 1, 2]
    together = torch.cat([ids["user"][0], ids["friend"].reshape(-1)])
    assert asked[0].ids.tolist() == together.tolist()
    assert all(one.insert for one in asked)
    gradient: Any = collection["user"].weight.grad
    [part] = gradient.parts
    assert sorted(part.ids.tolist()) == sorted(set(together.tolist()))
    # look-ahead recognises tensors of a batch by their memory
    noticed = {(table, ids.ctypes.data) for table, ids in tables.noticed}
    assert (0, ids["friend"].data_ptr()) in noticed
    assert (0, ids["user"][0].data_ptr()) in noticed


def test_ids_by_table_are_those_of_a_lookup() -> None:
    collection = EmbeddingCollection({"a": (3, "t"), "b": (3, "t"), "c": (2,)})
    tables = opened(collection)
    ids = {name: torch.tensor([[n, 2]]) for n, name in enumerate("abc")}
    collection(ids)
    found = collection.ids_by_table(ids)
    assert list(found) == ["t", "of layer 2"]
    assert [one.tolist() for one in found.values()] == [one.ids.tolist() for one in tables.asked[0]]


class Keyed:
    """The methods of torchrec's KeyedJaggedTensor that are used."""

    def __init__(self, pairs: dict[str, tuple[Tensor, Tensor]], weights: Tensor | None) -> None:
        self._pairs, self._weights = pairs, weights

    def keys(self) -> list[str]:
        return list(self._pairs)

    def values(self) -> Tensor:
        return torch.cat([ids for ids, _ in self._pairs.values()])

    def lengths(self) -> Tensor:
        ends = [
            torch.cat([starts, torch.tensor([len(ids)])]) for ids, starts in self._pairs.values()
        ]
        return torch.cat([one.diff() for one in ends]).int()

    def weights_or_none(self) -> Tensor | None:
        return self._weights


def test_all_forms_of_a_ragged_batch_give_the_same() -> None:
    collection = EmbeddingCollection({"a": (3, "t"), "b": (2, None, "sum")})
    opened(collection)
    random = torch.Generator().manual_seed(3)
    pairs = {name: ragged(random, 6) for name in "ba"}
    weights = {name: torch.rand(len(ids)) for name, (ids, _) in pairs.items()}
    expected = collection(pairs, weights)

    def nested(values: Tensor, starts: Tensor) -> Tensor:
        ends = torch.cat([starts, torch.tensor([len(values)])])
        return torch.nested.nested_tensor_from_jagged(values, ends)

    nesteds = {name: nested(ids, starts) for name, (ids, starts) in pairs.items()}
    keyed = Keyed(pairs, torch.cat(list(weights.values())))
    of_nested = {name: nested(weights[name], starts) for name, (_, starts) in pairs.items()}
    for found in (collection(nesteds, weights), collection(keyed), collection(nesteds, of_nested)):
        assert list(found) == ["a", "b"]
        assert all(torch.equal(found[name], expected[name]) for name in "ab")
    assert "torchrec" not in sys.modules


def test_a_row_for_each_id_has_the_form_of_the_ids() -> None:
    collection = EmbeddingCollection({"a": (3, None, None)})
    rows = torch.from_numpy(opened(collection).rows[0])
    flat, ends = torch.tensor([3, 1, 3]), torch.tensor([0, 2, 3])
    assert torch.equal(collection({"a": (flat, ends[:2])})["a"], rows[flat])
    square = torch.tensor([[3, 1], [2, 2]])
    assert torch.equal(collection({"a": square})["a"], rows[square])
    found = collection({"a": torch.nested.nested_tensor_from_jagged(flat, ends)})["a"]
    assert found.is_nested
    assert torch.equal(found.values(), rows[flat])
    found.values().sum().backward()
    assert dense(collection["a"].weight)[3].tolist() == [2.0] * 3
    # a nested tensor with gaps
    gaps = torch.nested.nested_tensor_from_jagged(flat, ends, lengths=torch.tensor([1, 1]))
    assert torch.equal(collection({"a": gaps})["a"].values(), rows[flat[[0, 2]]])


def test_offsets_may_include_the_last() -> None:
    collection = EmbeddingCollection({"a": (3,)}, include_last_offset=True)
    opened(collection)
    found = collection({"a": (torch.tensor([1, 2, 3]), torch.tensor([0, 2, 3]))})["a"]
    assert torch.equal(found, collection({"a": torch.tensor([[1, 2], [3, 3]])})["a"] - torch.stack(
        [torch.zeros(3), found[1]]))  # fmt: skip


def test_concatenated_columns_have_the_order_of_features() -> None:
    pooled = {name: FEATURES[name] for name in POOLED}
    one, other = EmbeddingCollection(pooled, concatenated=True), EmbeddingCollection(pooled)
    opened(one), opened(other)
    ids = {name: its for name, its in batch(2, 6).items() if name in pooled}
    together, found = one(ids), other(ids)
    assert torch.equal(together, torch.cat(list(found.values()), 1))
    pull = torch.randn(together.shape)
    (together * pull).sum().backward()
    (torch.cat(list(found.values()), 1) * pull).sum().backward()
    assert torch.equal(dense(one["user"].weight), dense(other["user"].weight))
    # the results are views of one tensor
    assert found["user"]._base is found["friend"]._base
    with pytest.raises(ConfigError, match="'tags' has combiner=None, but concatenated=True"):
        EmbeddingCollection(FEATURES, concatenated=True)


def test_features_of_a_table_share_one_weight_and_copies_too() -> None:
    collection = EmbeddingCollection(FEATURES)
    for one in (collection, copy.deepcopy(collection)):
        assert one["user"].weight is one["friend"].weight
        assert len(list(one.parameters())) == 3
    assert list(collection.layers) == ["user", "items_", "friend", "tags"]
    with pytest.raises(ConfigError, match="no feature 'usr'; did you mean 'user'"):
        collection["usr"]
    with pytest.raises(PlanError, match="its table is not open yet"):
        collection(batch(0, 2))


def test_frozen_tables_and_no_grad_insert_no_rows() -> None:
    collection = EmbeddingCollection({"a": (3,), "b": (3,)})
    tables = opened(collection)
    ids = {name: torch.tensor([[1]]) for name in "ab"}
    with torch.no_grad():
        collection(ids)
    collection["a"].weight.requires_grad_(False)
    sum(value.sum() for value in collection(ids).values()).backward()
    asked = [[one.insert for one in some] for some in tables.asked]
    assert asked == [[False, False], [False, True]]
    assert collection["a"].weight.grad is None
    assert dense(collection["b"].weight)[1].tolist() == [1.0] * 3


def test_gradients_pass_hooks_of_a_weight() -> None:
    collection = EmbeddingCollection({"a": (3,), "b": (3,)})
    opened(collection)
    seen = []
    collection["b"].weight.register_hook(lambda gradient: seen.append(gradient) or gradient * 2)
    ids = {name: torch.tensor([[1]]) for name in "ab"}
    sum(value.sum() for value in collection(ids).values()).backward()
    assert len(seen) == 1
    assert dense(collection["a"].weight)[1].tolist() == [1.0] * 3
    assert dense(collection["b"].weight)[1].tolist() == [2.0] * 3


def test_results_have_the_dtype_of_the_weights() -> None:
    collection = EmbeddingCollection({"a": (3,)}).double()
    opened(collection)
    found = collection({"a": torch.tensor([[1]])})["a"]
    assert found.dtype == torch.float64
    found.sum().backward()
    assert dense(collection["a"].weight)[1].tolist() == [1.0] * 3


def test_shows_and_clicks_are_summed_over_the_features_of_a_table() -> None:
    collection = EmbeddingCollection({
        "a": EmbeddingFeature(3, "t", entry=ShowClickEntry(), padding_idx=0),
        "b": EmbeddingFeature(3, "t", entry=ShowClickEntry()),
    })  # fmt: skip
    opened(collection)
    ids = {"a": torch.tensor([[1, 0], [2, 1]]), "b": torch.tensor([[1], [3]])}
    click = {"a": torch.tensor([[1, 1], [0, 1]]), "b": torch.tensor([[0], [1]])}
    found = collection(ids, click=click, show={"b": torch.tensor([[5], [6]])})
    sum(value.sum() for value in found.values()).backward()
    gradient: Any = collection["a"].weight.grad
    [part] = gradient.parts
    counts = zip(part.ids.tolist(), part.shows.tolist(), part.clicks.tolist(), strict=True)
    assert sorted(counts) == [(1, 7, 2), (2, 1, 0), (3, 6, 1)]
    with pytest.raises(ConfigError, match="'b' has show or click, but feature 'a' of the same"):
        collection(ids, click={"b": click["b"]})


ONE, TWO = torch.tensor([[1]]), torch.tensor([[1], [2]])
FLAT = torch.tensor([1, 2, 3])
WRONG: list[tuple[Any, str]] = [
    ({"a": ONE}, "no ids of feature 'b', expected all of a, b"),
    ({"a": ONE, "b": ONE, "bb": ONE}, "'bb', which is no feature of this layer; did you mean 'b'"),
    ({"a": ONE, "b": TWO}, "feature 'b' has 2 samples, but 'a' has 1"),
    ({"a": ONE, "b": ONE.float()}, "feature 'b': got ids of type torch.float32"),
    ({"a": ONE, "b": (FLAT, torch.tensor([0.0]))}, "'b', offsets: got ids of type torch.float32"),
    ({"a": TWO, "b": (FLAT, torch.tensor([0, 4]))}, "'b': offsets must start at 0, never decrea"),
    ({"a": (FLAT, torch.tensor([0, 2, 1])), "b": FLAT.view(3, 1)}, r"got \[0 2 1 3\]"),
    ({"a": TWO, "b": (FLAT, torch.tensor([1, 2]))}, "'b': offsets must start at 0"),
    ({"a": ONE, "b": FLAT}, r"ids of 1 dimensions, .*; one id for each sample is ids.unsqueeze"),
    ({"a": ONE, "b": (ONE, FLAT)}, "a pair of 2-D ids and 1-D offsets, expected"),
    ({"a": ONE, "b": [1]}, "feature 'b' has a list, expected 2-D ids, a pair"),
    (ONE, "got a Tensor, expected a dict of ids by feature"),
]


@pytest.mark.parametrize(("features", "message"), WRONG)
def test_wrong_batches_are_refused(features: Any, message: str) -> None:
    collection = EmbeddingCollection({"a": (3,), "b": (3,)})
    opened(collection)
    with pytest.raises(ConfigError, match=message):
        collection(features)


@pytest.mark.parametrize(
    ("features", "message"),
    [
        ({"a": (3, "t"), "b": (4, "t")}, "'a' and 'b' share the table 't', but have dim=3 and 4"),
        ({"a": (3, "t"), "b": EmbeddingFeature(3, "t", initializer="zeros")}, "have initializer="),
        ({"a": (3, "t"), "b": EmbeddingFeature(3, "t", optimizer="adam")}, "=None and adam"),
        ({"a": (3, "t"), "b": EmbeddingFeature(3, "t", entry=CountFilterEntry(2))}, "have entry="),
        ({"a": (3, "t"), "b": EmbeddingFeature(3, "t", wire="bf16")}, "have wire=None and bf16"),
        ({"a": (3, "t"), "b": EmbeddingFeature(3, "t", cache="device")}, "have cache=None and dev"),
        ({"a": EmbeddingFeature(3, dtype="int4")}, "feature 'a': .*dtype='int4'"),
        ({"a": (3, None, "median")}, "feature 'a': got combiner='median', expected one of"),
        ({"a": (0,)}, "feature 'a': SparseEmbeddingBag: got dim=0, expected a positive integer"),
        ({"a": (3, None, "sum", 1)}, r"feature 'a': .*expected a fleet.nn.EmbeddingFeature or"),
        ({"a": 3}, r"feature 'a': .*expected a fleet.nn.EmbeddingFeature or"),
        ({}, "got no features"),
    ],
)
def test_wrong_features_are_refused(features: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EmbeddingCollection(features)


def test_wrong_weights_are_refused() -> None:
    collection = EmbeddingCollection({"a": (3,), "b": (3, None, "mean"), "c": (3, None, None)})
    opened(collection)
    ids = dict.fromkeys("abc", TWO)
    for name, wrong, message in (
        ("d", ONE, "weights has 'd', which is no feature"),
        ("a", [1.0, 2.0], "got weights of type dict, expected a dict of tensors by feature"),
        ("a", torch.ones(3), r"'a': per_sample_weights have shape \(3,\), expected that of"),
        ("b", torch.ones(2, 1), "'b': per_sample_weights need combiner='sum', this one has 'mean'"),
        ("c", torch.ones(2, 1), "'c': per_sample_weights need combiner='sum', this one has None"),
    ):
        with pytest.raises(ConfigError, match=message):
            collection(ids, {name: wrong})


def test_a_keyed_tensor_with_other_lengths_is_refused() -> None:
    collection = EmbeddingCollection({"a": (3,), "b": (3,)})
    keyed = Keyed({"a": (FLAT, torch.tensor([0, 1])), "b": (FLAT, torch.tensor([0]))}, None)
    with pytest.raises(ConfigError, match="got 3 lengths for 2 keys"):
        collection(keyed)
    strange = Keyed({"a": (FLAT, torch.tensor([0])), "b": (FLAT, torch.tensor([0]))}, None)
    strange.values = lambda: FLAT  # type: ignore[method-assign]
    with pytest.raises(ConfigError, match="sum to 6, expected the number of its values, 3"):
        collection(strange)


def test_an_empty_batch_and_samples_without_ids() -> None:
    collection = EmbeddingCollection({"a": (3,), "b": (2, None, "max")})
    opened(collection)
    none = torch.zeros(0, dtype=torch.int64)
    empty = collection(dict.fromkeys("ab", (none, none)))
    assert [one.shape for one in empty.values()] == [(0, 3), (0, 2)]
    zeros = collection(dict.fromkeys("ab", (none, torch.zeros(2, dtype=torch.int64))))
    assert all(not one.any() and len(one) == 2 for one in zeros.values())
    sum(one.sum() for one in zeros.values()).backward()
    assert not np.any(dense(collection["a"].weight).numpy())


# Collections on a device equal those in main memory.


POOLED_FEATURES: dict[str, Any] = {
    "user": (3, "people", "sum"),
    "items": (2, None, "mean"),
    "friend": (3, "people", "sum"),
    "tags": (2, None, "max"),
}


def trained(
    features: dict[str, Any], ids: Any, *, weighted: bool, concatenated: bool = False
) -> tuple[list[Tensor], list[Tensor]]:
    """The results of all features, and the gradients of tables and weights."""
    collection = EmbeddingCollection(features, concatenated=concatenated)
    opened(collection)
    weights = torch.linspace(0.5, 2, len(ids["user"][0])).requires_grad_()
    found: Any = collection(ids, {"user": weights} if weighted else None)
    results = [found] if concatenated else list(found.values())
    for number, result in enumerate(results):
        factor = torch.linspace(1 + number, -2, result.numel()).view(result.shape)
        (result * factor).sum().backward(retain_graph=True)
    gradients = [dense(collection[name].weight) for name in features]
    if weights.grad is not None:
        gradients.append(weights.grad)
    return [one.detach() for one in results], gradients


@settings(max_examples=30)
@given(st.integers(0, 99), st.integers(0, 6), st.booleans())
def test_results_and_gradients_equal_those_of_kernels(
    seed: int, samples: int, weighted: bool
) -> None:
    ids = batch(seed, samples)
    for features, concatenated in (
        (FEATURES, False),
        (POOLED_FEATURES, False),
        (POOLED_FEATURES, True),
    ):
        here = trained(features, ids, weighted=weighted, concatenated=concatenated)
        with pytest.MonkeyPatch.context() as patch:
            late = as_on_a_gpu(patch)
            there = trained(features, ids, weighted=weighted, concatenated=concatenated)
        assert late.started
        torch.testing.assert_close(there, here)


def test_tables_of_one_dim_send_their_gradients_in_one_copy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    late = as_on_a_gpu(monkeypatch)
    collection = EmbeddingCollection(dict.fromkeys("abc", (3, None, "sum")))
    opened(collection)
    ids = {name: torch.tensor([[n, 5]]) for n, name in enumerate("abc")}
    sum(result.sum() for result in collection(ids).values()).backward()
    assert (late.started, late.arrived) == (1, 0)
    for n, name in enumerate("abc"):
        assert dense(collection[name].weight).nonzero()[:, 0].unique().tolist() == [n, 5]
