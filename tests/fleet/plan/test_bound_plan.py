# SPDX-License-Identifier: Apache-2.0
"""The plan that is built from a model and its optimizers: tables, caches, ties, folders."""

import copy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tests.ps.rows import DIM, ROWS, Kept, dense, handle
from tests.ps.serving import plan
from tests.workers import run_workers
from torch import Tensor, nn

import fleetlight as fleet
from fleetlight.collective.group import Group
from fleetlight.errors import ConfigError, JournalError, PlanError, StrategyError
from fleetlight.fleet.plan.bound_plan import BoundPlan, bound_plan_of, build_plan, mode_of
from fleetlight.fleet.plan.durability_dir import durable_of, remains_of, worker_journal_of
from fleetlight.fleet.plan.remote_embedding import RemoteEmbedding, is_movable, rows_of
from fleetlight.fleet.plan.tied_weights import refuse_tied
from fleetlight.fleet.server.job import ServerJob
from fleetlight.ps import messages as m
from fleetlight.ps.journal.folder import Folder, FolderIdentity
from fleetlight.ps.layers.embedding import SparseEmbedding, SparseEmbeddingBag
from fleetlight.ps.layers.entries import CountFilterEntry
from fleetlight.ps.plan import EntryPlan, InitializerPlan, RulePlan
from fleetlight.ps.resume import KEPT, NOTHING
from fleetlight.ps.worker.replay.commit_log import ResumePoint
from fleetlight.ps.worker.replay.step_journal import NoJournal, StepOrigin
from fleetlight.ps.worker.replay.worker_journal import WorkerJournal
from fleetlight.roles import Kind, Role
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
    assert mode_of(DistributedStrategy(a_sync=True, a_sync_configs={"k_steps": 4})) == "geo"
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


# Which tables may have a cache.


def tables(strategy: dict[str, Any], **layer: Any) -> list[bool]:
    model = SparseEmbedding(2, **layer)
    given = [torch.optim.SGD(model.parameters(), lr=0.1)]
    made = build_plan(model, given, DistributedStrategy(**strategy), worker_num=2, server_num=1)
    return [table.cached for table in made.plan.tables]


@pytest.mark.parametrize("strategy", [{}, {"a_sync": True, "a_sync_configs": {"staleness": 0}}])
def test_modes_that_bound_the_age_of_rows_have_caches(strategy: dict[str, Any]) -> None:
    assert tables(strategy, cache="device") == [True]
    assert tables(strategy) == [False]


@pytest.mark.parametrize(
    ("strategy", "layer", "why"),
    [
        ({"a_sync": True}, {}, "the age of a cached row has no limit; set a_sync_configs="),
        ({"a_sync": True, "a_sync_configs": {"k_steps": 4}}, {}, "a worker of GeoSGD trains its"),
        ({}, {"entry": CountFilterEntry(2)}, "its entry counts each use of an id on the servers"),
    ],
)
def test_other_caches_are_refused(
    strategy: dict[str, Any], layer: dict[str, Any], why: str
) -> None:
    with pytest.raises(PlanError, match=f"'SparseEmbedding': got cache='device', but .*{why}"):
        tables(strategy, cache="device", **layer)
    tables(strategy, **layer)


# Moved sparse layers of torch compute the same with remote rows.


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


# Tied weights: a sparse embedding may share its weight only with sparse embeddings.


class Tied(nn.Module):
    """An embedding that shares its weight with the last layer."""

    def __init__(self, embedding: Any) -> None:
        super().__init__()
        self.emb = embedding
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = embedding.weight


@pytest.mark.parametrize("served", [True, False])
def test_sparse_weight_shared_with_a_dense_layer_is_named(served: bool) -> None:
    with pytest.raises(
        PlanError, match=r"emb: .*head \(Linear\) uses its weight too.*sparse=False"
    ):
        refuse_tied(Tied(nn.Embedding(5, 4, sparse=True)), served=served)


def test_error_for_a_sparse_embedding_names_fleet_rows() -> None:
    with pytest.raises(PlanError, match=r"emb: .*fleet\.rows\(emb, ids\)"):
        refuse_tied(Tied(fleet.nn.SparseEmbedding(4)), served=True)


def test_ties_among_dense_or_among_sparse_layers_are_accepted() -> None:
    refuse_tied(Tied(nn.Embedding(5, 4)), served=True)
    one, other = nn.Embedding(5, 4, sparse=True), nn.EmbeddingBag(5, 4, sparse=True)
    other.weight = one.weight
    refuse_tied(nn.ModuleList([one, other]), served=False)


def _register_tied() -> str:
    with pytest.raises(PlanError, match="has sparse gradients") as caught:
        fleet.distributed_model(Tied(nn.Embedding(5, 4, sparse=True)))
    return str(caught.value)


def _train_shared() -> list[float]:
    """Two sparse embeddings of one weight train as in one process."""
    model: Any = nn.ModuleList([nn.Embedding(5, 2, sparse=True) for _ in range(2)])
    model[1].weight = model[0].weight
    nn.init.ones_(model[0].weight)
    ids = torch.tensor([fleet.worker_index()])
    model.forward = lambda: (model[0](ids) + 2 * model[1](ids)).sum()
    model = fleet.distributed_model(model)
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=1.0))
    model().backward()
    optimizer.step()
    return [float(v) for v in model[0].weight[:, 0]]


@pytest.mark.multiprocess
def test_workers_refuse_mixed_ties_before_training() -> None:
    assert len(run_workers(_register_tied)) == 2


@pytest.mark.multiprocess
def test_two_sparse_embeddings_train_one_weight() -> None:
    for weight in run_workers(_train_shared):
        assert weight == [1 - 1.5, 1 - 1.5, 1, 1, 1]


# The folders in which servers and workers keep durable state.


def test_folder_does_not_follow_a_change_of_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    strategy = DistributedStrategy(durability="log", durability_configs={"folder": "kept"})
    context = ServerJob(
        role=Role(kind=Kind.SERVER, server_num=1, job="a job"),
        group=Group(deadline_s=20.0),
        strategy=strategy,
        process=SimpleNamespace(stop=lambda: None),  # type: ignore[arg-type]
    )
    journal = worker_journal_of(Role(server_num=1, job="a job", max_restarts=1), strategy, 0, 5)
    assert isinstance(journal, WorkerJournal)
    monkeypatch.chdir(tmp_path / "elsewhere")
    durable = durable_of(context)
    assert durable is not None
    assert durable.path == tmp_path / "kept" / "server-0-of-1"
    push = m.Push(1, 0, 0, 1, 0, [], [], False)
    journal.commit(StepOrigin(0, 0, 0, ResumePoint(0, 0, 0, b"")), 0, [1], {0: [(push, [])]})
    journal.close(is_needed=True)
    assert (tmp_path / "kept" / "worker-0-of-1").is_dir()
    assert not (tmp_path / "elsewhere" / "kept").exists()


def test_server_reports_the_state_of_an_earlier_launch(tmp_path: Path) -> None:
    strategy = DistributedStrategy(durability="log", durability_configs={"folder": str(tmp_path)})
    role = Role(kind=Kind.SERVER, index=0, server_num=1, worker_num=2, job="a job", resume=True)
    assert remains_of(role, strategy).state == NOTHING  # type: ignore[union-attr]
    Folder.open(tmp_path / "server-0-of-1", FolderIdentity(0, 1, "a job", plan())).close()
    # only this server was restarted
    assert remains_of(role, strategy) is None
    later = role.replace(job="another launch")
    assert remains_of(later, strategy).state == KEPT  # type: ignore[union-attr]
    assert remains_of(later.replace(resume=False), strategy) is None
    with pytest.raises(JournalError, match=r"with 2 worker\(s\) has left.*this one has 3"):
        remains_of(later.replace(worker_num=3), strategy)


def test_worker_keeps_a_journal_for_a_launch_that_resumes(tmp_path: Path) -> None:
    """Also when the launcher does not restart it alone."""
    configs = {"folder": str(tmp_path)}
    strategy = DistributedStrategy(durability="log", durability_configs=configs)
    for role in (Role(server_num=1), Role(server_num=1, job="a job", max_restarts=0)):
        journal = worker_journal_of(role, strategy, 0, 5)
        assert isinstance(journal, WorkerJournal)
        journal.close(is_needed=False)
    assert isinstance(worker_journal_of(role, DistributedStrategy(), 0, 5), NoJournal)
