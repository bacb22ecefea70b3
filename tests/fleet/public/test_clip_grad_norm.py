# SPDX-License-Identifier: Apache-2.0
"""`torch.nn.utils.clip_grad_norm_` in a job with parameter servers."""

import functools
import logging
from typing import Any

import pytest
import torch
from tests.workers import run_job
from torch import nn

import fleetlight as fleet


class Scored(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = fleet.nn.SparseEmbedding(2)
        self.last = nn.Linear(2, 1)

    def forward(self, ids: torch.Tensor) -> Any:
        return self.last(self.rows(ids)).sum()


def prepared(a_sync: bool) -> tuple[nn.Module, Any]:
    model = Scored()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model = fleet.distributed_model(model)  # type: ignore[assignment]
    strategy = fleet.DistributedStrategy(a_sync=a_sync)
    return model, fleet.distributed_optimizer(optimizer, strategy)


def served(a_sync: bool) -> None:
    prepared(a_sync)
    fleet.init_server()
    fleet.run_server()


def clips(a_sync: bool, max_norm: float, own: bool) -> list[str]:
    model, optimizer = prepared(a_sync)
    fleet.init_worker()
    warnings: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("fleetlight").addHandler(handler)
    for _ in range(2):
        model(torch.arange(4) + fleet.worker_index()).backward()
        if own:
            fleet.clip_grad_norm_(model, max_norm)
        else:
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        optimizer.zero_grad()
    fleet.stop_worker()
    return [text for text in warnings if "clip" in text]


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("a_sync", "max_norm", "own", "workers", "warns"),
    [
        (False, 0.01, False, 2, True),
        # no clipping; one global norm; this worker's own norm; one process
        (False, 1e9, False, 2, False),
        (False, 0.01, True, 2, False),
        (True, 0.01, False, 2, False),
        (False, 0.01, False, 1, False),
    ],
)
def test_clipping_by_the_norm_of_one_worker_warns_in_sync_mode(
    a_sync: bool, max_norm: float, own: bool, workers: int, warns: bool
) -> None:
    answers = run_job(
        functools.partial(served, a_sync),
        functools.partial(clips, a_sync, max_norm, own),
        servers=1,
        workers=workers,
    )
    assert [kind for kind, _ in answers] == ["value"] * (1 + workers), answers
    for _, warnings in answers[1:]:
        assert len(warnings) == warns
        assert all("call fleet.clip_grad_norm_(model, max_norm)" in text for text in warnings)
