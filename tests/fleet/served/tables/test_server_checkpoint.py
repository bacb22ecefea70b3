# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of jobs with parameter servers: another job resumes from them exactly."""

import shutil
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from tests.served import ASYNC, SYNC, Built, Job, Member, batches, geo, loss_of
from tests.workers import run_workers
from torch import Tensor, nn

import fleetlight as fleet
from fleetlight import checkpoint
from fleetlight.checkpoint import FileTarget
from fleetlight.checkpoint.storage.manifest import BaseEntry, OptimizerEntry
from fleetlight.errors import (
    CheckpointError,
    ConfigError,
    CorruptCheckpointError,
    LostCheckpointError,
    PeerLostError,
    PlanError,
)
from fleetlight.fleet.checkpoints import loading, persistables
from fleetlight.fleet.checkpoints.save_options import SaveOptions, check_via
from fleetlight.fleet.plan.bound_plan import build_plan
from fleetlight.fleet.served.tables import server_checkpoint
from fleetlight.fleet.served.tables.loading import open_loaded
from fleetlight.fleet.served.tables.table_files import TableFiles
from fleetlight.ps import messages as m
from fleetlight.ps.layers.embedding import SparseEmbedding
from fleetlight.ps.layers.entries import CountFilterEntry
from fleetlight.ps.server.durability.durability import Durable
from fleetlight.ps.server.server import Server
from fleetlight.ps.tables.server_state import ServerState
from fleetlight.ps.tables.table import Table
from fleetlight.strategy import DistributedStrategy

IDS, TARGETS = batches(8, 2)
ALL = list(range(30))


class Mixed(nn.Module):
    """A table of open ids, a moved torch layer, and dense layers with a buffer."""

    def __init__(self, dim: int = 4, optimizer: str | None = None, rows: int = 30) -> None:
        super().__init__()
        self.open = SparseEmbedding(dim, entry=CountFilterEntry(2), optimizer=optimizer)
        self.moved = nn.Embedding(rows, 2, sparse=True)
        self.norm = nn.BatchNorm1d(3 * (dim + 2))
        self.linear = nn.Linear(3 * (dim + 2), 1)

    def forward(self, ids: Tensor) -> Tensor:
        both = torch.cat([self.open(ids), self.moved(ids)], -1).flatten(1)
        out: Tensor = self.linear(self.norm(both))
        return out


def adam(**facts: Any) -> Built:
    model = Mixed(**facts)
    return model, [torch.optim.Adam(model.parameters(), lr=0.05)]


def sgd() -> Built:
    model = Mixed()
    return model, [torch.optim.SGD(model.parameters(), lr=0.05)]


def train(member: Member, steps: range) -> None:
    for step in steps:
        member.optimizer.zero_grad()
        ids, targets = IDS[step, member.index], TARGETS[step, member.index]
        loss_of(member.model, ids, targets).backward()
        member.optimizer.step()


def state(member: Member) -> list[Any]:
    """Everything that a step changes, on the servers and in the worker."""
    member.barrier()
    for plan in member.context.models:
        plan.broadcast_buffers()
    tables = [member.rows(ALL, number) for number in range(2)]
    values = member.model.state_dict().values()
    return tables + [value.numpy().copy() for value in values if value.numel()]


def equal(one: list[Any], other: list[Any], atol: float = 1e-6) -> None:
    for mine, theirs in zip(one, other, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=atol)


def save(member: Member, path: Path, **how: Any) -> None:
    persistables._save(member.context, path, {"note": 1}, SaveOptions(**how))


def load(member: Member, path: Path, **how: Any) -> None:
    assert loading.load_job(member.context, path, **how) == {"note": 1}


def saved_job(path: Path, strategy: dict[str, Any] = SYNC, build: Any = adam, **how: Any) -> Any:
    """Two workers and two servers save after four steps and make four more steps."""

    def work(member: Member) -> Any:
        train(member, range(4))
        save(member, path, **how)
        train(member, range(4, 8))
        # as stop_worker does
        member.context.background_save.finish()
        return state(member)

    return Job(build, strategy, workers=2, servers=2).run(work)


@pytest.mark.parametrize("servers", [1, 3])
def test_any_number_of_servers_resumes_from_a_checkpoint(tmp_path: Path, servers: int) -> None:
    expected = saved_job(tmp_path)

    def work(member: Member) -> Any:
        # the load replaces earlier training and its bias correction
        train(member, range(3))
        load(member, tmp_path)
        assert (member.context.step, member.session.client.epoch) == (4, 1)
        train(member, range(4, 8))
        return state(member)

    for one, other in zip(Job(adam, SYNC, workers=2, servers=servers).run(work), expected,
                          strict=True):  # fmt: skip
        equal(one, other)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [torch.optim.AdamW, fleet.optim.Ftrl, fleet.optim.RowwiseAdam])
def test_the_state_of_each_rule_is_saved_while_training_continues(
    tmp_path: Path, kind: Any
) -> None:
    def build() -> Built:
        model = Mixed()
        return model, [kind(model.parameters(), lr=0.05)]

    expected = saved_job(tmp_path, build=build, background=True)

    def work(member: Member) -> Any:
        load(member, tmp_path)
        train(member, range(4, 8))
        return state(member)

    for one, other in zip(Job(build, SYNC, workers=2, servers=1).run(work), expected, strict=True):
        equal(one, other)


@pytest.mark.parametrize("how", [{"background": True}, {"via": "worker0"}])
def test_all_ways_to_save_make_the_same_checkpoint(tmp_path: Path, how: dict[str, Any]) -> None:
    saved_job(tmp_path / "one")
    saved_job(tmp_path / "two", **how)
    one, two = (checkpoint.read(tmp_path / name) for name in ("one", "two"))
    two.verify()

    def sums(saved: checkpoint.Checkpoint) -> dict[str, str]:
        return {f.name: f.sha256 for f in saved.manifest.files if "worker" not in f.name}

    assert sums(one) == sums(two)
    assert one.manifest.tables == two.manifest.tables
    assert len(one.manifest.high_water) == 4
    assert not [path for path in Path(one.location).iterdir() if "token" in path.name]


def test_dense_part_equals_a_collective_checkpoint(tmp_path: Path) -> None:
    """Names, classes and state are as in torch; tables have no state there."""
    saved_job(tmp_path)
    [optimizer] = checkpoint.read(tmp_path).optimizers()
    model, [live] = adam()
    names = {p: name for name, p in model.named_parameters()}
    weights = {model.open.weight, model.moved.weight}
    checkpoint.load_optimizer_state(live, names, optimizer_for(optimizer, names))
    steps = {names[p]: values["step"].item() for p, values in live.state.items()}
    assert steps == {name: 4 for p, name in names.items() if p not in weights}


def optimizer_for(saved: Any, names: Any) -> Any:
    """The record with the shapes of a model whose layer was not moved."""
    shapes = {name: tuple(p.shape) for p, name in names.items()}
    entry = OptimizerEntry(
        saved.entry.class_name, shapes, saved.entry.param_groups, saved.entry.state
    )
    return checkpoint.OptimizerState(entry, saved.tensors)


@pytest.mark.parametrize("strategy", [ASYNC, geo(3)])
def test_async_and_geo_resume_from_a_checkpoint(tmp_path: Path, strategy: dict[str, Any]) -> None:
    """Geo exchanges before it saves, so the checkpoint has the steps of all workers."""

    def before(member: Member) -> Any:
        train(member, range(4))
        save(member, tmp_path)
        return state(member)

    def after(member: Member) -> Any:
        train(member, range(2))
        load(member, tmp_path, via="worker0")
        loaded = state(member)
        # no worker continues before the other has read
        member.context.group.barrier("reading")
        train(member, range(4, 8))
        member.barrier()
        return loaded

    zero, one = Job(sgd, strategy, workers=2, servers=2).run(before)
    for loaded in Job(sgd, strategy, workers=2, servers=1).run(after):
        equal(loaded[:2], zero[:2], atol=0)
        equal([loaded[5], loaded[6]], [zero[5], zero[6]], atol=0)
    equal(zero[:2], one[:2], atol=0)


def test_background_save_has_the_values_at_the_call(tmp_path: Path, monkeypatch: Any) -> None:
    go = threading.Event()
    write = ServerState.save

    def held_back(self: ServerState, *args: Any) -> Any:
        assert go.wait(30), "training did not continue"
        return write(self, *args)

    monkeypatch.setattr(ServerState, "save", held_back)

    def work(member: Member) -> Any:
        train(member, range(4))
        at_the_call = state(member)
        save(member, tmp_path, background=True)
        train(member, range(4, 8))
        member.barrier()
        go.set()
        load(member, tmp_path)
        return at_the_call, state(member)

    for at_the_call, loaded in Job(adam, SYNC, workers=2, servers=2).run(work):
        equal(at_the_call, loaded, atol=0)


def test_failed_save_keeps_the_previous_checkpoint_and_no_snapshot(
    tmp_path: Path, monkeypatch: Any
) -> None:
    write = ServerState.save

    def full(self: ServerState, *args: Any) -> Any:
        if self._server == 1:
            raise CheckpointError("the disk of server 1 is full")
        return write(self, *args)

    def work(member: Member) -> Any:
        train(member, range(2))
        save(member, tmp_path)
        member.barrier()
        monkeypatch.setattr(ServerState, "save", full)
        train(member, range(2, 4))
        with pytest.raises(CheckpointError, match="the disk of server 1 is full"):
            save(member, tmp_path)
        train(member, range(4, 6))
        return state(member)

    job = Job(adam, SYNC, workers=2, servers=2)
    job.run(work)
    saved = checkpoint.read(tmp_path)
    saved.verify()
    assert saved.manifest.step == 2
    assert [t._cut for s in job.servers for t in s._service.state.tables] == [None] * 4
    assert [path.name for path in tmp_path.glob("generation-*")] == ["generation-000001"]


def loaded_by(path: Path, build: Any, strategy: dict[str, Any] = SYNC, **how: Any) -> Any:
    """A job of one worker that loads; returns the message and the loaded state."""

    def work(member: Member) -> Any:
        try:
            load(member, path, **how)
        except CheckpointError as error:
            return f"{type(error).__name__}: {error}", state(member)
        return "loaded", state(member)

    return Job(build, strategy, workers=1, servers=2).run(work)[0]


def with_name(name: str) -> Built:
    model, [optimizer] = adam()
    assert isinstance(model, Mixed)
    model.open.table = name
    return model, [optimizer]


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: adam(dim=5), "'open' has rows of 5 weights here, but of 4 in the checkpoint"),
        (lambda: adam(rows=31), "'moved' has the ids 0 to 30 here, but the ids 0 to 29 in"),
        (lambda: with_name("ids"), r"'ids' \(dim 4\) is not in the checkpoint, which has 'open',"),
    ],
)
def test_tables_that_differ_are_named(tmp_path: Path, build: Any, message: str) -> None:
    saved_job(tmp_path)
    before = Job(build, SYNC, workers=1, servers=2).run(state)[0]
    text, after = loaded_by(tmp_path, build)
    assert "does not match the tables: table " + message.split(" ")[0] in text
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(text)
    equal(before, after, atol=0)


def test_another_rule_loads_the_weights_only(tmp_path: Path, caplog: Any) -> None:
    saved_job(tmp_path, build=lambda: adam(optimizer="adagrad"))
    with caplog.at_level("WARNING", "fleetlight"):
        text, after = loaded_by(tmp_path, lambda: adam(optimizer="rowwise_adagrad"))
    same, kept = loaded_by(tmp_path, lambda: adam(optimizer="adagrad"))
    assert text == same == "loaded"
    equal(after, kept, atol=0)
    warnings = [r.getMessage() for r in caplog.records if "is reset" in r.getMessage()]
    assert ["table open: it was saved with adagrad" in text for text in warnings] == [True]


@pytest.mark.slow
@pytest.mark.parametrize("how", [{"via": "worker0"}, {}])
@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (lambda data: data[:-1] + bytes([data[-1] ^ 1]), "was changed after it was written"),
        (lambda data: data[:-8], "is not the file of a table: it was truncated"),
        (lambda data: data[:3], "is not the file of a table: it has 3 bytes, less than its header"),
        (lambda data: b"", "is not the file of a table: "),
    ],
)
def test_damaged_table_file_is_named_and_nothing_is_loaded(
    tmp_path: Path, damage: Callable[[bytes], bytes], why: str, how: dict[str, Any]
) -> None:
    saved_job(tmp_path)
    path = Path(checkpoint.read(tmp_path).location) / "table000.server001.safetensors"
    path.write_bytes(damage(path.read_bytes()))
    before = Job(adam, SYNC, workers=1, servers=2).run(state)[0]
    text, after = loaded_by(tmp_path, adam, **how)
    assert text.startswith(CorruptCheckpointError.__name__)
    assert "table 'open': " in text
    assert f"table000.server001.safetensors {why}" in text
    equal(before, after, atol=0)


def test_file_that_servers_cannot_read_names_the_remedy(tmp_path: Path) -> None:
    saved_job(tmp_path)
    (Path(checkpoint.read(tmp_path).location) / "table000.server001.safetensors").unlink()
    assert 'use a shared file system or via="worker0"' in loaded_by(tmp_path, adam)[0]


def test_unknown_via_is_refused() -> None:
    with pytest.raises(ConfigError, match="got via='worker1', expected via=\"folder\""):
        check_via("worker1")


def test_servers_start_from_a_checkpoint(tmp_path: Path) -> None:
    """Workers' first values do not count; a load by the workers begins another epoch."""
    expected = saved_job(tmp_path)
    job = Job(adam, SYNC, workers=2, servers=3)
    job.servers = [Server(i, 3, 2, version="test", deadline_s=20.0) for i in range(3)]
    for server in job.servers:
        model, optimizers = job.built()
        bound = build_plan(model, optimizers, DistributedStrategy(), worker_num=2, server_num=3)
        open_loaded(server, bound, tmp_path)

    def work(member: Member) -> Any:
        first, epoch = state(member), member.session.client.epoch
        load(member, tmp_path)
        assert (epoch, member.session.client.epoch) == (1, 2)
        equal(first[:2], state(member)[:2], atol=0)
        train(member, range(4, 8))
        save(member, tmp_path / "later")
        return state(member)

    for one, other in zip(job.run(work), expected, strict=True):
        equal(one, other)
    assert checkpoint.read(tmp_path / "later").manifest.epoch == 2


def test_restarted_server_does_not_load_the_checkpoint(tmp_path: Path) -> None:
    saved_job(tmp_path / "saved")
    durable = Durable(tmp_path / "kept", job="a job")
    model, optimizers = adam()
    bound = build_plan(model, optimizers, DistributedStrategy(), worker_num=2, server_num=1)
    rows = []
    for _ in range(2):
        server = Server(0, 1, 2, version="test", deadline_s=20.0)
        open_loaded(server, bound, tmp_path / "saved", durable)
        rows.append(server.metrics().rows)
        server.close()
        shutil.rmtree(tmp_path / "saved", ignore_errors=True)
    assert rows[0] == rows[1]
    assert any(rows[0].values())


def test_servers_refuse_a_checkpoint_when_workers_keep_dense_values(tmp_path: Path) -> None:
    """The tables of the checkpoint would meet new dense values."""
    saved_job(tmp_path)
    strategy = DistributedStrategy(a_sync_configs={"dense": "allreduce"})
    model, optimizers = adam()
    bound = build_plan(model, optimizers, strategy, worker_num=2, server_num=1)
    server = Server(0, 1, 2, version="test", deadline_s=20.0)
    with pytest.raises(ConfigError, match=r"'allreduce' .* fleet\.load_persistables\(dirname\)"):
        open_loaded(server, bound, tmp_path)
    assert not server.is_open


def test_torch_layer_becomes_a_table_and_a_layer_again(tmp_path: Path) -> None:
    """A checkpoint of plain torch loads into a job with moved layers, and back."""
    torch.manual_seed(7)
    plain = nn.Sequential(nn.Embedding(30, 2, sparse=True), nn.Flatten(), nn.Linear(6, 1))
    sgd_ = torch.optim.SGD(plain.parameters(), lr=0.05)
    names = {p: name for name, p in plain.named_parameters()}
    write = checkpoint.JobSnapshot(
        model=checkpoint.model_state(plain),
        optimizers=[checkpoint.optimizer_state(sgd_, names)],
        step=3,
        extra={"note": 1},
    )
    checkpoint.write(tmp_path / "plain", write)

    def build() -> Built:
        model = nn.Sequential(nn.Embedding(30, 2, sparse=True), nn.Flatten(), nn.Linear(6, 1))
        return model, [torch.optim.SGD(model.parameters(), lr=0.05)]

    def work(member: Member) -> Any:
        load(member, tmp_path / "plain")
        train(member, range(4))
        save(member, tmp_path / "served")
        member.barrier()
        return member.rows(ALL), member.optimizers[0].param_groups[0]["lr"]

    (rows, _), _ = Job(build, SYNC, workers=2, servers=2).run(work)
    for step in range(4):
        sgd_.zero_grad()
        for worker in range(2):
            (loss_of(plain, IDS[step, worker], TARGETS[step, worker]) / 2).backward()
        sgd_.step()
    np.testing.assert_allclose(rows, plain[0].weight.detach().numpy(), rtol=1e-5, atol=1e-6)
    weights = checkpoint.read(tmp_path / "served").moved_weights()
    np.testing.assert_array_equal(weights["0.weight"].numpy(), rows)


def test_evaluation_leaves_no_rows() -> None:
    def work(member: Member) -> Any:
        train(member, range(1))
        before = [metrics.rows for metrics in member.session.client.metrics()]
        member.model.eval()
        with torch.no_grad():
            rows: Tensor = member.model.open(torch.arange(10**12, 10**12 + 50))
        after = [metrics.rows for metrics in member.session.client.metrics()]
        return before == after, bool((rows != 0).any())

    assert Job(adam, SYNC, workers=1, servers=2).run(work) == [(True, True)]


def test_servers_that_started_from_different_checkpoints_are_refused(tmp_path: Path) -> None:
    saved_job(tmp_path)
    job = Job(adam, SYNC, workers=1, servers=2)
    job.servers[1] = Server(1, 2, 1, version="test", deadline_s=20.0)
    model, optimizers = job.built()
    bound = build_plan(model, optimizers, DistributedStrategy(), worker_num=1, server_num=2)
    open_loaded(job.servers[1], bound, tmp_path)
    with pytest.raises(PlanError, match=r"server 0 is in epoch 0, server 1 in epoch 1: .*init_se"):
        job.run(state)


def test_worker_asks_again_while_a_server_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    join, asked = Server._join, [0]

    def busy(self: Server, *args: Any) -> Any:
        asked[0] += 1
        return (m.Done(), []) if asked[0] < 4 else join(self, *args)

    monkeypatch.setattr(Server, "_join", busy)
    job = Job(adam, SYNC, workers=1, servers=2)
    job.run(state)
    assert asked == [5]


@pytest.mark.multiprocess
def test_table_of_a_torch_layer_resumes_in_a_collective_job(tmp_path: Path) -> None:
    """A moved layer becomes a layer again; a table of open ids is left out."""

    def work(member: Member) -> Any:
        train(member, range(4))
        save(member, tmp_path)
        return state(member)

    tables = Job(sgd, SYNC, workers=2, servers=2).run(work)[0][:2]
    warnings = []
    for weight, rate, warned in run_workers(collective, 2, str(tmp_path)):
        np.testing.assert_array_equal(weight, tables[1])
        assert rate == 0.05
        warnings.append(warned)
    assert warnings == [["open"], []]


def collective(dirname: str) -> Any:
    torch.manual_seed(5)
    model = fleet.distributed_model(Mixed())
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.9))
    warned: list[Any] = []
    persistables.logger.warning = lambda _, *args: warned.extend(args)  # type: ignore[method-assign]
    fleet.load_persistables(dirname)
    return model.moved.weight.detach().numpy(), optimizer.param_groups[0]["lr"], warned


# Jobs that save bases and deltas: another job resumes from a delta as from all rows.


def step(member: Member, ids: Sequence[int]) -> None:
    """Train on some ids; all workers have the same."""
    batch = torch.tensor(ids).repeat(6)[:6].view(2, 3)
    member.descend(loss_of(member.model, batch, batch.sum(1).float()))


def begin(member: Member) -> None:
    for _ in range(2):
        for start in range(0, 24, 6):
            step(member, ALL[start : start + 6])


def kind_of(path: Any) -> str:
    return "delta" if isinstance(checkpoint.read(path).manifest.base, BaseEntry) else "base"


def saved_deltas(path: Any, strategy: dict[str, Any] = SYNC, workers: int = 2, **how: Any) -> Any:
    """A base and two deltas; returns the state at the last save, and after some more steps."""

    def work(member: Member) -> Any:
        begin(member)
        save(member, path, base_every=3, **how)
        for ids in ([1, 2], [3, 29]):
            step(member, ids)
            save(member, path, base_every=3, **how)
        # one worker trains on in async mode, too, so that results are equal
        after = state(member)
        step(member, [5, 6])
        member.context.background_save.finish()
        return after, state(member)

    return Job(adam, strategy, workers=workers, servers=2).run(work)


def resumed(path: Any, strategy: dict[str, Any], servers: int, workers: int = 2, **how: Any) -> Any:
    def work(member: Member) -> Any:
        load(member, path, **how)
        after = state(member)
        step(member, [5, 6])
        return after, state(member)

    return Job(adam, strategy, workers=workers, servers=servers).run(work)


@pytest.mark.parametrize("servers", [1, 2, 3])
def test_any_number_of_servers_resumes_from_a_delta(tmp_path: Path, servers: int) -> None:
    expected = saved_deltas(tmp_path)
    assert kind_of(tmp_path) == "delta"
    for one, other in zip(resumed(tmp_path, SYNC, servers), expected, strict=True):
        equal(one[0], other[0], atol=0.0)
        equal(one[1], other[1])


@pytest.mark.parametrize(
    ("into", "out", "background"),
    [("folder", "folder", False), ("folder", "worker0", False), ("worker0", "folder", True)],
)
def test_deltas_in_a_bucket(bucket: str, into: str, out: str, background: bool) -> None:
    expected = saved_deltas(bucket, via=into, background=background)
    assert kind_of(bucket) == "delta"
    for one, other in zip(resumed(bucket, SYNC, 3, via=out), expected, strict=True):
        equal(one[0], other[0], atol=0.0)


def test_a_delta_whose_base_is_gone_is_refused(tmp_path: Path) -> None:
    saved_deltas(tmp_path)
    base = checkpoint.read(tmp_path).manifest.base
    assert isinstance(base, BaseEntry)
    shutil.rmtree(tmp_path / base.folder)
    with pytest.raises(CheckpointError, match=rf"server \d does not see .*{base.folder}/table"):
        resumed(tmp_path, SYNC, 2, workers=1)


@pytest.mark.parametrize("strategy", [ASYNC, geo(1)])
def test_deltas_without_lockstep(tmp_path: Path, strategy: dict[str, Any]) -> None:
    expected = saved_deltas(tmp_path, strategy, workers=1, via="worker0")
    assert kind_of(tmp_path) == "delta"
    [found] = resumed(tmp_path, strategy, 3, workers=1, via="worker0")
    equal(found[0], expected[0][0], atol=0.0)


def test_servers_start_from_a_delta_and_it_is_exported(tmp_path: Path) -> None:
    expected = saved_deltas(tmp_path / "run")
    job = Job(adam, SYNC, workers=2, servers=3)
    job.servers = [Server(i, 3, 2, version="test", deadline_s=20.0) for i in range(3)]
    for server in job.servers:
        model, optimizers = job.built()
        bound = build_plan(model, optimizers, DistributedStrategy(), worker_num=2, server_num=3)
        open_loaded(server, bound, str(tmp_path / "run"))

    def work(member: Member) -> Any:
        load(member, tmp_path / "run")
        return state(member)

    for one, other in zip(job.run(work), expected, strict=True):
        equal(one, other[0], atol=0.0)
    out = checkpoint.export(tmp_path / "run", tmp_path / "out.safetensors")
    found = safetensors.torch.load_file(out)
    assert found["open.ids"].tolist() == [*range(24), 29]
    torch.testing.assert_close(
        found["open.weight"].numpy(), expected[0][0][0][found["open.ids"]], atol=0, rtol=0
    )
    moved = checkpoint.read(tmp_path / "run").moved_weights()["moved.weight"]
    torch.testing.assert_close(moved.numpy(), expected[0][0][1], atol=0, rtol=0)


def test_a_large_delta_becomes_a_base(tmp_path: Path) -> None:
    def work(member: Member) -> None:
        begin(member)
        for changed, kind in ((0, "base"), (6, "delta"), (30, "base"), (3, "delta")):
            for start in range(0, changed, 6):
                step(member, ALL[start : start + min(6, changed)])
            save(member, tmp_path, base_every=10)
            assert kind_of(tmp_path) == kind

    Job(adam, SYNC, workers=1, servers=2).run(work)


def test_saves_without_deltas_mark_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a save of all rows each time, nor one into another folder, costs or changes it."""
    marked: list[int] = []
    honest = Table._keep
    monkeypatch.setattr(
        Table, "_keep", lambda table, *of: (marked.append(table._unsaved), honest(table, *of))[1]
    )

    def work(member: Member) -> None:
        begin(member)
        save(member, tmp_path / "all")
        step(member, [1])
        assert not any(marked)
        save(member, tmp_path / "some", base_every=9)
        save(member, tmp_path / "all")
        step(member, [2])
        save(member, tmp_path / "some", base_every=9)
        assert kind_of(tmp_path / "some") == "delta"

    Job(adam, SYNC, workers=1, servers=1).run(work)


def test_a_load_makes_the_next_save_a_base(tmp_path: Path) -> None:
    def work(member: Member) -> None:
        begin(member)
        save(member, tmp_path, base_every=9)
        load(member, tmp_path)
        step(member, [1])
        save(member, tmp_path, base_every=9)
        assert kind_of(tmp_path) == "base"
        step(member, [1])
        save(member, tmp_path, base_every=9)
        assert kind_of(tmp_path) == "delta"

    Job(adam, SYNC, workers=1, servers=2).run(work)


def test_a_server_that_lost_its_cut_ends_the_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would write all rows, as the files of a delta."""
    honest = server_checkpoint.TableFiles.save

    def forget(files: Any, *of: Any) -> Any:
        for server in job.servers:
            server._service.checkpoints.drop()
        return honest(files, *of)

    def work(member: Member) -> None:
        begin(member)
        save(member, tmp_path, base_every=9)
        step(member, [1])
        monkeypatch.setattr(server_checkpoint.TableFiles, "save", forget)
        with pytest.raises(CheckpointError, match="was restarted after it had cut its tables"):
            save(member, tmp_path, base_every=9)
        monkeypatch.undo()
        assert kind_of(tmp_path) == "base"
        save(member, tmp_path, base_every=9)
        assert kind_of(tmp_path) == "delta"

    job = Job(adam, SYNC, workers=1, servers=2)
    job.run(work)


# A server dies during a save: after its restart the checkpoint is complete.


class DyingSave:
    """Replaces `TableFiles.save`: a server dies during the first call."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
        self.error: Exception | None = error
        self.calls = 0
        save = TableFiles.save

        def saved(files: TableFiles, target: FileTarget, *how: Any) -> Any:
            self.calls += 1
            error, self.error = self.error, None
            if error is not None:
                Path(target.location, "half-a-table").touch()
                if isinstance(error, CheckpointError):
                    # the restarted server does not know its earlier files
                    monkeypatch.setattr(files._client, "incarnations", lambda *lanes: [1, 2])
                raise error
            return save(files, target, *how)

        monkeypatch.setattr(TableFiles, "save", saved)


DURABLE = {**SYNC, "durability": "log"}
LOST = [PeerLostError("lost server 1"), CheckpointError("server 1 could not transfer table-0")]


@pytest.mark.parametrize("error", LOST)
def test_save_restarts_after_a_server_dies(
    tmp_path: Path, monkeypatch: Any, error: Exception, caplog: Any
) -> None:
    lost = DyingSave(monkeypatch, error)

    def work(member: Member) -> Any:
        train(member, range(4))
        at_the_call = state(member)
        save(member, tmp_path)
        train(member, range(4, 6))
        member.barrier()
        load(member, tmp_path)
        return at_the_call, state(member)

    job = Job(adam, DURABLE, workers=2, servers=2)
    for at_the_call, loaded in job.run(work):
        equal(at_the_call, loaded, atol=0)
    assert lost.calls == 2
    assert f"restarting the save into {tmp_path}: " in caplog.text
    assert str(error) in caplog.text
    checkpoint.read(tmp_path).verify()
    assert len(list(tmp_path.glob("generation-*"))) == 1
    assert not list(tmp_path.rglob("half-a-table"))
    assert [t._cut for s in job.servers for t in s._service.state.tables] == [None] * 4


@pytest.mark.parametrize("error", LOST)
def test_save_fails_when_no_server_restarts(
    tmp_path: Path, monkeypatch: Any, error: Exception
) -> None:
    DyingSave(monkeypatch, error)

    def work(member: Member) -> None:
        train(member, range(1))
        with pytest.raises(PeerLostError, match=str(error)):
            save(member, tmp_path)

    Job(adam, SYNC, workers=1, servers=2).run(work)


def test_next_save_replaces_one_lost_in_the_background(tmp_path: Path, monkeypatch: Any) -> None:
    lost = DyingSave(monkeypatch, LOST[0])

    def work(member: Member) -> None:
        train(member, range(2))
        save(member, tmp_path, background=True)
        train(member, range(2, 4))
        save(member, tmp_path, background=True)
        member.context.background_save.finish()
        assert checkpoint.read(tmp_path).manifest.step == 4
        # the last save has no successor
        lost.error = LOST[0]
        save(member, tmp_path, background=True)
        with pytest.raises(LostCheckpointError, match="failed in the background: lost server 1"):
            member.context.background_save.finish()

    Job(adam, DURABLE, workers=1, servers=2).run(work)
