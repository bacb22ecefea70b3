# SPDX-License-Identifier: Apache-2.0
"""The ids that a loader announces for prefetch: those of a function or learned ones."""

import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tests.data.observing import Observing
from tests.served import SYNC, Member, Net, geo, run
from torch import Tensor, nn
from torch.utils.data import DataLoader

from fleetlight.data.loader import ShardLoader
from fleetlight.data.observer import NoObserver
from fleetlight.errors import ConfigError, PlanError
from fleetlight.fleet.public import sharding
from fleetlight.fleet.public.sharding import JobObserver
from fleetlight.ps.layers.embedding import SparseEmbedding

IDS = torch.arange(24).view(8, 3)


def build() -> tuple[nn.Module, list[torch.optim.Optimizer]]:
    model = Net()
    return model, [torch.optim.SGD(model.parameters(), lr=0.1)]


def pairs(worker: Member, lookahead: Any = None, ids: Tensor = IDS) -> ShardLoader:
    """Batches of two records, {"x": (ids,), "y": target}."""
    records = [{"x": (row,), "y": torch.ones(1)} for row in ids]
    return ShardLoader(
        DataLoader(records, batch_size=2),  # type: ignore[arg-type]
        worker=worker.index,
        workers=worker.context.group.size,
        seed=0,
        tail="join",
        observer=Observing(announce=worker.context.prefetch_hints(lookahead)),
    )


def prefetched_rows(
    lookahead: Any = None, of: Callable[[Any], Tensor] = lambda batch: batch["x"][0], **job: Any
) -> float:
    """Rows prefetched in an epoch of four steps, each of which reads six."""

    def train(worker: Member) -> Any:
        for batch in pairs(worker, lookahead):
            worker.optimizer.zero_grad()
            (worker.model(of(batch)) - batch["y"]).square().mean().backward()
            worker.optimizer.step()
        return worker.communicator.metrics().get("rows_read_ahead", 0.0)

    return float(sum(run(build, train, **{"workers": 1, **job})))


def test_tensors_that_reach_a_table_unchanged_are_learned() -> None:
    # learned from the first batch; the second one is loaded before that batch trains
    assert prefetched_rows() == 12
    assert prefetched_rows(workers=2) == 0  # two steps each
    assert prefetched_rows(of=lambda batch: batch["x"][0].view(2, 3)) == 12


def test_changed_tensors_are_not_learned() -> None:
    assert prefetched_rows(of=lambda batch: batch["x"][0] + 1) == 0
    assert prefetched_rows(of=lambda batch: batch["x"][0][:, [0, 1, 2]]) == 0
    assert prefetched_rows(of=lambda batch: batch["x"][0].int()) == 0


def test_function_hints_from_the_first_batch_on() -> None:
    shifted = dict(of=lambda batch: batch["x"][0] + 1)  # noqa: C408
    assert prefetched_rows(lambda batch: {"emb": batch["x"][0] + 1}, **shifted) == 18
    assert prefetched_rows(lambda batch: {"emb": batch["x"][0]}, **shifted) == 15
    assert prefetched_rows(lambda batch: {}, **shifted) == 0


def test_geo_prefetches_no_batch() -> None:
    assert prefetched_rows(strategy=geo(2)) == 0

    def ahead(worker: Member) -> int:
        return worker.context.prefetch_hints(None).batches_ahead()

    assert run(build, ahead, geo(2), workers=1) == [0]
    assert run(build, ahead, SYNC, workers=1) == [1]


def test_invalid_functions_are_refused() -> None:
    with pytest.raises(PlanError, match="no table 'embb'; did you mean 'emb'"):
        prefetched_rows(lambda batch: {"embb": batch["x"][0]})
    with pytest.raises(ConfigError, match=r"lookahead of emb: got ids of type torch\.float32"):
        prefetched_rows(lambda batch: {"emb": batch["x"][0].float()})
    with pytest.raises(ConfigError, match="got lookahead=True, expected a function"):
        sharding._check_lookahead(True)  # type: ignore[arg-type]


def test_hints_with_padding_and_shared_tables() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = (SparseEmbedding(2, table="t", padding_idx=0) for _ in range(2))

        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return (self.a(a) + self.b(b)).sum((1, 2))

    def two() -> Any:
        model = Two()
        return model, [torch.optim.SGD(model.parameters(), lr=0.1)]

    def train(worker: Member) -> Any:
        loader = DataLoader([{"a": row, "b": row + 100} for row in IDS], batch_size=2)  # type: ignore[arg-type]
        sharded = ShardLoader(
            loader,
            worker=0,
            workers=1,
            seed=0,
            tail="join",
            observer=Observing(announce=worker.context.prefetch_hints(None)),
        )
        for batch in sharded:
            worker.optimizer.zero_grad()
            worker.model(batch["a"], batch["b"]).sum().backward()
            worker.optimizer.step()
        return worker.communicator.metrics()["rows_read_ahead"], worker.rows(np.arange(1, 24))

    [(ahead, rows)] = run(two, train, workers=1, servers=2)
    assert ahead == 24
    assert rows.any()


def test_batch_changed_in_place_is_pulled_again() -> None:
    def train(worker: Member) -> None:
        for batch in pairs(worker):
            batch["x"][0].add_(50)
            worker.optimizer.zero_grad()
            worker.model(batch["x"][0]).sum().backward()
            worker.optimizer.step()
        assert worker.communicator.metrics()["rows_read_ahead"] == 0
        assert [c.rows for c in worker.session.client.metrics()] == [{"emb": 24}]

    run(build, train, workers=1)


def test_loader_in_a_subprocess_announces_nothing() -> None:
    def train(worker: Member) -> Any:
        copy = pickle.loads(pickle.dumps(JobObserver(worker.context, None)))
        return type(copy), copy.batches_ahead()

    assert run(build, train, workers=1) == [(NoObserver, 0)]
