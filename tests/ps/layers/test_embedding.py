# SPDX-License-Identifier: Apache-2.0
"""Layers over tables: lookups, frozen rows, and weights."""

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.ps.rows import DIM, ROWS, Kept, dense, handle, opened
from torch import Tensor, nn
from torch.optim import swa_utils

from fleetlight import kernels
from fleetlight.errors import ConfigError, PlanError
from fleetlight.kernels import Initializer
from fleetlight.ps.layers import frozen as f
from fleetlight.ps.layers.embedding import SparseEmbedding, SparseEmbeddingBag, initializer_plan
from fleetlight.ps.layers.entries import CountFilterEntry
from fleetlight.ps.layers.handle import TableHandle, Visit
from fleetlight.ps.layers.lookup import embed, embed_bags
from fleetlight.ps.layers.table_weight import TableWeight, stand_for
from fleetlight.ps.plan import InitializerPlan, RulePlan, TablePlan

# The layers of tables, compared with torch's `Embedding` and `EmbeddingBag`.


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
        ours(ids, click=torch.tensor([[1, 0], [1, 1]])).sum().backward()
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


# Frozen tables, compared with the kernels' first values and with the layers.


EDGES = [0, 1, -1, 2**63 - 1, -(2**63), 2**62, -(2**33)]
IDS = np.concatenate([EDGES, np.random.default_rng(0).integers(-(2**63), 2**63 - 1, 500)])
HOW = Initializer("normal", 0.1, 0.3)
SEED = 2**62 + 12345


@pytest.mark.parametrize("seed", [0, 7, -3, SEED, 2**64 - 1])
@pytest.mark.parametrize(
    "how",
    [
        Initializer("uniform", -0.05, 0.05),
        Initializer("uniform", 3.0, 1000.0),
        HOW,
        Initializer("constant", 0.7),
        Initializer("zeros"),
    ],
)
def test_first_values_equal_the_kernels_bit_for_bit(how: Initializer, seed: int) -> None:
    mine = f.first_values(torch.from_numpy(IDS), 5, seed, how).numpy()
    theirs = kernels.first_values(IDS, 5, seed, how)
    assert np.array_equal(mine.view(np.int32), theirs.view(np.int32))


KNOWN = np.sort(np.random.default_rng(1).choice(60, 30, replace=False)).astype(np.int64) - 10
FROZEN_ROWS = np.random.default_rng(2).standard_normal((30, 4), np.float32)


class FakeServers:
    """Returns constant rows for known ids and first values for others."""

    reached = None

    def look_up(self, asked: Any) -> Any:
        return [self._rows(ids) for _, ids, _ in asked]

    def _rows(self, ids: Any) -> Any:
        wanted = kernels.dedup(ids)
        rows = kernels.first_values(wanted.ids, 4, SEED, HOW)
        places = np.searchsorted(KNOWN, wanted.ids).clip(max=len(KNOWN) - 1)
        known = KNOWN[places] == wanted.ids
        rows[known] = FROZEN_ROWS[places[known]]
        return wanted, rows


def opened_frozen(layer: Any) -> Any:
    plan = TablePlan("emb", 4, RulePlan("sgd", {}), InitializerPlan("normal", 0.1, 0.3), 0, 0)
    layer.handle = TableHandle(0, plan, FakeServers())  # type: ignore[arg-type]
    return layer


def both(layer: Any, *args: Tensor | None) -> tuple[Tensor, Tensor]:
    rows = f.FrozenRows(torch.from_numpy(KNOWN), torch.from_numpy(FROZEN_ROWS), SEED, HOW)
    with torch.no_grad():
        return f.frozen(layer, rows)(*args), opened_frozen(layer)(*args)


def some(*shape: int) -> Tensor:
    return torch.from_numpy(np.random.default_rng(3).integers(-12, 55, shape))


@pytest.mark.parametrize("padding", [None, 3])
@pytest.mark.parametrize("ids", [some(7), some(5, 4), some(2, 3, 4), some(5, 4).int(), some(0, 4)])
def test_frozen_embedding_equals_the_layer(ids: Tensor, padding: int | None) -> None:
    mine, theirs = both(SparseEmbedding(4, padding_idx=padding), ids)
    assert torch.equal(mine, theirs)


@pytest.mark.parametrize("combiner", ["sum", "mean", "max"])
@pytest.mark.parametrize("padding", [None, 3])
@pytest.mark.parametrize("form", ["2-D", "offsets", "last offset"])
def test_frozen_bag_equals_the_layer(combiner: Any, padding: int | None, form: str) -> None:
    ids, offsets = some(6, 5), None
    # one bag has padding only
    ids[2] = 3
    if form != "2-D":
        # the first and third bags are empty; with offsets, the last one too
        ids, offsets = ids.reshape(-1), torch.tensor([0, 0, 4, 4, 10, 15, 30])
    last = form == "last offset"
    layer = SparseEmbeddingBag(4, combiner, padding_idx=padding, include_last_offset=last)
    mine, theirs = both(layer, ids, offsets)
    torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-6)
    assert len(mine) == (7 if form == "offsets" else 6)


def test_frozen_bag_uses_per_sample_weights() -> None:
    ids = some(6, 5)
    weights = torch.from_numpy(np.random.default_rng(4).standard_normal((6, 5), np.float32))
    mine, theirs = both(SparseEmbeddingBag(4, "sum", padding_idx=3), ids, None, weights)
    torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-6)


def test_frozen_table_without_rows_returns_first_values() -> None:
    rows = f.FrozenRows(torch.empty(0, dtype=torch.int64), torch.empty(0, 4), SEED, HOW)
    ids = some(9)
    expected = kernels.first_values(ids.numpy(), 4, SEED, HOW)
    assert np.array_equal(rows(ids).numpy(), expected)


def test_frozen_layer_keeps_the_dtype() -> None:
    for layer in (SparseEmbedding(4).double(), SparseEmbeddingBag(4).double()):
        mine, theirs = both(layer, some(3, 2))
        assert mine.dtype == theirs.dtype == torch.float64


# Lookups as autograd functions.


def visit(*ids: int) -> Visit:
    return handle(Kept()).visit(np.array(ids), True)


def weight(**facts: Any) -> nn.Parameter:
    return nn.Parameter(torch.empty(0, DIM), **facts)


def test_gradients_of_a_repeated_id_add_up() -> None:
    table = weight()
    embed(table, visit(3, 1, 3), None, None).backward(torch.arange(9.0).view(3, 3))
    assert dense(table)[3].tolist() == [6.0, 8.0, 10.0]
    assert dense(table)[1].tolist() == [3.0, 4.0, 5.0]
    assert isinstance(table.grad, Tensor)
    assert table.grad.shape == (0, DIM)


def test_untrained_rows_have_no_gradient() -> None:
    table, seen = weight(), visit(3, 1, 2, 9)
    embed(table, seen, None, seen.wanted.ids != 1).sum().backward()
    assert sorted(np.flatnonzero(dense(table).any(1))) == [2, 3, 9]
    gradient: Any = table.grad
    [part] = gradient.parts
    assert part.starts[-1] == 3
    for server in (0, 1):
        mine = seen.wanted.ids[seen.wanted.slice_of(server)]
        start, stop = part.starts[server : server + 2]
        assert part.ids[start:stop].tolist() == [i for i in mine if i != 1]


def test_gradient_has_the_counts_of_the_lookup() -> None:
    table, seen = weight(), visit(3, 1)
    counts = np.array([2.0, 1.0], np.float32), np.array([1.0, 0.0], np.float32)
    embed_bags(table, None, seen, np.array([0, 2]), "sum", counts).sum().backward()
    gradient: Any = table.grad
    assert gradient.parts[0].shows.tolist() == [2, 1]
    assert gradient.parts[0].clicks.tolist() == [1, 0]


def test_frozen_table_requires_no_gradient() -> None:
    table = weight(requires_grad=False)
    assert not embed(table, visit(1), None, None).requires_grad
    weights = torch.ones(2, requires_grad=True)
    embed_bags(table, weights, visit(1, 2), np.array([0, 2]), "sum", None).sum().backward()
    rows = Kept().rows
    np.testing.assert_allclose(weights.grad, rows[[1, 2]].sum(1), rtol=1e-6)  # type: ignore[arg-type]
    assert table.grad is None


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16, torch.float64])
def test_looked_up_rows_have_the_dtype_of_the_weight(kind: torch.dtype) -> None:
    table = weight().to(kind)
    table = nn.Parameter(table.detach())
    out = embed(table, visit(1), None, None)
    assert out.dtype == kind
    out.backward(torch.full((1, DIM), 0.5, dtype=kind))
    assert dense(table)[1].tolist() == [0.5] * DIM


# The weight of a table refuses computation, but works with torch's tools for Parameters.


def net() -> nn.Module:
    module = nn.Module()
    module.emb, module.out = SparseEmbedding(4, table="users"), nn.Linear(4, 1)
    return module


@pytest.mark.parametrize(
    "use",
    [
        lambda w: w.square().sum(),
        lambda w: 2 * w,
        lambda w: F.linear(torch.ones(2, 4), w),
        lambda w: F.embedding(torch.tensor([0]), w),
        lambda w: torch.norm(w),
        lambda w: torch.ones(2, 4) @ w.T,
        lambda w: w[3],
        lambda w: list(w),
        lambda w: w.data.normal_(),
        lambda w: w.detach().sum(),
        lambda w: w.copy_(torch.ones(())),
        lambda w: setattr(w, "data", torch.ones(5, 4)),
        nn.init.xavier_uniform_,
        nn.init.zeros_,
        lambda w: torch._foreach_norm([w]),
        lambda w: w.clone().mul_(0.9),
        lambda w: w.numpy(),
        lambda w: w.as_subclass(torch.Tensor),
        lambda w: nn.Parameter(w.detach()).sum(),
    ],
)
def test_computation_is_refused_with_the_table_and_advice(use: Callable[[Any], Any]) -> None:
    with pytest.raises(PlanError, match=r"(?s)users: .*weight_decay.*fleet\.rows\(layer, ids\)"):
        use(net().emb.weight)


def test_stand_for_converts_a_parameter_in_place() -> None:
    weight = nn.Parameter(torch.ones(5, 4))
    assert stand_for(weight, "emb") is weight
    assert isinstance(weight, TableWeight)
    assert tuple(weight.shape) == (0, 4)
    assert "emb" in repr(weight)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adagrad, torch.optim.Adam])
def test_optimizers_and_modules_accept_a_table_weight(kind: Any) -> None:
    module = net()
    optimizer = kind(module.parameters(), lr=0.1)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    module.out(torch.ones(1, 4)).sum().backward()
    nn.utils.clip_grad_norm_(module.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    optimizer.load_state_dict(copy.deepcopy(optimizer).state_dict())
    module.double().to(torch.float32).requires_grad_(False).requires_grad_(True)
    assert sum(p.numel() for p in module.parameters()) == 5
    assert isinstance(module.emb.weight, TableWeight)


def test_deepcopy_and_torch_save_keep_the_class() -> None:
    module, file = net(), io.BytesIO()
    assert isinstance(copy.deepcopy(module).emb.weight, TableWeight)
    torch.save(module, file)
    file.seek(0)
    assert isinstance(torch.load(file, weights_only=False).emb.weight, TableWeight)


def test_state_dict_loads_without_fleetlight_classes() -> None:
    module, file = net(), io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    state = torch.load(file)
    assert type(state["emb.weight"]) is torch.Tensor
    module.load_state_dict(state)


def _assigned() -> nn.Module:
    module = net()
    module.load_state_dict(net().state_dict(), assign=True)
    return module


def _swapped() -> nn.Module:
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        return net().double()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


@pytest.mark.parametrize("made", [lambda: net().to("meta"), _assigned, _swapped])
def test_replaced_parameters_are_table_weights_too(made: Callable[[], Any]) -> None:
    for module in (made(), copy.deepcopy(made())):
        weight = module.emb.weight
        assert isinstance(weight, TableWeight)
        assert weight.requires_grad
        assert next(name for name, _ in module.named_parameters()) == "emb.weight"
        with pytest.raises(PlanError, match="users"):
            weight.sum()


def _by_hand(module: Any) -> None:
    averages = {name: p.detach().clone() for name, p in module.named_parameters()}
    for name, parameter in module.named_parameters():
        averages[name].mul_(0.9).add_(parameter.detach(), alpha=0.1)


def _averaged(**options: Any) -> Callable[[Any], None]:
    def average(module: Any) -> None:
        averaged = swa_utils.AveragedModel(module, **options)
        averaged.update_parameters(module)
        averaged.update_parameters(module)

    return average


@pytest.mark.parametrize(
    "average", [_by_hand, _averaged(), _averaged(multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.99))]
)
def test_average_over_a_table_is_refused_with_advice(average: Callable[[Any], None]) -> None:
    with pytest.raises(PlanError, match=r"leave tables out.*p\.numel\(\).*AveragedModel\("):
        average(net())


def test_average_that_omits_tables_works() -> None:
    _averaged(avg_fn=lambda a, p, n: torch.lerp(a, p, 0.01) if a.numel() else a)(net())
