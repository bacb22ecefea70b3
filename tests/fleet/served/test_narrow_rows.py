# SPDX-License-Identifier: Apache-2.0
"""Jobs whose rows travel narrow: as good as with float32, and tables of other layers unchanged."""

from typing import Any

import numpy as np
import pytest
import torch
from tests.served import Member, Net, batches, loss_of, run
from torch import nn

from fleetlight.ps.plan import ASYNC, GEO, SYNC

WORKERS, STEPS = 2, 60
IDS, TARGETS = batches(STEPS, WORKERS)


def strategy(mode: str, wire: str) -> dict[str, Any]:
    configs = {"k_steps": 3 if mode == GEO else 0, "table_wire": wire}
    return {"a_sync": mode != SYNC, "a_sync_configs": configs}


def build() -> Any:
    model = Net(rows=30)
    return model, [torch.optim.SGD(model.parameters(), lr=0.1)]


def train(worker: Member) -> Any:
    """The loss over all batches after training, and the rows."""
    for t in range(STEPS):
        worker.descend(loss_of(worker.model, IDS[t, worker.index], TARGETS[t, worker.index]))
        worker.barrier()
    with torch.no_grad():
        loss = float(loss_of(worker.model, IDS.flatten(0, 2), TARGETS.flatten(0, 2)))
    return loss, worker.rows(range(30))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize("mode", [SYNC, ASYNC, GEO])
def test_narrow_rows_train_as_well_as_float32(mode: str) -> None:
    """Workers wait for each other after each step, so only the form of the rows differs."""
    [(exact, rows), _] = run(build, train, strategy(mode, "fp32"), servers=2)
    for wire, within in (("bf16", 0.01), ("fp16", 0.001), ("int8", 0.03)):
        [(loss, narrow), (_, same)] = run(build, train, strategy(mode, wire), servers=2)
        assert loss == pytest.approx(exact, rel=0.005)
        assert 0 < np.abs(narrow - rows).max() < within * np.abs(rows).max()
        np.testing.assert_array_equal(narrow, same)


def test_clipped_gradients_are_the_narrow_ones() -> None:
    """In sync mode the norm is that of the gradients which arrived."""

    def clipped(worker: Member) -> Any:
        loss_of(worker.model, IDS[0, worker.index], TARGETS[0, worker.index]).backward()
        norm = worker.clip(0.01)
        before = worker.rows(range(30))
        worker.optimizer.step()
        return norm, np.abs(worker.rows(range(30)) - before).max()

    [(exact, _), _] = run(build, clipped, strategy(SYNC, "fp32"))
    [(norm, moved), (other, _)] = run(build, clipped, strategy(SYNC, "int8"))
    assert norm == other == pytest.approx(exact, rel=0.01)
    assert 0 < moved < 0.01


def test_only_the_tables_of_layers_that_ask_are_narrow() -> None:
    def two() -> Any:
        model = nn.ModuleList([Net(wire="int8"), Net()])
        return model, [torch.optim.SGD(model.parameters(), lr=0.1)]

    def trained(worker: Member) -> Any:
        wires = [table.wire for table in worker.session.bound.plan.tables]
        model: Any = worker.model
        loss = sum(loss_of(net, IDS[0, 0], TARGETS[0, 0]) for net in model)
        loss.backward()
        worker.optimizer.step()
        return wires, [worker.rows(range(30), table) for table in range(2)]

    [(wires, narrow)] = run(two, trained, workers=1)
    assert wires == ["int8", "fp32"]

    def plain() -> Any:
        model = nn.ModuleList([Net(), Net()])
        return model, [torch.optim.SGD(model.parameters(), lr=0.1)]

    [(_, exact)] = run(plain, trained, workers=1)
    assert (narrow[0] != exact[0]).any()
    np.testing.assert_array_equal(narrow[1], exact[1])
