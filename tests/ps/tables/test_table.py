# SPDX-License-Identifier: Apache-2.0
"""Tables and their files, in float32 and narrower."""

import json
import os
import threading
import tracemalloc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import safetensors.numpy
import torch
from safetensors import safe_open
from tests.kernels.batches import numbers
from tests.ps.made_tables import (
    ALL,
    LR,
    by_id,
    ids_of,
    make,
    ones,
    read,
    saved,
    some_ids,
    table_plan,
)
from tests.ps.restartable import IDS, RestartableCluster, rows
from tests.ps.serving import plan
from torch import nn

from fleetlight.errors import CheckpointError, CorruptCheckpointError, PlanError
from fleetlight.kernels import (
    BUCKETS,
    RULES,
    buckets,
    first_values,
    from_bfloat16,
    servers_of,
    table_seed,
    to_bfloat16,
)
from fleetlight.kernels.rows.first_values import Initializer
from fleetlight.ps.plan import EntryPlan, RulePlan
from fleetlight.ps.tables import ordered_snapshot as snapshot_module
from fleetlight.ps.tables import table as table_module
from fleetlight.ps.tables import table_file
from fleetlight.ps.tables.optimizers import own_rule, push_options, rule_of
from fleetlight.ps.tables.ordered_snapshot import OrderedSnapshot
from fleetlight.ps.tables.table import Table
from fleetlight.ps.tables.table_file import TableReader, columns_of, write_table
from fleetlight.ps.tables.unordered_snapshot import UnorderedSnapshot
from fleetlight.ps.update import Ids

# Table: learns as torch embeddings do, and is saved during training.


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1),
    "momentum": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True),
    "adagrad": lambda p: torch.optim.Adagrad(
        p, 0.1, lr_decay=0.1, initial_accumulator_value=0.5, eps=1e-6
    ),
    "sparse adam": lambda p: torch.optim.SparseAdam(p, 0.01, betas=(0.8, 0.9)),
}


@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_table_learns_like_a_torch_embedding(name: str) -> None:
    """Momentum touches every row at each step, since torch's moves all of them."""
    embedding = nn.Embedding(5, 3, sparse=name != "momentum")
    optimizer = OPTIMIZERS[name](embedding.parameters())
    group = optimizer.param_groups[0]
    table = make(rule_of(optimizer, group, "emb"))
    everything = np.arange(5, dtype=np.int64)
    with torch.no_grad():
        embedding.weight.copy_(torch.from_numpy(table.pull(everything, insert=True)))
    random = np.random.default_rng(0)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    for step in range(20):
        ids = random.integers(0, 5, 4)
        if name == "momentum":
            ids = np.concatenate([everything, ids])
        gradients = random.normal(size=(len(ids), 3)).astype(np.float32)
        embedding(torch.from_numpy(ids)).backward(torch.from_numpy(gradients))
        table.push(ids, gradients, push_options(group), step)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    expected = embedding.weight.detach().numpy()
    np.testing.assert_allclose(read(table, everything), expected, rtol=2e-5, atol=1e-6)


def test_initial_values_depend_only_on_seed_and_name() -> None:
    ids = some_ids(50)
    expected = first_values(ids, 3, table_seed(7, "emb"), Initializer("uniform", -1.0, 1.0))
    table = make()
    assert np.array_equal(read(table, ids), expected)
    assert len(table) == 0
    assert np.array_equal(table.pull(ids[::-1], insert=True), expected[::-1])
    assert len(table) == len(ids)
    assert not np.array_equal(read(make(name="other"), ids), expected)


def test_the_rule_runs_once_for_an_id_that_repeats() -> None:
    table = make("adagrad")
    before = read(table, ids_of(1))
    table.push(ids_of(1, 1), ones(2), {**LR, "eps": 0.0}, 0)
    # the sum is 2 and its square 4; twice 1 would have been 1 and then 1 / sqrt(2)
    np.testing.assert_allclose(read(table, ids_of(1)), before - 0.5, rtol=1e-6)


def test_a_layers_own_rule() -> None:
    table = make(own_rule("rowwise_adagrad", "emb"))
    before = read(table, ids_of(1))
    gradient = np.array([[3.0, 0.0, 0.0]], np.float32)
    table.push(ids_of(1), gradient, {**LR, "eps": 100.0, "weight_decay": 9.0}, 0)
    expected = before - 0.5 * gradient / np.sqrt(3)
    np.testing.assert_allclose(read(table, ids_of(1)), expected, rtol=1e-5)


def test_geo_adds_and_keeps_nothing_else() -> None:
    table = make("adagrad", geo=True)
    ids = ids_of(3, -4)
    before = read(table, ids)
    [rows] = table.exchange(ids, ones(2, value=0.25), wants=True)
    assert np.array_equal(rows, before + 0.25)
    assert table.exchange(ids, ones(2, value=0.25), wants=False) == []
    assert np.array_equal(read(table, ids), before + 0.5)


def test_an_exchange_replies_in_the_memory_of_the_request() -> None:
    table = make("adagrad", geo=True)
    ids, came = ids_of(3, -4), ones(2, value=0.25)
    [rows] = table.exchange(ids, came, wants=True)
    assert rows is came
    read_only = ones(2, value=0.25)
    read_only.flags.writeable = False
    [answer] = table.exchange(ids, read_only, wants=True)
    assert np.array_equal(answer, came + 0.25)
    assert np.array_equal(read_only, ones(2, value=0.25))


def test_initial_values_of_a_worker_replace_the_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_module, "CHUNK_BYTES", 64)
    table = make("adagrad")
    ids = some_ids(40)
    rows = np.random.default_rng(1).normal(size=(len(ids), 3)).astype(np.float32)
    table.fill(ids, rows)
    assert np.array_equal(read(table, ids), rows)
    table.push(ids, ones(len(ids)), {**LR, "eps": 0.0}, 0)
    np.testing.assert_allclose(read(table, ids), rows - 0.5, rtol=1e-5)


def test_threads_may_push_at_the_same_time() -> None:
    table = make(dim=4)
    ids = some_ids(500)
    table.fill(ids, np.zeros((len(ids), 4), np.float32))
    gradient = ones(len(ids), 4, 2.0)

    def push() -> None:
        for step in range(20):
            table.push(ids, gradient, LR, step)

    threads = [threading.Thread(target=push) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (read(table, ids) == -80).all()


# saving and loading


def trained(rule: str = "adam", count: int = 300, **rest: Any) -> tuple[Table, Ids]:
    table, ids = make(rule, **rest), some_ids(count)
    table.pull(ids, insert=True)
    table.push(ids, ones(len(ids)), LR, 0)
    return table, ids


def test_the_file_lists_everything_by_bucket_and_id(tmp_path: Path) -> None:
    table, ids = trained()
    tensors = saved(table, tmp_path)
    assert set(tensors) == {"ids", "buckets", "weights", "state.exp_avg", "state.exp_avg_sq"}
    found = tensors["ids"]
    assert np.array_equal(found, ids[np.lexsort((ids, buckets(ids)))])
    assert np.array_equal(tensors["weights"], read(table, found))
    np.testing.assert_allclose(tensors["state.exp_avg"], 0.1, rtol=1e-5)
    np.testing.assert_allclose(tensors["state.exp_avg_sq"], 0.001, rtol=1e-4)
    counts = np.bincount(buckets(ids), minlength=BUCKETS)
    assert np.array_equal(np.diff(tensors["buckets"]), counts)


@pytest.mark.parametrize("rule", ["sgd", "momentum", "adagrad", "rowwise_adagrad", "adam"])
@pytest.mark.parametrize("servers", [1, 3])
def test_a_table_loads_into_any_number_of_servers(rule: str, servers: int, tmp_path: Path) -> None:
    entry = EntryPlan("count", 1.0)
    table, ids = trained(rule, entry=entry)
    whole = saved(table, tmp_path)
    parts = []
    for server in range(servers):
        part = make(rule, entry=entry)
        bounds = [-(-BUCKETS * s // servers) for s in (server, server + 1)]
        part.load([tmp_path / "t.safetensors"], range(*bounds))
        mine = ids[servers_of(ids, servers) == server]
        assert len(part) == len(mine)
        parts.append(saved(part, tmp_path / f"{server}"))
        part.push(ids, ones(len(ids)), LR, 1)
        table.push(mine, ones(len(mine)), LR, 1)
        assert np.array_equal(read(part, mine), read(table, mine))
    assert by_id(parts) == by_id([whole])
    merged = make(rule, entry=entry)
    merged.load([tmp_path / f"{s}" / "t.safetensors" for s in range(servers)], ALL)
    assert by_id([saved(merged, tmp_path / "merged")]) == by_id([whole])


def test_loading_replaces_all_rows(tmp_path: Path) -> None:
    table, ids = trained("sgd", 20)
    before = read(table, ids)
    saved(table, tmp_path)
    table.push(ids, ones(len(ids)), LR, 1)
    others = some_ids(9, seed=1)
    table.push(others, ones(len(others)), LR, 1)
    table.load([tmp_path / "t.safetensors"], ALL)
    assert len(table) == len(ids)
    assert np.array_equal(read(table, ids), before)


@pytest.mark.parametrize("memory", [0, 1])
@pytest.mark.parametrize("ordered", [True, False])
def test_saving_between_steps_of_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ordered: bool, memory: int
) -> None:
    """Rows change, appear and are removed between any two chunks; the file is unaffected."""
    monkeypatch.setattr(table_module, "CHUNK_BYTES", 400)
    monkeypatch.setattr(snapshot_module, "LIST_ROWS", 7)
    table, ids = trained(entry=EntryPlan("count", 1.0), memory=memory)
    still = saved(table, tmp_path / "still")
    born = iter(some_ids(10_000, seed=1).reshape(-1, 10))
    random = np.random.default_rng(0)
    steps = 0
    honest, honest_list = OrderedSnapshot.read, OrderedSnapshot._list
    honest_pieces = UnorderedSnapshot.pieces

    def read_and_train(snapshot: OrderedSnapshot, start: int, stop: int) -> Any:
        rows = honest(snapshot, start, stop)
        train()
        return rows

    def list_and_train(snapshot: OrderedSnapshot, start: int, stop: int) -> Any:
        listed = honest_list(snapshot, start, stop)
        train()
        return listed

    def train() -> None:
        nonlocal steps
        steps += 1
        chosen = np.concatenate([random.choice(ids, 30), next(born)])
        table.pull(chosen, insert=True)
        table.push(chosen, ones(len(chosen)), LR, steps)
        table.fill(random.choice(ids, 5), ones(5, value=9.0))
        if steps % 5 == 0:
            table.shrink(1, 0.0, 0.5)

    monkeypatch.setattr(OrderedSnapshot, "read", read_and_train)

    def sweep_and_train(sweep: UnorderedSnapshot, lock: Any) -> Any:
        for piece in honest_pieces(sweep, lock):
            train()
            yield piece

    monkeypatch.setattr(OrderedSnapshot, "_list", list_and_train)
    monkeypatch.setattr(UnorderedSnapshot, "pieces", sweep_and_train)
    snapshot = table.cut(ordered=ordered)
    table.push(ids[:50], ones(50), LR, 5)
    table.save(snapshot, 4, tmp_path / "still", "moving.safetensors")
    assert steps > 40
    monkeypatch.undo()
    again = make("adam", entry=EntryPlan("count", 1.0))
    again.load([tmp_path / "still" / "moving.safetensors"], ALL if ordered else None)
    assert by_id([saved(again, tmp_path / "again")]) == by_id([still])
    assert by_id([saved(table, tmp_path / "now")]) != by_id([still])


def test_saving_while_another_thread_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table_module, "CHUNK_BYTES", 2000)
    table, ids = trained("adagrad", 3000)
    before = read(table, ids)
    snapshot = table.cut()
    begun, done = threading.Event(), threading.Event()

    def train() -> None:
        step = 0
        while not done.is_set():
            table.push(ids[step % 7 :: 7], ones(len(ids[step % 7 :: 7])), LR, step)
            step += 1
            if step == 7:
                begun.set()

    thread = threading.Thread(target=train)
    thread.start()
    assert begun.wait(60)
    table.save(snapshot, 0, tmp_path, "t.safetensors")
    done.set()
    thread.join()
    again = make("adagrad")
    again.load([tmp_path / "t.safetensors"], ALL)
    assert np.array_equal(read(again, ids), before)
    assert not np.array_equal(read(table, ids), before)


def test_training_continues_while_rows_are_sorted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table, ids = trained("sgd", 20)
    before = read(table, ids)
    honest = snapshot_module.put_in_bucket_order

    def sort(*args: Any) -> None:
        thread = threading.Thread(target=table.push, args=(ids, ones(len(ids)), LR, 1))
        thread.start()
        thread.join(30)
        assert not thread.is_alive(), "a push waits"
        honest(*args)

    monkeypatch.setattr(snapshot_module, "put_in_bucket_order", sort)
    tensors = saved(table, tmp_path)
    assert np.array_equal(read(table, ids), before - 0.5)
    assert (tensors["weights"][np.argsort(tensors["ids"])] == before).all()


def test_a_table_is_never_held_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Saving and loading allocate an order of rows and a piece; a table is mapped memory."""
    monkeypatch.setattr(table_module, "CHUNK_BYTES", 1 << 20)
    monkeypatch.setattr(table_file, "_READ_BYTES", 1 << 20)
    table = make("adagrad", dim=32)
    table.pull(some_ids(60_000), insert=True)
    size = table.nbytes
    assert size > 15e6
    # the first call of a kernel loads it, which takes memory once
    (tmp_path / "before").mkdir()
    table.save(table.cut(), 0, tmp_path / "before", "t.safetensors")
    table.load([tmp_path / "before" / "t.safetensors"], ALL)
    tracemalloc.start()
    try:
        table.save(table.cut(), 0, tmp_path, "t.safetensors")
        table.load([tmp_path / "t.safetensors"], ALL)
        assert tracemalloc.get_traced_memory()[1] < size / 3
    finally:
        tracemalloc.stop()


def test_old_rows_are_freed_before_new_ones_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table, _ids = trained()
    saved(table, tmp_path)
    old = weakref.ref(table._rows)
    honest = TableReader.pieces
    left = []

    def pieces(*args: Any) -> Any:
        left.append(old())
        return honest(*args)

    monkeypatch.setattr(TableReader, "pieces", pieces)
    table.load([tmp_path / "t.safetensors"], ALL)
    assert left == [None]


def test_a_cut_is_freed_once_saved(tmp_path: Path) -> None:
    table, _ids = trained()
    size = table.nbytes
    snapshot = table.cut()
    assert table.nbytes > size
    table.save(snapshot, 0, tmp_path, "t.safetensors")
    assert table.nbytes == size


def test_a_failed_save_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table, _ids = trained()
    with pytest.raises(FileNotFoundError):
        table.save(table.cut(), 0, tmp_path / "missing", "t.safetensors")

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.pwrite", full)
    with pytest.raises(OSError, match="No space left"):
        table.save(table.cut(), 0, tmp_path, "t.safetensors")
    monkeypatch.undo()
    assert not list(tmp_path.iterdir())
    saved(table, tmp_path)


def test_one_cut_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table, _ids = trained()
    old = table.cut()
    table.cut()
    with pytest.raises(CheckpointError, match="'emb' was cut again or loaded before"):
        table.save(old, 0, tmp_path, "t.safetensors")
    honest = OrderedSnapshot.read

    def meanwhile(snapshot: OrderedSnapshot, start: int, stop: int) -> Any:
        with pytest.raises(CheckpointError, match="cannot be cut again while it is being saved"):
            table.cut()
        with pytest.raises(CheckpointError, match="cannot be loaded while it is being saved"):
            table.load([], ALL)
        return honest(snapshot, start, stop)

    monkeypatch.setattr(OrderedSnapshot, "read", meanwhile)
    saved(table, tmp_path)


def test_geo_and_other_modes_read_each_others_files(tmp_path: Path) -> None:
    table, ids = trained("adagrad")
    saved(table, tmp_path, "rule")
    geo = make("adagrad", geo=True)
    geo.load([tmp_path / "rule"], ALL)
    assert np.array_equal(read(geo, ids), read(table, ids))
    saved(geo, tmp_path, "geo")
    back = make(RulePlan("adagrad", {"initial_accumulator_value": 3.0}))
    back.load([tmp_path / "geo"], ALL)
    assert np.array_equal(read(back, ids), read(table, ids))
    assert (saved(back, tmp_path, "back")["state.sum"] == 3.0).all()


def test_rows_of_a_table_without_an_entry_are_admitted(tmp_path: Path) -> None:
    table, ids = trained("sgd")
    saved(table, tmp_path)
    strict = make("sgd", entry=EntryPlan("count", 100.0))
    strict.load([tmp_path / "t.safetensors"], ALL)
    before = read(strict, ids)
    strict.push(ids, ones(len(ids)), LR, 0)
    assert np.array_equal(read(strict, ids), before - 0.5)


def test_files_of_other_tables_are_refused(tmp_path: Path) -> None:
    table, ids = trained()
    saved(table, tmp_path)
    loading = Table(table_plan("adam", dim=4), 7)
    loading.pull(ids[:5], insert=True)
    message = "its rows have 3 weights, expected 4"
    with pytest.raises(
        CheckpointError, match=rf"t.safetensors does not fit table 'emb': {message}"
    ):
        loading.load([tmp_path / "t.safetensors"], ALL)
    assert len(loading) == 5


@pytest.mark.parametrize(("before", "after"), [("adam", "adagrad"), ("rowwise_adagrad", "adagrad")])
def test_another_rule_loads_the_weights_and_resets_its_state(
    before: str, after: str, tmp_path: Path
) -> None:
    table, ids = trained(before)
    saved(table, tmp_path)
    other = make(after)
    other.load([tmp_path / "t.safetensors"], ALL)
    assert np.array_equal(read(other, ids), read(table, ids))
    assert (saved(other, tmp_path / "other")["state.sum"] == 0).all()


def test_a_dropped_cut_keeps_no_memory(tmp_path: Path) -> None:
    table, _ids = trained()
    before = table.nbytes
    snapshot = table.cut()
    assert table.nbytes > before
    table.drop_cut()
    assert table.nbytes == before
    with pytest.raises(CheckpointError, match="was cut again or loaded before"):
        table.save(snapshot, 0, tmp_path, "t.safetensors")


def test_repeated_ids_are_refused(tmp_path: Path) -> None:
    table, ids = trained()
    saved(table, tmp_path)
    with pytest.raises(CorruptCheckpointError, match=f"{len(ids)} ids are in the files twice"):
        table.load([tmp_path / "t.safetensors"] * 2, ALL)


def test_only_tables_that_count_can_shrink() -> None:
    with pytest.raises(PlanError, match=r"'emb' has no counts to shrink it by; give .* entry="):
        make().shrink(1, 0.0, 1.0)


def test_an_empty_table(tmp_path: Path) -> None:
    table = make("adam")
    empty = np.empty((0, 3), np.float32)
    assert table.pull(ids_of(), insert=True).shape == (0, 3)
    table.push(ids_of(), empty, LR, 0)
    table.fill(ids_of(), empty)
    assert saved(table, tmp_path)["weights"].shape == (0, 3)
    table.load([tmp_path / "t.safetensors"], ALL)
    assert len(table) == 0


# Tables with weights in bfloat16: checkpoints, snapshots, entries, and recovery from the log.


FEW = some_ids(50)


def table(dtype: str, rule: str = "adagrad", geo: bool = False, **rest: Any) -> Table:
    return Table(msgspec.structs.replace(table_plan(rule, **rest), dtype=dtype), seed=7, geo=geo)


def trained_narrow(dtype: str, **rest: Any) -> Table:
    made = table(dtype, **rest)
    for step in range(5):
        made.push(FEW, numbers(step, len(FEW), 3), LR, step)
    return made


@pytest.mark.parametrize(("of", "into"), [("fp32", "bf16"), ("bf16", "fp32"), ("bf16", "bf16")])
def test_a_checkpoint_loads_into_tables_of_both_types(of: str, into: str, tmp_path: Path) -> None:
    before, after = trained_narrow(of), table(into)
    tensors = saved(before, tmp_path / "a")
    assert tensors["weights"].dtype == np.float32
    after.load([tmp_path / "a" / "t.safetensors"], ALL)
    expected = read(before, FEW)
    if into == "bf16":
        expected = from_bfloat16(to_bfloat16(expected))
    np.testing.assert_array_equal(read(after, FEW), expected)
    # the state is that of the file, so training continues
    again = saved(after, tmp_path / "b")
    np.testing.assert_array_equal(again["state.sum"], tensors["state.sum"])


def test_a_cut_keeps_the_rows_while_training_changes_them(tmp_path: Path) -> None:
    for ordered in (True, False):
        one = trained_narrow("bf16")
        expected = read(one, FEW)
        cut = one.cut(ordered=ordered)
        one.push(FEW, numbers(9, len(FEW), 3), LR, 9)
        name = f"{ordered}.safetensors"
        one.save(cut, 0, tmp_path, name)
        back = table("bf16")
        back.load([tmp_path / name], ALL if ordered else None)
        np.testing.assert_array_equal(read(back, FEW), expected)
        assert (read(one, FEW) != expected).any()


def test_entries_count_shrink_and_reset_narrow_rows(tmp_path: Path) -> None:
    one = table("bf16", entry=EntryPlan("count", 2))
    for _ in range(2):
        one.pull(ids_of(1, 2, 3), insert=True)
    one.push(ids_of(1, 2, 3), ones(3), LR, 0)
    first = read(one, ids_of(4))
    assert one.shrink(0, 0.5, 0.1) == (3, 0)
    one.fill(ids_of(1, 4), ones(2, value=0.3))
    np.testing.assert_array_equal(read(one, ids_of(1, 4)), ones(2, value=0.30078125))
    one.reset()
    np.testing.assert_array_equal(read(one, ids_of(4)), first)
    assert by_id([saved(one, tmp_path)])


def test_differences_of_geo_round_at_random() -> None:
    one = table("bf16", geo=True)
    ids = np.arange(2000, dtype=np.int64)
    one.fill(ids, ones(len(ids)))
    for step in range(10):
        one.exchange(ids, ones(len(ids), value=2.0**-11), wants=False, step=step)
    mean = float(one.pull(ids, False).mean(dtype=np.float64))
    assert mean == pytest.approx(1 + 10 * 2.0**-11, abs=1e-4)


@pytest.mark.parametrize("snapshot", [False, True])
def test_a_server_that_restarts_has_the_same_rows(snapshot: bool, tmp_path: Path) -> None:
    """Replay of the log rounds as the first time."""
    made = plan("async", durability="log")
    users = msgspec.structs.replace(made.tables[0], dtype="bf16")
    cluster = RestartableCluster(tmp_path, msgspec.structs.replace(made, tables=[users]), log=True)
    for step in range(6):
        cluster.workers[0].push(step, {0: (IDS, [0.001 * (step + i) for i in range(len(IDS))])})
        if snapshot and step == 3:
            cluster.durability.snapshot_now()
    before = rows(cluster.workers[0])
    assert len(set(before)) > 2
    cluster.restart()
    assert rows(cluster.workers[0]) == before
    cluster.close()


# The file of a table is plain safetensors, and a damaged one is refused by name.


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("meta", [0, 4])
def test_columns_cover_a_row(rule: str, meta: int) -> None:
    kept = RULES[rule]
    columns = columns_of(8, kept, meta)
    assert [c.stop for c in columns[:-1]] == [c.start for c in columns[1:]]
    assert columns[0].start == 0
    assert columns[-1].stop == 8 + kept.state_width(8) + meta
    assert len({c.name for c in columns}) == len(columns)


def test_the_file_describes_itself(tmp_path: Path) -> None:
    table = make("rowwise_adagrad")
    table.push(some_ids(9), ones(9), LR, 0)
    assert saved(table, tmp_path)["state.sum"].shape == (9, 1)
    with safe_open(tmp_path / "t.safetensors", framework="np") as file:
        expected = {"format": "pt", "table": "emb", "rule": "rowwise_adagrad"}
        assert file.metadata() == expected
    assert TableReader(tmp_path / "t.safetensors").about == expected


def test_the_file_is_on_disk_before_it_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed = []
    monkeypatch.setattr("os.fsync", lambda fd: flushed.append(os.fstat(fd).st_size))
    saved(make("sgd"), tmp_path)
    assert flushed == [(tmp_path / "t.safetensors").stat().st_size]


def test_a_range_of_buckets_is_read_in_chunks(tmp_path: Path) -> None:
    table = make("momentum")
    table.push(some_ids(500), ones(500), LR, 0)
    tensors = saved(table, tmp_path)
    reader = TableReader(tmp_path / "t.safetensors")
    columns = columns_of(3, RULES["momentum"], 1)
    blank = np.arange(7, dtype=np.float32)
    mine = range(BUCKETS // 3, BUCKETS // 2)
    first, last = reader.span(mine)
    pieces = list(reader.pieces(mine, columns, blank, 30))
    assert {len(ids) for ids, _ in pieces[:-1]} == {30}
    assert np.array_equal(np.concatenate([ids for ids, _ in pieces]), tensors["ids"][first:last])
    rows = np.concatenate([rows for _, rows in pieces])
    assert np.array_equal(rows[:, :3], tensors["weights"][first:last])
    assert np.array_equal(rows[:, 3:6], tensors["state.momentum_buffer"][first:last])
    assert (rows[:, 6] == 6).all()  # the file has no meta


def test_a_file_with_too_few_rows_is_discarded(tmp_path: Path) -> None:
    path, ids = tmp_path / "t.safetensors", np.arange(3, dtype=np.int64)
    columns = columns_of(2, RULES["sgd"], 0)
    with pytest.raises(CheckpointError, match=r"t\.safetensors: got 3 rows, expected 4"):
        write_table(path, columns, 4, [(ids, np.ones((3, 2), np.float32))], {})
    assert not path.exists()


def test_a_file_without_an_index_is_read_whole(tmp_path: Path) -> None:
    table = make("momentum")
    table.push(some_ids(500), ones(500), LR, 0)
    indexed = by_id([saved(table, tmp_path)])
    entry = table.save(table.cut(ordered=False), 4, tmp_path, "any.safetensors")
    reader = TableReader(tmp_path / "any.safetensors")
    reader.compare(entry.bytes, entry.sha256)
    assert reader.span(None) == (0, entry.rows) == (0, 500)
    assert by_id([safetensors.numpy.load_file(reader.path)]) == indexed
    again = make("momentum")
    with pytest.raises(CheckpointError, match=r"any\.safetensors has no index of its rows: only"):
        again.load([reader.path], ALL)
    again.load([reader.path], None)
    assert by_id([saved(again, tmp_path, "again.safetensors")]) == indexed


def edited(data: bytes, edit: Callable[[dict[str, dict[str, object]]], object]) -> bytes:
    """The file with a changed header of the same length."""
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    edit(header)
    text = json.dumps(header, separators=(",", ":")).encode().ljust(length)
    return data[:8] + text[:length] + data[8 + length :]


def with_index(data: bytes, bucket: int, start: int) -> bytes:
    """The file with a changed start of one bucket."""
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    at = 8 + length + header["buckets"]["data_offsets"][0] + 8 * bucket
    return data[:at] + start.to_bytes(8, "little", signed=True) + data[at + 8 :]


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (lambda d: b"", ""),
        (lambda d: b"garbage", "less than its header"),
        (lambda d: b"\xff" * 64, "less than its header"),
        (lambda d: d[:-4], "it was truncated"),
        (lambda d: d[:8] + b"[" * 64 + d[72:], ""),
        (lambda d: edited(d, lambda h: h.pop("ids")), "'ids'"),
        (lambda d: edited(d, lambda h: h["ids"].update(dtype="F32")), ""),
        (lambda d: edited(d, lambda h: h["ids"].update(dtype="I9")), "'I9'"),
        (lambda d: edited(d, lambda h: h["weights"].update(shape=[1, 3])), ""),
        (lambda d: edited(d, lambda h: h.update(ids=3)), ""),
        (lambda d: with_index(d, BUCKETS, 8), "its index does not fit its ids"),
        (lambda d: with_index(d, 5, 10**6), "its index is not in order"),
        (lambda d: with_index(d, 0, -1), "its index is not in order"),
    ],
)
def test_damaged_files_are_refused(
    damage: Callable[[bytes], bytes], why: str, tmp_path: Path
) -> None:
    table = make("adam")
    table.push(some_ids(9), ones(9), LR, 0)
    saved(table, tmp_path)
    path = tmp_path / "t.safetensors"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(CorruptCheckpointError, match="not the file of a table") as raised:
        make("adam").load([path], ALL)
    assert str(path) in str(raised.value)
    assert why in str(raised.value)
