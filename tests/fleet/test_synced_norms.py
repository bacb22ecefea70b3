# SPDX-License-Identifier: Apache-2.0
"""Static programs whose batch norms use the batches of all workers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.fleet.collective.test_programs import (
    captured,
    eager,
    example,
    network,
    prepared,
    records,
    state_of,
)
from tests.fleet.collective.test_programs import written as written_program
from tests.workers import run_workers
from torch.nn import functional as F

import fleetlight as fleet
from fleetlight import static
from fleetlight.fleet.job import current

pytestmark = pytest.mark.multiprocess

SYNC: dict[str, Any] = {"sync_batch_norm": True}
MERGE: dict[str, Any] = {"gradient_merge": True, "gradient_merge_configs": {"k_steps": 2}}
RECOMPUTE: dict[str, Any] = {"recompute": True, "recompute_configs": {"checkpoints": ["1"]}}
AMP: dict[str, Any] = {"amp": True}


def test_synced_norms_equal_those_of_one_process() -> None:
    """With a short last batch."""
    expected = run_workers(eager, 1, {}, 0, 8)[0]
    for found in (*run_workers(captured, 2, SYNC), *run_workers(written_program, 2, SYNC)):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def with_a_repeated_batch(in_program: bool) -> Any:
    """Worker 1's records count zero, as when they fill a short block."""
    model, optimizer, _ = prepared(fleet.DistributedStrategy(**SYNC))
    program = None
    if in_program:
        program = static.capture(model, F.cross_entropy, optimizer, example())
    for first in range(0, 12, 4):
        x, y = records()[first : first + 4]
        current().models[0].set_batch_weight(0.0 if fleet.worker_index() else 2.0)
        if program is None:
            optimizer.minimize(F.cross_entropy(model(x), y))  # type: ignore[attr-defined]
            optimizer.zero_grad()
        else:
            static.Executor().run(program, {"x": x, "y": y})
    return state_of(model)


def test_repeated_records_do_not_count_in_synced_norms() -> None:
    expected = run_workers(with_a_repeated_batch, 2, False)
    for one, other in zip(run_workers(with_a_repeated_batch, 2, True), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


@pytest.mark.parametrize("more", [{}, MERGE, RECOMPUTE], ids=["alone", "merge", "recompute"])
def test_synced_norms_with_other_passes(more: dict[str, Any]) -> None:
    expected = run_workers(eager, 2, {**SYNC, **more})
    found = run_workers(captured, 2, {**SYNC, **more})
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


def narrow_norms() -> bool:
    """Autocast feeds a norm bfloat16 values."""
    strategy = fleet.DistributedStrategy(**SYNC, **AMP)
    model = fleet.distributed_model(network().float())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    fleet.distributed_optimizer(optimizer, strategy)
    inputs = {"x": torch.randn(4, 6), "y": torch.zeros(4, dtype=torch.int64)}
    program = static.capture(model, F.cross_entropy, optimizer, inputs)
    for _ in range(2):
        static.Executor().run(program, inputs)
    return all(bool(value.isfinite().all()) for value in model.state_dict().values())


def test_synced_norms_of_narrow_values() -> None:
    assert run_workers(narrow_norms) == [True, True]


def used_elsewhere(folder: str) -> Any:
    """Evaluation, saving and export need no other worker: worker 0 does them alone."""
    model, optimizer, loader = prepared(fleet.DistributedStrategy(**SYNC))
    program = static.capture(model, F.cross_entropy, optimizer, example())
    executor = static.Executor()
    for x, y in loader:
        executor.run(program, {"x": x, "y": y})
    assert "1 batch norms use the batches of all workers" in program.explain()
    if fleet.worker_index():
        return None
    test = program.clone(for_test=True)
    x, y = records()[:5]
    before = state_of(model)
    [loss] = executor.run(test, {"x": x, "y": y}, ["loss"])
    program.save(folder)
    loaded = static.load_program(folder)
    assert "synced_norm" not in str(loaded)
    [again] = executor.run(loaded.clone(for_test=True), {"x": x, "y": y}, ["loss"])
    model.eval()
    expected = F.cross_entropy(model(x), y)
    assert all(torch.equal(before[name], value) for name, value in state_of(model).items())
    return loss.item(), again.item(), expected.item()


def test_other_uses_of_a_program_with_synced_norms(tmp_path: Path) -> None:
    loss, again, expected = run_workers(used_elsewhere, 2, str(tmp_path / "program"))[0]
    assert loss == pytest.approx(expected, abs=1e-12)
    assert again == pytest.approx(expected, abs=1e-12)
