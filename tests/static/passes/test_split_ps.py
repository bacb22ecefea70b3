# SPDX-License-Identifier: Apache-2.0
"""A program with tables is split into three, each with only what it needs."""

from typing import Any

import numpy as np
import pytest
import torch
from tests.static.table_nets import ComputedIds, Fields, calls, source_of, written
from torch import Tensor, nn

import fleetlight as fleet
from fleetlight import static
from fleetlight.errors import PlanError
from fleetlight.static.graph.feeds import Feed
from fleetlight.static.graph.form import Form
from fleetlight.static.passes import SplitPS


def split(model: nn.Module, **shapes: Any) -> Form:
    return SplitPS()(source_of(written(model, **shapes)).form())


@pytest.mark.slow
def test_a_table_is_pulled_and_pushed_once_for_all_lookups() -> None:
    form = split(Fields(26), ids=(5, 26))
    assert form.reports == ("2 tables, 27 lookups; pull 2, push 2",)
    assert form.split is not None
    assert [pull.table for pull in form.split.pulls] == ["deep", "wide"]
    assert len(form.split.pulls[0].wanted) == 26
    assert calls(form).count("fleetlight.sum_rows") == 1
    assert not [name for name in calls(form) if "look_up" in name or "table_gradient" in name]
    marks = [n for n in form.graph.nodes if n.target is torch.ops.fleetlight.gradient.default]
    assert {mark.args[1] for mark in marks} == {
        *("deep.0.weight", "wide.weight", "linear.weight", "linear.bias")
    }


def test_splitting_leaves_the_given_form_unchanged() -> None:
    form = source_of(written(Fields(), ids=(5, 3))).form()
    before, state = calls(form), form.state
    result = SplitPS()(form)
    assert calls(form) == before
    assert form.state is state
    assert form.split is None
    assert [str(slot) for slot in result.state[len(state) :]] == [
        *("pulled rows of deep", "pulled places 0", "pulled places 1", "pulled places 2"),
        *("pulled rows of wide", "pulled places 3", "pulled bounds 3"),
    ]
    # splitting twice equals splitting once
    assert calls(SplitPS()(result)) == calls(result)


def test_pulled_rows_and_their_gradients_have_a_dynamic_size() -> None:
    form = split(Fields(), ids=(5, 3))
    values = {node.name: node.meta["val"] for node in form.graph.nodes}
    assert form.split is not None
    rows = values["p_rows_of_deep"]
    assert rows.shape[1] == 4
    assert isinstance(rows.shape[0], torch.SymInt)
    assert values[form.split.pushes["deep"]].shape == rows.shape
    assert "rows_of_deep_0" in str(static.Program.of(form))


def ids_of_feeds(form: Form, **feeds: Tensor) -> list[Any]:
    assert form.split is not None
    given = [feeds[n.name] if isinstance(n, Feed) else n.tensor for n in form.split.needs]
    return [a.tolist() for a in form.split.ids(*given)]


def test_ids_are_computed_from_feeds_alone() -> None:
    form = split(ComputedIds(lambda self, x: (x + self.offsets) % 7), x=(5, 3))
    assert form.split is not None
    assert [need.name for need in form.split.needs] == ["offsets", "x"]
    x = torch.arange(6).view(2, 3)
    assert ids_of_feeds(form, x=x) == [((x + torch.tensor([0, 100, 200])) % 7).tolist()]


def test_layers_with_equal_ids_share_them() -> None:
    class Both(ComputedIds):
        def forward(self, x: Tensor) -> Tensor:
            return self.emb(x).sum() + self.other(x).sum() + self.gate.sum()

    form = split(Both(lambda *_: None), x=(5, 3))
    assert form.split is not None
    assert [[w.ids for w in pull.wanted] for pull in form.split.pulls] == [[0], [0]]
    assert ids_of_feeds(form, x=torch.arange(3).view(1, 3)) == [[[0, 1, 2]]]


def test_ids_changed_in_place_are_kept_per_lookup() -> None:
    """Each lookup uses the ids at its own time."""

    class Changing(ComputedIds):
        def forward(self, x: Tensor) -> Tensor:
            ids = x.clone()
            before = self.emb(ids).sum()
            ids[:, 1:].add_(10)
            after = self.emb(ids).sum()
            ids.zero_()
            return before + after + self.gate.sum()

    form = split(Changing(lambda *_: None), x=(5, 3))
    x = torch.arange(3).view(1, 3)
    assert ids_of_feeds(form, x=x) == [[[0, 1, 2]], [[0, 11, 12]]]
    np.testing.assert_array_equal(x, [[0, 1, 2]])


def changed(self: Any, x: Tensor) -> Tensor:
    x.add_(1)
    return x


@pytest.mark.parametrize(
    ("ids_of", "reason"),
    [
        (lambda self, x: x + self.gate.long(), "the parameter gate"),
        (lambda self, x: self.other(x).argmax(-1), "rows of the table other"),
        (lambda self, x: x + torch.randint_like(x, 3), r"random numbers \(randint_like\)"),
        (changed, "x, which the program changes"),
    ],
)
def test_ids_that_depend_on_more_than_feeds_are_refused(ids_of: Any, reason: str) -> None:
    with pytest.raises(PlanError, match=rf"^emb: its ids are computed from {reason}; expected"):
        split(ComputedIds(ids_of), x=(5, 3))


def test_a_table_weight_with_another_use_is_refused() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.emb = nn.Embedding(9, 2, sparse=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.emb(x) @ self.emb.weight.T

    with pytest.raises(PlanError, match=r"emb\.weight: its rows are on the .* sparse=False"):
        split(Tied(), x=(5, 3))


@pytest.mark.slow
def test_an_evaluation_pushes_nothing() -> None:
    program = written(Fields(), ids=(5, 3)).clone(for_test=True)
    assert program.reports == ("2 tables, 4 lookups; pull 2, push 0",)
    assert "fleetlight.gather_bags" in calls(program.form)


def test_frozen_and_unused_tables_are_not_pushed() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.frozen, self.unused, self.used = (fleet.nn.SparseEmbedding(2) for _ in range(3))
            self.frozen.weight.requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            self.unused(x)
            return self.frozen(x) + self.used(x)

    form = split(Two(), x=(5, 3))
    assert form.split is not None
    assert list(form.split.pushes) == ["used"]
    assert [lookup.trains for lookup in form.lookups] == [True, False, True]


def test_a_program_without_tables_has_nothing_to_split() -> None:
    assert split(nn.Embedding(4, 2), x=(5, 3)).reports == ("0 tables, 0 lookups; pull 0, push 0",)
