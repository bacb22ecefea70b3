# SPDX-License-Identifier: Apache-2.0
"""Jobs whose model has an `EmbeddingCollection` equal those with separate layers."""

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.served import ASYNC, SYNC, Member, batches, geo, run
from tests.workers import descend, run_job, run_processes
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import fleetlight as fleet
from fleetlight import checkpoint, static
from fleetlight.fleet.job import current
from fleetlight.fleet.public.inference import with_plain_layers
from fleetlight.fleet.training.model import as_plain_module
from fleetlight.ps.layers.collection.embedding_collection import (
    EmbeddingCollection,
    EmbeddingFeature,
)
from fleetlight.ps.layers.embedding import SparseEmbedding, SparseEmbeddingBag

pytestmark = pytest.mark.slow

STEPS = 6
IDS, TARGETS = batches(STEPS, 2, ids=30)
FEATURES: dict[str, Any] = {
    "user": (4, "people", "sum"),
    "friend": (4, "people", "mean"),
    "item": EmbeddingFeature(2, "items", "max", padding_idx=3),
    "tags": EmbeddingFeature(2, "tags", None, padding_idx=1),
}


def ragged(ids: Tensor) -> dict[str, Any]:
    """Ids of all features from three columns."""
    starts = torch.arange(0, ids.shape[0] * 3, 3)
    return {
        "user": ids[:, :1],
        "friend": (ids.reshape(-1) + 1, starts),
        "item": ids[:, 1:] * 5 - 20,
        "tags": ids,
    }


class Net(nn.Module):
    """A collection, or the same layers one by one."""

    def __init__(self, joint: bool = True) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 1)
        self.each = nn.Parameter(torch.linspace(0.5, 1.5, 1))
        self.emb: Any = EmbeddingCollection(FEATURES)
        if not joint:
            self.emb = nn.ModuleDict({
                "user": SparseEmbeddingBag(4, "sum", table="people"),
                "friend": SparseEmbeddingBag(4, "mean", table="people"),
                "item": SparseEmbeddingBag(2, "max", table="items", padding_idx=3),
                "tags": SparseEmbedding(2, table="tags", padding_idx=1),
            })  # fmt: skip

    def forward(self, ids: Tensor) -> Tensor:
        batch = ragged(ids)
        weights = {"user": self.each.expand(ids.shape[0], 1)}
        if isinstance(self.emb, EmbeddingCollection):
            found = self.emb(batch, weights)
        else:
            found = {
                "user": self.emb["user"](batch["user"], per_sample_weights=weights["user"]),
                "friend": self.emb["friend"](*batch["friend"]),
                **{name: self.emb[name](batch[name]) for name in ("item", "tags")},
            }
        found["tags"] = found["tags"].flatten(1)
        out: Tensor = self.linear(torch.cat(list(found.values()), 1))
        return out


def made(joint: bool = True, kind: Any = torch.optim.Adagrad) -> Any:
    def build() -> Any:
        model = Net(joint)
        dense, tables = model.linear.parameters(), model.emb.parameters()
        groups = [{"params": [*dense, model.each]}, {"params": list(tables), "lr": 0.2}]
        return model, [kind(groups, lr=0.1)]

    return build


def trained(worker: Member) -> Any:
    losses = []
    for step in range(STEPS):
        worker.optimizer.zero_grad()
        out = worker.model(IDS[step, worker.index])
        loss = nn.functional.mse_loss(out, TARGETS[step, worker.index])
        loss.backward()  # type: ignore[no-untyped-call]
        if step == 2:
            worker.clip(0.01)
        worker.optimizer.step()
        losses.append(loss.detach())
    return final(worker, losses)


def final(worker: Member, losses: list[Tensor]) -> Any:
    worker.barrier()
    plan = worker.session.bound.plan
    rows = {t.name: worker.rows(range(-20, 140), n) for n, t in enumerate(plan.tables)}
    return torch.stack(losses), rows, [p.detach() for p in worker.model.linear.parameters()]


@pytest.mark.parametrize(
    ("mode", "workers", "kind"),
    [
        (SYNC, 2, torch.optim.Adagrad),
        (SYNC, 1, functools.partial(torch.optim.SGD, momentum=0.9)),
        ({"a_sync": True, "a_sync_configs": {"staleness": 0}}, 1, torch.optim.Adagrad),
        (geo(2), 1, torch.optim.SGD),
    ],
)
def test_training_equals_that_of_separate_layers(mode: Any, workers: int, kind: Any) -> None:
    found, expected = (
        run(made(joint, kind), trained, mode, workers=workers, servers=2) for joint in (True, False)
    )
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert sorted(found[0][1]) == ["items", "people", "tags"]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("mode", [SYNC, ASYNC, geo(2)], ids=["sync", "async", "geo"])
def test_a_forward_sends_one_request(mode: Any) -> None:
    def train(worker: Member) -> Any:
        client, asked = worker.session.client, []
        pull = client.pull

        def watched(wanted: Any, **facts: Any) -> Any:
            asked.append([one.table for one in wanted])
            return pull(wanted, **facts)

        client.pull = watched  # type: ignore[method-assign]
        worker.model(IDS[0, 0])
        return asked

    assert run(made(), train, mode, workers=1, servers=2) == [[[0, 1, 2]]]


def test_prefetched_rows_are_used_for_all_features() -> None:
    def train(worker: Member) -> Any:
        model: Any = worker.model
        communicator = worker.communicator
        numbers = {t.name: n for n, t in enumerate(worker.session.bound.plan.tables)}
        for step in range(STEPS - 1):
            coming = model.emb.ids_by_table(ragged(IDS[step + 1, 0]))
            communicator.announce([{numbers[n]: ids.numpy() for n, ids in coming.items()}])
            model(IDS[step, 0]).sum().backward()
            worker.optimizer.step()
        return communicator.metrics()

    [metrics] = run(made(), train, SYNC, workers=1)
    first = sum(len(ids.unique()) for ids in ids_without_padding(IDS[0, 0]).values())
    # all rows but those of the first batch
    assert metrics["rows_on_demand"] == first
    assert metrics["rows_read_ahead"] > 100


def test_nested_tensors_of_a_batch_are_learned() -> None:
    """A loader announces them without a function."""

    def build() -> Any:
        model = EmbeddingCollection({"a": (2, "t"), "b": (2, "t")})
        return model, [torch.optim.SGD(model.parameters(), lr=0.1)]

    def train(worker: Member) -> Any:
        lookahead = worker.context.prefetch_hints(None)
        assert lookahead is not None
        nested = [
            torch.nested.nested_tensor_from_jagged(one.reshape(-1), ENDS) for one in IDS[:3, 0]
        ]
        all_batches: list[Any] = [{"a": one, "b": IDS[0, 1]} for one in nested]
        for step, batch in enumerate(all_batches):
            lookahead.announce(all_batches[step : step + 2])
            sum(one.sum() for one in worker.model(batch).values()).backward()
            worker.optimizer.step()
            worker.optimizer.zero_grad()
        return worker.communicator.metrics()["rows_on_demand"]

    first, second = (torch.cat([one.reshape(-1), IDS[0, 1].reshape(-1)]) for one in IDS[:2, 0])
    # learned from the first batch, after the second was announced
    on_demand = sum(len(set(one.tolist())) for one in (first, second))
    assert run(build, train, SYNC, workers=1) == [on_demand]


ENDS = torch.arange(0, 25, 3)


def ids_without_padding(ids: Tensor) -> dict[str, Tensor]:
    """The ids of each table without padding."""
    batch = ragged(ids)
    people = torch.cat([batch["user"].reshape(-1), batch["friend"][0]])
    found = {"people": people, "items": batch["item"].reshape(-1), "tags": ids.reshape(-1)}
    return {name: its[its != {"items": 3, "tags": 1}.get(name, -1)] for name, its in found.items()}


def by_program(worker: Member) -> Any:
    inputs = {"ids": IDS[0, 0], "target": TARGETS[0, 0]}
    program = static.capture(worker.model, nn.functional.mse_loss, worker.optimizer, inputs)
    exe, losses = static.Executor(), []
    for step in range(STEPS):
        losses += exe.run(program, {"ids": IDS[step, 0], "target": TARGETS[step, 0]}, ["loss"])
    return final(worker, losses)


def eagerly(worker: Member) -> Any:
    losses = []
    for step in range(STEPS):
        worker.optimizer.zero_grad()
        loss = nn.functional.mse_loss(worker.model(IDS[step, 0]), TARGETS[step, 0])
        loss.backward()  # type: ignore[no-untyped-call]
        worker.optimizer.step()
        losses.append(loss.detach())
    return final(worker, losses)


def test_a_program_equals_eager_training() -> None:
    found, expected = (run(made(), one, SYNC, workers=1) for one in (by_program, eagerly))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_an_exported_model_computes_the_same_without_servers(tmp_path: Path) -> None:
    questions = torch.cat([IDS[1, 1], IDS[2, 0] + 10**12])

    def train(worker: Member) -> Any:
        trained(worker)
        layers = with_plain_layers(worker.context, worker.model, "all")
        with layers as plain, as_plain_module(plain):
            checkpoint.save_inference(tmp_path, plain, (IDS[0, 0],))
        with torch.no_grad():
            return worker.model(questions)

    [expected] = run(made(), train, SYNC, workers=1)
    model = checkpoint.load_inference(tmp_path)
    torch.testing.assert_close(model(questions), expected)


# -- scripts, in real processes


def records() -> TensorDataset:
    random = np.random.default_rng(0)
    ids = torch.from_numpy(random.zipf(1.3, (96, 3)) % 30)
    return TensorDataset(ids, torch.from_numpy(random.standard_normal((96, 1), np.float32)))


def registered() -> Any:
    torch.manual_seed(0)
    model = fleet.distributed_model(Net())
    return model, fleet.distributed_optimizer(torch.optim.Adagrad(model.parameters(), lr=0.1))


def serve() -> None:
    registered()
    fleet.init_server()
    fleet.run_server()


def values(model: Any) -> dict[str, Any]:
    return {name: value.tolist() for name, value in fleet.state_dict(model).items()}


def work(folder: str = "") -> Any:
    model, optimizer = registered()
    fleet.init_worker()
    loader = DataLoader(records(), batch_size=8 // fleet.worker_num())
    loader = fleet.shard(loader, lookahead=lambda batch: model.emb.ids_by_table(ragged(batch[0])))
    for ids, target in loader:
        descend(optimizer, ((model(ids) - target) ** 2).mean())
    fleet.barrier_worker()
    session = current().session
    assert session is not None
    metrics = session.communicator.metrics()
    assert metrics["rows_read_ahead"] > 5 * metrics["rows_on_demand"]
    trained = values(model)
    if folder:
        fleet.save_persistables(folder)
    fleet.stop_worker()
    return trained


def saved_and_loaded(folder: str) -> Any:
    fleet.init()
    trained = work(folder)
    fleet.init()
    model, _ = registered()
    fleet.init_worker()
    fleet.load_persistables(folder)
    loaded = values(model)
    fleet.stop_worker()
    return trained, loaded


@pytest.mark.multiprocess
def test_two_workers_and_a_server_equal_one_process(tmp_path: Path) -> None:
    [(alone, loaded)] = run_processes(saved_and_loaded, [(str(tmp_path),)])
    assert loaded == alone
    tables = {name for name in alone if name.endswith(".ids")}
    assert tables == {"people.ids", "items.ids", "tags.ids"}
    served, *workers = run_job(serve, work, servers=1)
    assert [kind for kind, _ in (served, *workers)] == ["value"] * 3, workers
    found = workers[0][1]
    assert found.keys() == alone.keys()
    for name, value in found.items():
        np.testing.assert_allclose(value, alone[name], rtol=1e-4, atol=1e-6, err_msg=name)
