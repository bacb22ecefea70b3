# SPDX-License-Identifier: Apache-2.0
"""Several steps in one call of the executor equal as many calls."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.static.test_executor import SmallProgram
from torch import Tensor

from fleetlight import static
from fleetlight.errors import ConfigError
from fleetlight.static.definition import reset_default_programs
from fleetlight.static.running.runners import LocalRunner


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    reset_default_programs()
    yield
    reset_default_programs()


def feeds(count: int) -> list[dict[str, Tensor]]:
    random = torch.Generator().manual_seed(1)
    return [
        {"x": torch.randn(n + 1, 4, generator=random), "y": torch.arange(n + 1) % 3}
        for n in range(count)
    ]


def one_by_one(count: int) -> tuple[list[Tensor], Tensor]:
    """The loss of each step, and the final weight."""
    example = SmallProgram()
    losses = [example.run(feed=feed)[0] for feed in feeds(count)]
    weight = example.model.weight.detach().clone()
    reset_default_programs()
    return losses, weight


@pytest.mark.parametrize("kind", [list, iter, tuple])
def test_steps_with_feeds_equal_single_runs(kind: Any) -> None:
    losses, weight = one_by_one(5)
    example = SmallProgram()
    [loss] = example.run(feed=kind(feeds(5)), steps=5)
    assert torch.equal(loss, losses[-1])
    assert torch.equal(example.model.weight, weight)


def test_an_iterator_continues_over_calls_and_a_list_has_only_its_first_feeds_used() -> None:
    losses, weight = one_by_one(5)
    example = SmallProgram()
    given = iter(feeds(5))
    assert torch.equal(example.run(feed=given, steps=2)[0], losses[1])
    assert torch.equal(example.run(feed=given, steps=9)[0], losses[4])
    assert torch.equal(example.model.weight, weight)
    with pytest.raises(static.EndOfData, match="no feed for any of the steps"):
        example.run(feed=given, steps=2)
    reset_default_programs()
    assert torch.equal(SmallProgram().run(feed=feeds(5), steps=2)[0], losses[1])


@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_a_started_loader_continues_over_calls(ahead: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a runner reads early, all batches are run, once and in order."""
    losses, weight = one_by_one(6)
    monkeypatch.setattr(LocalRunner, "batches_ahead", lambda self: ahead)
    example = SmallProgram()
    given = [(feed["x"], feed["y"]) for feed in feeds(6)]
    reader = static.bind((batch for batch in given), [example.x, example.y])
    reader.start()
    assert torch.equal(example.run(feed=None, steps=2)[0], losses[1])
    assert torch.equal(example.run(feed=None)[0], losses[2])
    assert torch.equal(example.run(feed=None, steps=9)[0], losses[5])
    assert torch.equal(example.model.weight, weight)
    for steps in (3, None):
        with pytest.raises(static.EndOfData, match="its reset"):
            example.run(feed=None, steps=steps)
    assert not reader.is_running


@pytest.mark.parametrize("ahead", [0, 2])
def test_an_error_belongs_to_its_batch(ahead: int, monkeypatch: pytest.MonkeyPatch) -> None:
    losses, _ = one_by_one(3)
    monkeypatch.setattr(LocalRunner, "batches_ahead", lambda self: ahead)
    given: list[Any] = feeds(4)
    given[2] = {"x": torch.ones(2, 5), "y": torch.zeros(2, dtype=torch.int64)}

    def source() -> Iterator[Any]:
        yield from given[:2]
        raise OSError("unreadable")

    example = SmallProgram()
    with pytest.raises(ConfigError, match=r"^feed 'x': got the shape \[2, 5\]"):
        example.run(feed=given, steps=4)
    assert len(example.executor._of(example.program).computed) == 0
    assert example.executor._of(example.program).runs == 2
    reset_default_programs()
    example, unreadable = SmallProgram(), source()
    assert torch.equal(example.run(feed=unreadable, steps=2)[0], losses[1])
    with pytest.raises(OSError, match="unreadable"):
        example.run(feed=unreadable, steps=2)


def test_fetches_are_computed_in_the_last_step_only(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted: list[Any] = []
    run = LocalRunner.run

    def watched(self: Any, program: Any, coder: Any, given: Any, names: Any) -> Any:
        wanted.append(len(names))
        return run(self, program, coder, given, names)

    monkeypatch.setattr(LocalRunner, "run", watched)
    SmallProgram().run(feed=feeds(4), steps=4)
    assert wanted == [0, 0, 0, 1]
    reset_default_programs()
    # the last one of a short list is the last step
    SmallProgram().run(feed=feeds(3), steps=4)
    assert wanted[4:] == [0, 0, 1]


def test_a_feed_that_the_caller_reuses_is_read_again() -> None:
    losses, _ = one_by_one(3)
    example = SmallProgram()
    mine: dict[str, Tensor] = {}

    def refilled() -> Iterator[Any]:
        for feed in feeds(3):
            mine.update(feed)
            yield mine

    assert torch.equal(example.run(feed=refilled(), steps=3)[0], losses[-1])


def test_evaluations_return_the_values_of_the_last_batch() -> None:
    example = SmallProgram()
    expected = example.run(program=example.test, feed=feeds(3)[2])
    assert torch.equal(example.run(program=example.test, feed=feeds(3), steps=3)[0], expected[0])


@pytest.mark.parametrize(
    ("given", "steps", "error"),
    [
        ([], 0, "got steps=0, expected a number of steps"),
        ([], True, "got steps=True"),
        ({"x": 1}, 2, "got steps=2 and a dict as feed, expected a list or an iterator"),
        (static.bind, 2, "got steps=2 and a function as feed"),
        (None, 2, "feed 'x' is missing: the run got no feed, and no loader was started"),
    ],
)
def test_wrong_arguments_are_refused(given: Any, steps: Any, error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        SmallProgram().run(feed=given, steps=steps)
