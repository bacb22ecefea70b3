# SPDX-License-Identifier: Apache-2.0
"""Loaders yield batches by the names of feeds, or are started and read by the executor."""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from tests.data.observing import Observing
from tests.errors import refuses
from tests.static.test_executor import SmallProgram
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from fleetlight import static
from fleetlight.data.loader import ShardLoader
from fleetlight.data.readers.file_stream import FileStream
from fleetlight.errors import ConfigError, FleetError
from fleetlight.static.definition import reset_default_programs
from fleetlight.static.loaders import named
from fleetlight.static.running.runners import LocalRunner


def loader(records: int = 10, size: int = 4) -> DataLoader[Any]:
    numbers = torch.arange(records * 4, dtype=torch.float32).reshape(records, 4)
    return DataLoader(TensorDataset(numbers / 40, torch.arange(records) % 3), size)


def test_batches_have_the_names_of_the_feeds() -> None:
    example = SmallProgram()
    bound = static.bind(loader(), [example.x, example.y])
    assert len(bound) == 3
    assert [(sorted(b), len(b["x"]), len(b["y"])) for b in bound] == [
        (["x", "y"], size, size) for size in (4, 4, 2)
    ]
    assert [len(b["y"]) for b in bound()] == [4, 4, 2]
    for given in bound:
        assert example.run(feed=given)[0].dim() == 0


class Pair(NamedTuple):
    x: Tensor
    y: Tensor


A, B, C = torch.ones(2, 4), torch.zeros(2), torch.ones(1)


@pytest.mark.parametrize(
    ("batch", "names", "expected"),
    [
        ((A, B), "xy", [A, B]),
        ([A, B], "xy", [A, B]),
        (Pair(A, B), "xy", [A, B]),
        ({"y": B, "x": A, "id": C}, "xy", [A, B]),
        (A, "x", [A]),
        ([A], "x", [A]),
        (((A, C), B), "xzy", [A, C, B]),
        ((A.numpy(), [0, 1]), "xy", [A.numpy(), [0, 1]]),
        ([[1.0, 2.0], [3.0, 4.0]], "x", [[[1.0, 2.0], [3.0, 4.0]]]),
    ],
)
def test_batches_of_many_forms_are_accepted(batch: Any, names: str, expected: list[Any]) -> None:
    found = named(tuple(names), batch)
    assert list(found) == list(names)
    for one, other in zip(found.values(), expected, strict=True):
        assert one is other or np.array_equal(one, other)


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        ((A, B, C), "^the loader yielded 3 values, but it is bound to 2 feeds: 'x', 'y'$"),
        (A, "^the loader yielded 1 values, but it is bound to 2 feeds: 'x', 'y'$"),
        ({"x": A}, "^the loader yielded a batch without 'y', to which it is bound: got 'x'$"),
        ({}, "^the loader yielded a batch without 'x', to which it is bound: got nothing$"),
    ],
)
def test_batches_that_do_not_fit_are_refused(batch: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        named(("x", "y"), batch)


@pytest.mark.slow
def test_a_started_loader_yields_its_batches_until_its_end() -> None:
    example = SmallProgram()
    reader = static.bind(loader(), [example.x, example.y])
    for _ in range(2):
        reader.start()
        for _ in range(3):
            example.run(feed=None)
        words = (
            r"^the loader of 'x', 'y' is at its end; call its reset\(\), and start\(\) for the next"
        )
        with pytest.raises(static.EndOfData, match=words):
            example.run(feed=None)
        # and again, until the reset
        with pytest.raises(static.EndOfData):
            example.run(feed=None)
        reader.reset()
    assert not issubclass(static.EndOfData, (FleetError, StopIteration))


def test_the_end_of_data_makes_no_step() -> None:
    example = SmallProgram()
    reader = static.bind(loader(4, 4), [example.x, example.y])
    reader.start()
    example.run(feed=None)
    before = example.model.weight.clone()
    with pytest.raises(static.EndOfData):
        example.run(feed=None)
    assert torch.equal(example.model.weight, before)


def test_a_loader_yields_nothing_before_start_or_after_reset() -> None:
    example = SmallProgram()
    reader = static.bind(loader(), [example.x, example.y])
    reader.reset()
    for _ in range(2):
        with refuses(ConfigError, "feed 'x' is missing: the run got no feed, and no lo"):
            example.run(feed=None)
        reader.start()
        example.run(feed=None)
        # a reset in the middle drops the rest; the next start begins at the first batch
        reader.reset()


def test_one_loader_is_started_at_a_time() -> None:
    example = SmallProgram()
    one, other = (static.bind(loader(4, 4), [example.x, example.y]) for _ in range(2))
    one.start()
    with refuses(ConfigError, "start: another loader of the program was started and is"):
        other.start()
    with refuses(ConfigError, "start: this loader was started and is not at its end; c"):
        one.start()
    example.run(feed=None)
    with pytest.raises(static.EndOfData):
        example.run(feed=None)
    # a loader at its end may be replaced
    other.start()
    assert not one.is_started
    example.run(feed=None)
    # the reset of a stopped loader does not stop the other
    one.reset()
    assert other.is_started


def test_an_explicit_feed_does_not_advance_the_loader() -> None:
    example = SmallProgram()
    reader = static.bind(loader(8, 4), [example.x, example.y])
    reader.start()
    example.run()
    for _ in range(2):
        example.run(feed=None)
    with pytest.raises(static.EndOfData):
        example.run(feed=None)
    example.run()


def test_an_evaluation_reads_the_needed_feeds_of_its_own_loader() -> None:
    example = SmallProgram()
    reader = static.bind(loader(8, 4), ["x", "y"], example.test)
    reader.start()
    assert len(example.executor.run(example.test, fetch_list=[example.prediction])[0]) == 4
    # the main program does not see the loader of another program
    with pytest.raises(ConfigError, match=r"no loader was started for the program"):
        example.run(feed=None)


def test_a_reset_closes_the_iterator() -> None:
    closed = []

    class Closes:
        def __iter__(self) -> Iterator[Any]:
            try:
                yield from loader()
            finally:
                closed.append(True)

    example = SmallProgram()
    reader = static.bind(Closes(), [example.x, example.y])
    reader.start()
    example.run(feed=None)
    reader.reset()
    assert closed == [True]


def test_a_sharded_loader_reports_its_sample_counts() -> None:
    shares: list[Any] = []
    shard = ShardLoader(
        loader(8, 4),
        worker=0,
        workers=1,
        seed=0,
        tail="join",
        observer=Observing(lambda share: shares.append(share and share.mine)),
    )
    example = SmallProgram()
    reader = static.bind(shard, [example.x, example.y])
    for epoch in range(2):
        reader.start()
        for _ in range(2):
            example.run(feed=None)
        with pytest.raises(static.EndOfData):
            example.run(feed=None)
        reader.reset()
        assert shard.epoch == epoch + 1
    assert [mine for mine in shares if mine] == [4, 4, 4, 4]


def test_invalid_bindings_are_refused() -> None:
    example = SmallProgram()
    bound = static.bind(loader(), [example.x, example.y])
    for feeds, words in (
        (["x", "z"], r"^bind: the program has no feed 'z': known names: x, y$"),
        (["x", "x"], r"^bind: got the feeds \['x', 'x'\], expected each of some feeds once$"),
        (
            [example.prediction],
            r"^bind: Variable .* is not a feed; bind variables that static.data returned$",
        ),
        ([3], r"^bind: got a int as a feed, expected a variable of static\.data or its name$"),
    ):
        with pytest.raises(ConfigError, match=words):
            static.bind(loader(), feeds, static.default_main_program())
    with pytest.raises(ConfigError, match=r"^bind: got a loader that is bound already"):
        static.bind(bound, ["x"])
    with pytest.raises(ConfigError, match=r"^bind: got a int, expected a loader of batches$"):
        static.bind(3, ["x"])  # type: ignore[arg-type]


@pytest.mark.slow
def test_all_feeds_are_bound_if_none_is_named() -> None:
    SmallProgram()
    assert static.bind(loader()).names == ("x", "y")


def test_a_feed_that_was_renamed_is_found() -> None:
    example = SmallProgram()
    example.x.name = "pictures"  # type: ignore[attr-defined]
    assert static.bind(loader(), [example.x, example.y]).names == ("x", "y")


# -- programs run over whole data sets and log lines at intervals ---------------------------------


def lines_of(log: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in log.records if r.name == "fleetlight"]


@pytest.mark.slow
def test_unused_arguments_of_fleet_are_explained(caplog: pytest.LogCaptureFixture) -> None:
    example = SmallProgram()
    caplog.set_level(logging.INFO, "fleetlight")
    executor = example.executor
    executor.train_from_dataset(
        None, loader(1), [example.loss], scope=object(), thread=12, debug=True, fetch_info=["cost"]
    )
    for line, name in zip(lines_of(caplog)[:3], ("scope=", "thread=12", "debug=True"), strict=True):
        assert line.startswith("train_from_dataset: ")
        assert f"{name}" in line
        assert "has no effect: " in line
    caplog.clear()
    executor.train_from_dataset(None, loader(1), [example.loss], scope=None, thread=0, debug=False)
    assert not [line for line in lines_of(caplog) if "has no effect" in line]
    with pytest.raises(TypeError, match="did you mean 'print_period'"):
        executor.train_from_dataset(None, loader(1), print_priod=1)  # type: ignore[call-arg]


def test_a_file_stream_trains_a_program(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "fleetlight")
    file = tmp_path / "records.txt"
    file.write_text("".join(f"{n % 3} {n} {n + 1} 0 1\n" for n in range(10)))

    def parse(lines: list[bytes]) -> tuple[Tensor, Tensor]:
        rows = torch.tensor([[float(word) for word in line.split()] for line in lines])
        return rows[:, 1:] / 10, rows[:, 0].long()

    example = SmallProgram()
    before = example.model.weight.clone()
    stream = FileStream(str(file), parse)
    done = example.executor.train_from_dataset(
        None, stream.loader(2), [example.loss], fetch_info=["cost"], print_period=2
    )
    assert done.steps == 5
    assert not torch.equal(example.model.weight, before)
    logged = lines_of(caplog)
    assert [line.split(" cost ")[0] for line in logged] == [
        *("train: step 1,", "train: step 2,", "train: step 4,"),
        "train: 5 steps",
    ]
    assert f"{done.fetched[0].item():.6g}" in logged[2]


@pytest.mark.slow
def test_an_evaluation_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "fleetlight")
    example = SmallProgram()
    before = example.model.weight.clone()
    bound = static.bind(loader(), ["x", "y"], example.test)
    done = example.executor.infer_from_dataset(
        example.test, bound, [example.prediction], print_period=2
    )
    assert torch.equal(example.model.weight, before)
    assert (done.steps, done.fetched[0].shape) == (3, (4, 3))
    assert lines_of(caplog)[0].startswith("infer: step 1, ")


def test_no_fetch_and_no_batch_are_allowed(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "fleetlight")
    example = SmallProgram()
    assert example.executor.train_from_dataset(dataset=loader()).fetched == []
    assert example.executor.train_from_dataset(dataset=[], fetch_list=[example.loss]).steps == 0
    assert lines_of(caplog) == ["train: 3 steps", "train: 0 steps"]


@pytest.mark.slow
def test_mismatched_arguments_are_refused(tmp_path: Path) -> None:
    example = SmallProgram()
    (tmp_path / "a").write_text("1\n")
    stream = FileStream(str(tmp_path / "a"), lambda lines: lines)
    train: Any = example.executor.train_from_dataset
    with refuses(ConfigError, "a FileStream gives lines; give its loader, stream.lo"):
        train(None, stream)
    with refuses(ConfigError, "dataset: got a NoneType, expected a loader of batches"):
        train()
    with refuses(ConfigError, "fetch_info: got 2 names, expected one for each of the 1"):
        train(None, loader(), [example.loss], ["a", "b"])
    with pytest.raises(ConfigError, match=r"^print_period: got 0, expected a number of runs$"):
        train(None, loader(), print_period=0)
    with refuses(ConfigError, "infer_from_dataset: got a program that trains; give pr"):
        example.executor.infer_from_dataset(None, loader())


# -- several steps in one call of the executor equal as many calls --------------------------------


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
