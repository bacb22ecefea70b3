# SPDX-License-Identifier: Apache-2.0
"""A pass is one file; jobs that ask for it find and order it without another change."""

import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.static.nets import batch, captured, net
from torch import nn

from fleetlight import DistributedStrategy
from fleetlight.collective.data_parallel.replica import Reduction
from fleetlight.errors import PlanError, StrategyError
from fleetlight.static import Executor, passes
from fleetlight.static.rewriting.registry import PassRecord, PassRequest, in_order

TOY = '''
"""Every gradient loses its NaN."""

import dataclasses

import torch

from fleetlight.static.graph.form import Form
from fleetlight.static.rewriting.nodes import NodeWriter, gradients_of, made_by
from fleetlight.static.rewriting.registry import PassRecord


@dataclasses.dataclass(frozen=True)
class ZeroNaN:
    name = "zero_nan"

    def __call__(self, form: Form) -> Form:
        graph, _ = form.copied()
        marks = gradients_of(graph)
        for mark in marks:
            made = made_by(mark)
            with graph.inserting_before(mark):
                clean = NodeWriter(mark).write(torch.ops.aten.nan_to_num.default, made, 0.0)
            mark.replace_input_with(made, clean)
        return form.rewritten(graph, f"{len(marks)} gradients lose their NaN")


PASS = PassRecord(
    ZeroNaN.name,
    lambda request: ZeroNaN(),
    after=("gradient_merge",),
    before=("insert_all_reduce",),
)
'''


def names(reduction: Reduction | None = None, **settings: Any) -> list[str]:
    with_servers = settings.pop("with_servers", False)
    request = PassRequest(DistributedStrategy(**settings), nn.Linear(1, 1), with_servers, reduction)
    return [one.name for one in passes.chosen(request)]


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "zero_nan.py").write_text(textwrap.dedent(TOY))
    monkeypatch.setattr(passes, "__path__", [*passes.__path__, str(tmp_path)])


@pytest.mark.slow
@pytest.mark.usefixtures("toy")
def test_one_file_adds_a_pass() -> None:
    assert names(Reduction()) == ["zero_nan", "insert_all_reduce", "fuse_all_reduce", "overlap"]
    model = net()
    program = captured(model, torch.optim.SGD(model.parameters(), lr=0.1))
    (only,) = passes.chosen(PassRequest(DistributedStrategy(), model))
    program = program.apply(only)
    assert program.explain() == "6 gradients lose their NaN"
    x, y = batch(0).values()
    x[0, 0] = float("nan")
    Executor().run(program, feed={"x": x, "y": y})
    assert all(parameter.isfinite().all() for parameter in model.parameters())


def test_the_strategy_chooses_passes() -> None:
    assert names() == []
    assert names(with_servers=True, gradient_merge=True) == ["split_ps"]
    merge = {"gradient_merge": True, "gradient_merge_configs": {"k_steps": 2}}
    assert names(**merge) == ["gradient_merge"]
    assert names(with_servers=True, **merge) == ["split_ps"]
    recompute = {"recompute": True, "recompute_configs": {"checkpoints": ["0"]}}
    assert names(amp=True, **merge, **recompute) == ["recompute", "amp", "gradient_merge"]
    assert names(Reduction(narrow=torch.float16), sync_batch_norm=True) == [
        *("sync_batch_norm", "insert_all_reduce", "fuse_all_reduce", "narrow", "overlap")
    ]
    assert "fuse_all_reduce" not in names(Reduction(), fuse_all_reduce_ops=False)
    with pytest.raises(StrategyError, match="use 'bfloat16'"):
        names(with_servers=True, amp=True, amp_configs={"dtype": "float16"})


def test_hierarchical_jobs_do_not_narrow_whole_buckets() -> None:
    reduction = Reduction(inner=2, narrow=torch.bfloat16)
    levels: Any = (((0, 1), (2,)),)
    strategy, model = DistributedStrategy(), nn.Linear(1, 1)
    by_levels = passes.chosen(PassRequest(strategy, model, False, reduction, levels))
    assert [one.name for one in by_levels][-2:] == ["hierarchical", "overlap"]
    at_once = passes.chosen(PassRequest(strategy, model, False, reduction))
    assert [one.name for one in at_once][-2:] == ["narrow", "overlap"]
    alone = passes.chosen(PassRequest(strategy, model, False, reduction, trains_alone=True))
    assert "narrow" not in [one.name for one in alone]


def record(name: str, *after: str, before: tuple[str, ...] = ()) -> PassRecord:
    return PassRecord(name, lambda request: None, after, before)


def test_passes_are_ordered_by_their_records() -> None:
    found = in_order([record("a", "b"), record("b"), record("c", before=("b",))])
    assert [one.name for one in found] == ["c", "b", "a"]
    with pytest.raises(PlanError, match="pass 'a': 'overlapp': did you mean 'overlap'"):
        in_order([record("a", "overlapp"), record("overlap")])
    with pytest.raises(PlanError, match=r"cycle: .*a -> .*; change `after` or `before`"):
        in_order([record("a", "b"), record("b", "a")])
