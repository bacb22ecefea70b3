# SPDX-License-Identifier: Apache-2.0
"""A program is valid for the sizes at which its branches would be the same."""

from collections.abc import Callable, Iterator

import pytest
import torch
from tests.static import kinds
from torch import Tensor, nn

from fleetlight import static
from fleetlight.errors import ConfigError, PlanError
from fleetlight.static import passes
from fleetlight.static.definition import reset_default_programs
from fleetlight.static.graph.feeds import Limit


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    reset_default_programs()
    yield
    reset_default_programs()


#: how the code reads a batch of 7 records, and the resulting limit
LOOKS: list[tuple[Callable[[Tensor], bool], str]] = [
    (lambda x: x.shape[0] > 4, "at least 5"),
    (lambda x: x.shape[0] <= 4, "at least 5"),
    (lambda x: 2 * x.shape[0] - 1 < 20, "at most 10"),
    (lambda x: x.shape[0] == 1, "other than 1"),
    (lambda x: 3 <= x.shape[0] < 9, "at least 3 and at most 8"),
    (lambda x: x.size(0) * 4 == x.numel(), "any"),
]


@pytest.mark.parametrize(("looks", "limit"), LOOKS)
def test_branches_on_a_size_limit_the_size(looks: Callable[[Tensor], bool], limit: str) -> None:
    x = static.data("x", [None, 4])
    _ = x * 2 if looks(x) else x * 3
    assert str(static.default_main_program().feeds["x"].limits[0]) == limit


def test_sizes_that_take_another_branch_are_refused() -> None:
    x = static.data("x", [None, 4])
    y = x * 2 if x.shape[0] > 5 else x * 3
    executor = static.Executor()
    executor.run(static.default_startup_program())
    assert executor.run(feed={"x": torch.ones(6, 4)}, fetch_list=[y])[0].sum() == 48
    with pytest.raises(
        ConfigError,
        match=r"^feed 'x': got 2 in dimension 0, expected at least 6: the program branched "
        r"on this size when it was written$",
    ):
        executor.run(feed={"x": torch.ones(2, 4)}, fetch_list=[y])


@pytest.mark.parametrize("looks", [len, lambda x: bool(x.shape[0] % 2 == 0), list])
def test_reading_a_dynamic_size_as_a_number_is_refused(looks: Callable[[Tensor], object]) -> None:
    x = static.data("x", [None, 4])
    looks(x)
    with pytest.raises(
        PlanError,
        match=r"^data 'x': dimension 0 is dynamic, but the program reads this size \(by len\(\),"
        r" int\(\), or a loop\) and would be valid for one size only; give it in static\.data",
    ):
        str(static.default_main_program())


def test_a_branch_on_parity_fixes_the_captured_size() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.layer(x[:, 0])
            return out if x.shape[0] % 2 == 0 else -out

    program = kinds.captured(kinds.of(Odd))
    assert [str(feed) for feed in program.feeds.values()] == ["x: float64[6, 3, 4]", "y: int64[6]"]
    with pytest.raises(ConfigError, match=r"got the shape \[3, 3, 4\], expected \[6, 3, 4\]"):
        static.Executor().run(program, kinds.batch(1))


@pytest.mark.slow
def test_batch_norm_needs_more_than_one_record() -> None:
    """As in eager mode; guards of torch's kernels are dropped, since they work for all sizes."""
    program = kinds.captured(kinds.of(kinds.Repeats))
    with pytest.raises(ConfigError, match="got 1 in dimension 0, expected other than 1"):
        static.Executor().run(program, kinds.batch(0, 1))
    for name in ("encoder", "lstm", "in place"):
        program = kinds.captured(kinds.of(kinds.KINDS[name]))
        static.Executor().run(program, kinds.batch(0, 1))


def test_limits_intersect() -> None:
    both = Limit(2, None, frozenset({1, 5})).within(Limit(0, 9))
    assert both == Limit(2, 9, frozenset({5}))
    assert [size for size in range(12) if both.allows(size)] == [2, 3, 4, 6, 7, 8, 9]
    assert str(both) == "at least 2 and at most 9 and other than 5"
    assert str(Limit()) == "any"


@pytest.mark.slow
def test_passes_add_no_guards() -> None:
    """A new guard would rebuild the form and lose the state of the passes."""
    program = kinds.captured(kinds.of(kinds.KINDS["encoder"]))
    before = [str(feed.limits) for feed in program.feeds.values()]
    program.passes = (passes.Amp("bfloat16"), passes.GradientMerge(2))
    form = program.form
    assert program.form is form
    assert [str(feed.limits) for feed in program.feeds.values()] == before
