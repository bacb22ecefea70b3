# SPDX-License-Identifier: Apache-2.0
"""Programs run over whole data sets and log lines at intervals."""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.static.test_executor import SmallProgram
from tests.static.test_loaders import loader
from torch import Tensor

from fleetlight import static
from fleetlight.data.readers.file_stream import FileStream
from fleetlight.errors import ConfigError
from fleetlight.static.definition import reset_default_programs


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    reset_default_programs()
    yield
    reset_default_programs()


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
    with pytest.raises(
        ConfigError, match=r"^a FileStream gives lines; give its loader, stream\.lo"
    ):
        train(None, stream)
    with pytest.raises(
        ConfigError, match=r"^dataset: got a NoneType, expected a loader of batches"
    ):
        train()
    with pytest.raises(
        ConfigError, match=r"^fetch_info: got 2 names, expected one for each of the 1"
    ):
        train(None, loader(), [example.loss], ["a", "b"])
    with pytest.raises(ConfigError, match=r"^print_period: got 0, expected a number of runs$"):
        train(None, loader(), print_period=0)
    with pytest.raises(
        ConfigError, match=r"^infer_from_dataset: got a program that trains; give pr"
    ):
        example.executor.infer_from_dataset(None, loader())
