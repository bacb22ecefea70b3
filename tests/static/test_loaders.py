# SPDX-License-Identifier: Apache-2.0
"""Loaders yield batches by the names of feeds, or are started and read by the executor."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from tests.data.observing import Observing
from tests.static.test_executor import SmallProgram
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from fleetlight import static
from fleetlight.data.loader import ShardLoader
from fleetlight.errors import ConfigError, FleetError
from fleetlight.static.definition import reset_default_programs
from fleetlight.static.loaders import named


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    reset_default_programs()
    yield
    reset_default_programs()


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
        with pytest.raises(
            ConfigError, match=r"^feed 'x' is missing: the run got no feed, and no lo"
        ):
            example.run(feed=None)
        reader.start()
        example.run(feed=None)
        # a reset in the middle drops the rest; the next start begins at the first batch
        reader.reset()


def test_one_loader_is_started_at_a_time() -> None:
    example = SmallProgram()
    one, other = (static.bind(loader(4, 4), [example.x, example.y]) for _ in range(2))
    one.start()
    with pytest.raises(
        ConfigError, match=r"^start: another loader of the program was started and is"
    ):
        other.start()
    with pytest.raises(
        ConfigError, match=r"^start: this loader was started and is not at its end; c"
    ):
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
