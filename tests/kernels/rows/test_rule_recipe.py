# SPDX-License-Identifier: Apache-2.0
"""A table rule needs one file, and then a job trains with it."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.served import SYNC, Member, Net, geo, run

from fleetlight.errors import PlanError
from fleetlight.kernels import RULES, RowTable, rules, twin_table
from fleetlight.kernels.rows.updates import find_rules
from fleetlight.ps.tables.optimizers import own_rule, what_works
from fleetlight.ps.tables.table_file import columns_of

IDS = torch.tensor([[1, 2, 3]])

#: signSGD with momentum
TOY = """
import numpy as np

from fleetlight.kernels.compiling.kernel import part
from fleetlight.kernels.rule import Rule


@part
def _step(slab, at, dim, grads, g, h):
    for c in range(dim):
        votes = h[1] * slab[at + dim + c] + np.sign(grads[g + c])
        slab[at + dim + c] = votes
        slab[at + c] -= h[0] * np.sign(votes)


def _twin(weights, state, grads, h):
    votes = h[1] * state + np.sign(grads)
    return weights - h[0] * np.sign(votes), votes


RULE = Rule(
    "sign",
    _step,
    _twin,
    lambda options, step: (options["lr"], options.get("momentum", 0.0)),
    weight_state=("votes",),
    layer_options={"momentum": 0.5},
    optimizers={"Rprop": lambda group: {"momentum": 0.0}},
)
"""


@pytest.fixture(autouse=True)
def _toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sign.py").write_text(TOY)
    monkeypatch.setattr(rules, "__path__", [*rules.__path__, str(tmp_path)])
    monkeypatch.setitem(RULES, "sign", find_rules()["sign"])
    monkeypatch.delitem(sys.modules, f"{rules.__name__}.sign")


@pytest.mark.slow
@pytest.mark.parametrize("mode", [SYNC, geo(3)], ids=["sync", "geo"])
@pytest.mark.parametrize("layer", [{"optimizer": "sign"}, {}], ids=["layer", "optimizer"])
def test_a_job_trains_with_a_toy_rule(layer: dict[str, Any], mode: dict[str, Any]) -> None:
    def build() -> Any:
        model = Net(**layer)
        kind = torch.optim.SGD if layer else torch.optim.Rprop
        optimizers = [
            kind(model.emb.parameters(), 0.125),
            torch.optim.SGD(model.linear.parameters(), 0.0),
        ]
        return model, optimizers

    def train(worker: Member) -> tuple[Any, Any]:
        before = worker.rows([1, 2, 3])
        worker.model(IDS).sum().backward()
        worker.optimizers[0].step()
        worker.barrier()
        return worker.rows([1, 2, 3]) - before, worker.model.linear.weight.sign().tolist()

    [(moved, gradient)] = run(build, train, mode, workers=1)
    np.testing.assert_allclose(moved, -0.125 * np.reshape(gradient, (3, 4)), atol=1e-6)


@pytest.mark.slow
def test_kernel_of_the_toy_rule_equals_its_twin() -> None:
    table = RowTable(4, "sign")
    before = np.arange(-12, 12, dtype=np.float32).reshape(3, 8)
    table.load(np.arange(3), before)
    grads, hyper = (
        np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4),
        np.array([0.5, 0.75, 0, 0, 0]),
    )
    table.push(np.arange(3), grads, hyper)
    expected = twin_table.update(RULES["sign"], before[:, :4], before[:, 4:], grads, hyper)
    np.testing.assert_allclose(table.rows, np.hstack(expected))


def test_table_files_name_the_state_of_the_toy_rule() -> None:
    assert [column.name for column in columns_of(4, RULES["sign"], 0)] == ["weights", "state.votes"]


def test_errors_suggest_the_toy_rule() -> None:
    with pytest.raises(PlanError, match="'sgn', did you mean 'sign'"):
        own_rule("sgn", "emb")
    assert "Rprop" in what_works()
