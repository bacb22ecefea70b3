# SPDX-License-Identifier: Apache-2.0
"""Recommenders of other projects train as in plain PyTorch, in every way to start them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.ported import jobs
from tests.ported.others import recommenders as r

pytestmark = pytest.mark.long

HERE = Path(__file__).parent
SCRIPT = HERE / "train.py"
SERVERS = ("--server_num", 2, "--worker_num", 2)
WORKERS = ("--nproc_per_node", 2)


def plain(name: str, dtype: torch.dtype) -> tuple[dict[str, Any], int]:
    """One process of plain PyTorch on whole batches; returns its best values, too."""
    model, optimizer = r.build(name, dtype)
    batches, held_out = r.data(dtype)
    best = -1
    if name == "mmoe":
        best = r.train_and_keep_best(model, optimizer, batches, held_out)
    else:
        r.train(model, optimizer, batches, r.penalty_on_rows if name == "deepfm" else None)
    return model.state_dict(), best


def compare(found: dict[str, Any], expected: dict[str, Any], tolerance: float) -> None:
    assert sorted(found) == sorted(expected)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=tolerance, atol=tolerance)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize("name", ["dlrm", "deepfm", "mmoe"])
@pytest.mark.parametrize(
    ("mode", "options", "dtype", "tolerance"),
    [
        ("servers", SERVERS, "float32", 1e-5),
        ("collective", WORKERS, "float32", 1e-5),
        ("collective", WORKERS, "float64", 1e-12),
    ],
)
def test_jobs_equal_one_process(
    name: str, mode: str, options: Any, dtype: str, tolerance: float, tmp_path: Path
) -> None:
    out = tmp_path / "state.pt"
    command = (*jobs.FLEETRUN, *options, "--log_dir", tmp_path / "log", SCRIPT)
    printed = jobs.run(tmp_path, *command, name, mode, dtype, out)
    expected, best = plain(name, getattr(torch, dtype))
    compare(torch.load(out), expected, tolerance)
    if name == "mmoe":
        # the best values differ from the last ones, so loading them has an effect
        assert jobs.numbers(r"best epoch (\d)", printed)[0] == best < 2
    if name == "deepfm" and mode == "servers":
        assert "linear: torch.Tensor.square" in printed
        assert "fleet.rows" in printed


def test_one_process_with_its_own_server_equals_plain_torch(tmp_path: Path) -> None:
    out = tmp_path / "state.pt"
    jobs.run(tmp_path, jobs.FLEETRUN[0], SCRIPT, "dlrm", "servers", "float32", out)
    compare(torch.load(out), plain("dlrm", torch.float32)[0], 1e-5)
