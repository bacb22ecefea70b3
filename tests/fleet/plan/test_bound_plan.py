# SPDX-License-Identifier: Apache-2.0
"""The plan that is built from a model and its optimizers."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from fleetlight.errors import PlanError, StrategyError
from fleetlight.fleet.plan.bound_plan import BoundPlan, bound_plan_of, build_plan, mode_of
from fleetlight.ps.layers.embedding import SparseEmbedding, SparseEmbeddingBag
from fleetlight.ps.layers.entries import CountFilterEntry
from fleetlight.ps.plan import EntryPlan, InitializerPlan, RulePlan
from fleetlight.strategy import DistributedStrategy


class Model(nn.Module):
    """Two layers on one table, a moved torch layer and dense parameters."""

    def __init__(self, **second: Any) -> None:
        super().__init__()
        self.a = SparseEmbedding(4, table="words", entry=CountFilterEntry(3))
        self.b = SparseEmbeddingBag(4, **{"table": "words", "entry": CountFilterEntry(3), **second})
        self.deep = nn.Sequential(nn.Embedding(7, 2, sparse=True), nn.Linear(2, 1))
        self.usual = nn.Embedding(5, 2)


def bound(model: nn.Module, *optimizers: torch.optim.Optimizer, **strategy: Any) -> BoundPlan:
    given = list(optimizers) or [torch.optim.SGD(model.parameters(), lr=0.1)]
    return build_plan(model, given, DistributedStrategy(**strategy), worker_num=2, server_num=3)


def test_tables_are_named_by_path_and_may_be_shared() -> None:
    model = Model()
    found = bound(model, seed=5)
    words, moved = found.plan.tables
    assert (words.name, words.dim, words.rows) == ("words", 4, 0)
    assert words.entry == EntryPlan("count", 3) or words.entry == CountFilterEntry(3).plan
    assert words.initializer == InitializerPlan("uniform", -0.05, 0.05)
    assert (moved.name, moved.dim, moved.rows, moved.entry) == ("deep.0", 2, 7, None)
    assert [d.name for d in found.plan.dense] == ["deep.1.weight", "deep.1.bias", "usual.weight"]
    assert found.weights(0) == [model.a.weight, model.b.weight]
    assert (found.plan.seed, found.plan.worker_num, found.plan.server_num) == (5, 2, 3)


def test_layers_with_a_common_weight_share_a_table() -> None:
    model = nn.Sequential(SparseEmbedding(2), SparseEmbedding(2))
    model[1].weight = model[0].weight
    [table] = bound(model).plan.tables
    assert table.name == "0"


def test_single_layer_is_a_model() -> None:
    assert [t.name for t in bound(SparseEmbedding(2)).plan.tables] == ["SparseEmbedding"]


def test_each_param_group_becomes_a_rule() -> None:
    model = Model()
    optimizers = [
        torch.optim.Adagrad([{"params": [model.a.weight, model.b.weight]}], lr=0.1),
        torch.optim.SGD(
            [{"params": model.usual.parameters()}, {"params": model.deep.parameters()}],
            lr=0.1,
            momentum=0.9,
        ),
    ]
    plan = bound(model, *optimizers).plan
    rules = {t.name: (t.rule.name, t.optimizer, t.group) for t in plan.tables}
    assert rules == {"words": ("adagrad", 0, 0), "deep.0": ("momentum", 1, 1)}
    assert {d.name: d.group for d in plan.dense}["usual.weight"] == 0
    assert [o.groups for o in plan.optimizers] == [1, 2]


def test_layer_may_name_its_own_rule() -> None:
    model = nn.Sequential(SparseEmbedding(2, optimizer="rowwise_adagrad"), nn.Linear(2, 1))
    [table] = bound(model, torch.optim.RMSprop(model.parameters())).plan.tables
    assert table.rule.name == "rowwise_adagrad"


def test_plan_without_an_optimizer_has_tables_but_no_dense_parameters() -> None:
    model = nn.Sequential(SparseEmbedding(2), nn.Linear(2, 1), nn.Linear(1, 1))
    plan = bound(model, torch.optim.SGD(model[2].parameters(), lr=0.1)).plan
    assert plan.tables[0].rule == RulePlan("sgd", {"weight_decay": 0.0})
    assert plan.tables[0].optimizer == -1
    assert [d.name for d in plan.dense] == ["2.weight", "2.bias"]


def test_modes() -> None:
    assert mode_of(DistributedStrategy()) == "sync"
    assert mode_of(DistributedStrategy(a_sync=True)) == "async"
    geo = DistributedStrategy(a_sync=True, a_sync_configs={"k_steps": 4})
    assert mode_of(geo) == "geo"
    plan = bound(nn.Linear(1, 1), a_sync=True, a_sync_configs={"staleness": 3}).plan
    assert (plan.mode, plan.staleness, plan.k_steps) == ("async", 3, 0)


def test_the_memory_of_a_table_and_the_folder_of_its_file() -> None:
    model = nn.Sequential(
        SparseEmbedding(2, memory="1KiB"), SparseEmbeddingBag(2), nn.Embedding(3, 2, sparse=True)
    )
    plan = bound(model, a_sync_configs={"table_folder": "/mnt/ssd"}).plan
    assert [table.memory for table in plan.tables] == [1024, 0, 0]
    assert plan.table_folder == "/mnt/ssd"
    shared = nn.Sequential(SparseEmbedding(2, table="t", memory=9), SparseEmbedding(2, table="t"))
    with pytest.raises(PlanError, match=r"'t' is shared by layers that differ.*memory,"):
        bound(shared)


def test_the_maximum_of_rows_of_a_table() -> None:
    model = nn.Sequential(
        SparseEmbedding(2, max_rows=7), SparseEmbeddingBag(2, max_rows=8, evict="count")
    )
    plan = bound(nn.Sequential(model, SparseEmbedding(2))).plan
    assert [(table.max_rows, table.evict) for table in plan.tables] == [
        (7, "age"),
        (8, "count"),
        (0, ""),
    ]
    assert [table.is_read_ahead for table in plan.tables] == [False, False, True]
    with pytest.raises(PlanError, match="cache='device', but no reply names the rows that leave"):
        bound(SparseEmbedding(2, max_rows=7, cache="device"))


def test_a_table_has_the_types_of_its_layer_or_of_the_strategy() -> None:
    layers = [
        SparseEmbedding(2, wire="int8"),
        SparseEmbeddingBag(2, dtype="bf16"),
        nn.Embedding(3, 2, sparse=True),
    ]
    model = nn.Sequential(*layers)
    assert [t.wire for t in bound(model).plan.tables] == ["int8", "fp32", "fp32"]
    assert [t.dtype for t in bound(model).plan.tables] == ["fp32", "bf16", "fp32"]
    plan = bound(model, a_sync_configs={"table_dtype": "bf16"}).plan
    assert [t.dtype for t in plan.tables] == ["bf16"] * 3
    plan = bound(model, a_sync_configs={"table_wire": "bf16"}).plan
    assert [t.wire for t in plan.tables] == ["int8", "bf16", "bf16"]


def test_geo_with_dense_allreduce_is_refused() -> None:
    configs = {"k_steps": 4, "dense": "allreduce"}
    with pytest.raises(StrategyError, match="leave one of them out"):
        bound(nn.Linear(2, 1), a_sync=True, a_sync_configs=configs)


def two_optimizers() -> Any:
    layer = nn.Linear(1, 1)
    return bound(layer, *(torch.optim.SGD(layer.parameters(), lr=0.1) for _ in range(2)))


def groups_apart() -> Any:
    model = Model()
    rest = [p for n, p in model.named_parameters() if n != "a.weight"]
    groups = [{"params": [model.a.weight]}, {"params": rest}]
    return bound(model, torch.optim.SGD(groups, lr=0.1))


def by_frequency() -> Any:
    return bound(nn.Sequential(nn.EmbeddingBag(3, 2, sparse=True, scale_grad_by_freq=True)))


def complex_numbers() -> Any:
    model = nn.Module()
    model.p = nn.Parameter(torch.ones(1, dtype=torch.complex64))
    return bound(model)


def rmsprop() -> Any:
    model = nn.Sequential(SparseEmbedding(2))
    return bound(model, torch.optim.RMSprop(model.parameters()))


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (two_optimizers, "a parameter is in two distributed optimizers"),
        (groups_apart, "'words' is shared by layers whose weights are in different param groups"),
        (lambda: bound(Model(entry=None)), r"'words' is shared by layers that differ"),
        (lambda: bound(Model(initializer="zeros")), "'words' is shared by layers that differ"),
        (lambda: bound(Model(cache="device")), "'words' is shared by layers that differ"),
        (lambda: bound(Model(wire="int8")), "'words' is shared by layers that differ"),
        (lambda: bound(nn.Embedding(3, 2, sparse=True, max_norm=1.0)), "with max_norm cannot"),
        (by_frequency, "0: EmbeddingBag with scale_grad_by_freq cannot be moved"),
        (complex_numbers, r"parameter p is of torch\.complex64; parameter servers keep float32"),
        (rmsprop, r"table '0' is in the optimizer torch\.optim\.rmsprop\.RMSprop; a table works"),
    ],
)
def test_models_without_a_plan_are_refused(make: Callable[[], Any], why: str) -> None:
    with pytest.raises(PlanError, match=why):
        make()


def tied(embedding: nn.Embedding) -> nn.Module:
    model = nn.ModuleDict({"emb": embedding, "out": nn.Linear(2, 5, bias=False)})
    model["out"].weight = model["emb"].weight
    return model


def test_weight_used_by_another_module_is_not_moved() -> None:
    with pytest.raises(PlanError, match=r"emb: .* but out \(Linear\) uses its weight too") as got:
        bound(tied(nn.Embedding(5, 2, sparse=True)))
    assert "build emb with sparse=False" in str(got.value)
    plan = bound(tied(nn.Embedding(5, 2))).plan
    assert not plan.tables
    assert [d.name for d in plan.dense] == ["emb.weight"]


def test_weight_used_by_the_model_or_a_plain_layer_is_not_moved() -> None:
    model = nn.Sequential(nn.Embedding(5, 2, sparse=True))
    model.register_parameter("again", model[0].weight)
    with pytest.raises(PlanError, match=r"but the model itself \(Sequential\) .* as again"):
        bound(model)
    half = nn.Sequential(nn.Embedding(5, 2), nn.Embedding(5, 2, sparse=True))
    half[0].weight = half[1].weight
    with pytest.raises(PlanError, match=r"1: .* but 0 \(Embedding\)"):
        bound(half)


def test_moved_layers_may_share_a_weight() -> None:
    model = nn.Sequential(nn.Embedding(5, 2, sparse=True), nn.EmbeddingBag(5, 2, sparse=True))
    model[1].weight = model[0].weight
    assert [table.name for table in bound(model).plan.tables] == ["0"]


class Named(nn.Module):
    """A table, and a dense layer that may have the same name."""

    def __init__(self, table: str, dense: str) -> None:
        super().__init__()
        self.emb = SparseEmbedding(3, table=table)
        self.add_module(dense, nn.Linear(3, 1))


def test_table_with_the_name_of_a_module_is_refused() -> None:
    bound(Named("users", "dense"))
    words = r"table 'dense' of layer emb .* module 'dense' \(Linear\).* table='dense_rows'"
    with pytest.raises(PlanError, match=words):
        bound(Named("dense", "dense"))


def test_table_with_the_name_of_a_module_of_another_model_is_refused() -> None:
    one, other = Named("dense", "dense"), nn.Linear(1, 1)
    context: Any = SimpleNamespace(
        models=[SimpleNamespace(module=one), SimpleNamespace(module=other)],
        optimizers=[SimpleNamespace(optimizer=torch.optim.SGD(one.parameters(), lr=0.1))],
        strategy=DistributedStrategy(),
        role=SimpleNamespace(worker_num=1, server_num=1),
    )
    with pytest.raises(PlanError, match=r"saved as 'dense\.weight'"):
        bound_plan_of(context)
