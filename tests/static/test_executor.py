# SPDX-License-Identifier: Apache-2.0
"""The executor runs programs by the names of feeds and fetches, and names what is missing."""

import gc
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.errors import refuses
from tests.static.nets import batch, captured, net
from torch import Tensor, nn

from fleetlight import static
from fleetlight.checkpoint import load_inference, save_inference
from fleetlight.errors import ConfigError, PlanError
from fleetlight.static.definition import reset_default_programs
from fleetlight.static.passes import GradientMerge
from fleetlight.static.running.options import RunOptions

X = [[1.0, 2.0, 3.0, 4.0], [4.0, 3.0, 2.0, 1.0]]


class SmallProgram:
    """A small program, written line by line into the default program."""

    def __init__(self, is_started: bool = True) -> None:
        torch.manual_seed(3)
        self.program = static.default_main_program()
        self.x = static.data("x", [None, 4])
        self.y = static.data("y", [None], "int64")
        self.model = nn.Linear(4, 3)
        self.prediction = self.model(self.x).softmax(-1)
        self.loss = F.cross_entropy(self.prediction, self.y)
        self.test = static.default_main_program().clone(for_test=True)
        static.minimize(torch.optim.SGD(self.model.parameters(), lr=0.1), self.loss)
        self.executor = static.Executor()
        if is_started:
            self.executor.run(static.default_startup_program())

    @property
    def feed(self) -> dict[str, Any]:
        return {"x": torch.tensor(X), "y": torch.tensor([0, 2])}

    def run(self, **more: Any) -> list[Any]:
        return self.executor.run(**{"feed": self.feed, "fetch_list": [self.loss], **more})


def test_values_are_fetched_by_variable_and_by_name() -> None:
    example = SmallProgram()
    program = static.default_main_program()
    one, other = example.run(program=program, fetch_list=[example.loss, example.loss.name])
    assert torch.equal(one, other)
    assert f"{one:.3f}" == f"{float(one):.3f}" == "%.3f" % one  # noqa: UP031
    assert example.run(fetch_list=example.loss)[0].dim() == 0
    assert example.run(fetch_list="loss")[0].dim() == 0
    assert example.run(fetch_list=None) == []
    (array,) = example.run(return_numpy=True)
    assert isinstance(array, np.ndarray)


@pytest.mark.sampled(3)
@pytest.mark.slow
@pytest.mark.parametrize(
    "feed",
    [
        {"x": np.array(X, np.float32), "y": np.array([0, 2])},
        {"x": X, "y": [0, 2]},
        [np.array(X, np.float32), [0, 2]],
        (torch.tensor(X), torch.tensor([0, 2])),
        [{"x": X, "y": [0, 2]}],
        {"x": torch.tensor(X).t().contiguous().t(), "y": torch.tensor([0, 2])},
        {"x": np.array(X, np.float32)[::-1][::-1], "y": torch.tensor([0, 2]).requires_grad_(False)},
    ],
)
def test_feeds_of_many_forms_are_accepted(feed: Any) -> None:
    (expected,) = SmallProgram().run()
    reset_default_programs()
    torch.testing.assert_close(SmallProgram().run(feed=feed)[0], expected)


BAD_FEEDS: list[tuple[Any, str]] = [
    (
        {"x": X},
        r"^feed 'y' is missing: the program takes x: float32\[\?, 4\]; y: int64\[\?\], got ",
    ),
    ({"x": X, "y": [0, 2], "z": 1}, "^feed 'z' is not one of this program: known names: x, y$"),
    (
        {"x": torch.ones(2, 3), "y": [0, 2]},
        r"^feed 'x': got the shape \[2, 3\], expected \[any, 4\]$",
    ),
    ({"x": np.ones((2, 4)), "y": [0, 2]}, r"^feed 'x': got torch.float64, expected torch.float32;"),
    ({"x": X, "y": [0.0, 2.0]}, r"^feed 'y': got torch.float64, expected torch.int64; convert it"),
    (
        {"x": X, "y": [0]},
        r"^feed 'y' has 1 in dimension 0, and feed 'x' 2 in dimension 0; expected",
    ),
    ([X], r"^feed: got 1 values, expected 2: x: float32\[\?, 4\]; y: int64\[\?\]$"),
    ("x", r"^feed: got a str, expected a dict of x: .*, or as many tensors in this order$"),
    ({"x": X, "y": [[0, 2]]}, r"^feed 'y': got the shape \[1, 2\], expected \[any\]$"),
    (
        None,
        r"^feed 'x' is missing: the run got no feed, and no loader was started for the program;",
    ),
]


@pytest.fixture(scope="module")
def one_example() -> SmallProgram:
    """One program for many tests, which must not change it."""
    with static.program_guard(static.Program(), static.Program()):
        return SmallProgram()


@pytest.mark.parametrize(("feed", "words"), BAD_FEEDS)
def test_feeds_that_do_not_fit_are_refused(
    one_example: SmallProgram, feed: Any, words: str
) -> None:
    before = one_example.model.weight.clone()
    with pytest.raises(ConfigError, match=words):
        one_example.run(program=one_example.program, feed=feed)
    assert torch.equal(one_example.model.weight, before)


def test_a_variable_is_refused_as_a_feed() -> None:
    example = SmallProgram()
    with refuses(ConfigError, "feed 'x': got Variable x:", ", which has no values; fee"):
        example.run(feed={"x": example.x, "y": [0, 2]})


def test_a_prediction_needs_no_label() -> None:
    example = SmallProgram()
    (prediction,) = example.executor.run(example.test, {"x": X}, [example.prediction])
    torch.testing.assert_close(prediction, example.model(torch.tensor(X)).softmax(-1).detach())
    # the loss gets its name at minimize(), after the clone
    for loss in (example.loss, "loss", example.loss.name):
        example.executor.run(example.test, example.feed, [loss])
        with pytest.raises(ConfigError, match=r"^feed 'y' is missing"):
            example.executor.run(example.test, {"x": X}, [loss])
    # a training step needs all feeds, whatever is fetched
    with pytest.raises(ConfigError, match=r"^feed 'y' is missing"):
        example.run(feed={"x": X}, fetch_list=[example.prediction])


def test_a_fetch_that_does_not_exist_is_named() -> None:
    with refuses(ConfigError, "fetch 'los' is not one of this program: did you mean 'loss'?"):
        SmallProgram().run(fetch_list=["los"])


def test_the_startup_program_runs_first_and_may_run_twice() -> None:
    example = SmallProgram(is_started=False)
    with refuses(ConfigError, "ran before its startup program", "call exe.run(startup) first"):
        example.run()
    for _ in range(2):
        assert example.executor.run(static.default_startup_program()) == []
    example.run()


def test_other_objects_are_refused_as_programs() -> None:
    with pytest.raises(ConfigError, match=r"^Executor: got a Linear, expected a static\.Program$"):
        static.Executor().run(nn.Linear(1, 1), {})  # type: ignore[arg-type]


def test_an_inference_model_is_refused_with_advice(tmp_path: Path) -> None:
    save_inference(tmp_path, nn.Linear(2, 1), torch.ones(3, 2))
    model: Any = load_inference(tmp_path)
    with pytest.raises(ConfigError, match=r"got an InferenceModel: call it, model\(x\)$"):
        static.Executor().run(model, {})


def test_a_module_is_refused_as_a_fetch() -> None:
    example = SmallProgram()
    with pytest.raises(ConfigError, match="got a Linear, expected a variable of the program"):
        example.run(fetch_list=[nn.Linear(1, 1)])


@pytest.mark.slow
def test_minimize_needs_one_scalar_loss() -> None:
    example = SmallProgram()
    optimizer = torch.optim.SGD(example.model.parameters(), lr=0.1)
    with pytest.raises(PlanError, match=r"^minimize: the program has an optimizer already"):
        static.minimize(optimizer, example.loss)
    reset_default_programs()
    x = static.data("x", [None, 4])
    hidden = example.model(x)
    with pytest.raises(PlanError, match=r"^minimize: got a loss of shape .*, expected one number"):
        static.minimize(optimizer, hidden)
    with pytest.raises(PlanError, match=r"^minimize: the loss depends on no parameter"):
        static.minimize(optimizer, x.mean())
    # refused losses leave the program usable
    static.minimize(optimizer, hidden.mean())


def test_a_feed_name_is_declared_once() -> None:
    static.data("x", [None, 4])
    with refuses(ConfigError, "data 'x': the program has a feed of this name already"):
        static.data("x", [None, 5])


def test_fetched_values_are_not_overwritten() -> None:
    example = SmallProgram()
    given = torch.tensor(X)
    weight, x = example.run(feed=[given, [0, 2]], fetch_list=["p_weight", example.x])
    kept = weight.clone()
    example.run()
    assert torch.equal(weight, kept)
    assert not torch.equal(weight, example.model.weight)
    assert x.data_ptr() != given.data_ptr()


def test_fetch_frequency_repeats_the_last_fetched_values() -> None:
    """Every third run computes; the runs between train and return the last computed value."""
    example = SmallProgram()
    static.default_main_program().options = RunOptions(fetch_frequency=3)
    losses = [float(example.run()[0]) for _ in range(7)]
    assert losses[0] == losses[1] == losses[2] != losses[3] == losses[4] == losses[5] != losses[6]
    # a new fetch is computed at once
    assert example.run(fetch_list=[example.prediction])[0].shape == (2, 3)
    # the executor's own setting wins, and an evaluation computes in every run
    executor = static.Executor(fetch_frequency=1)
    assert (
        len({float(executor.run(feed=example.feed, fetch_list=["loss"])[0]) for _ in range(4)}) == 4
    )
    often = static.Executor(fetch_frequency=5)
    one = often.run(example.test, {"x": X}, [example.prediction])[0]
    example.run()
    assert not torch.equal(one, often.run(example.test, {"x": X}, [example.prediction])[0])


def test_num_threads_applies_during_a_run_only() -> None:
    seen: list[int] = []

    class Doubles(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 2

    program = static.capture(Doubles(), None, None, {"x": torch.ones(2, 4)})
    before = torch.get_num_threads()

    class Runner:
        def start(self, program: static.Program) -> None: ...

        def run(self, *_: Any) -> list[Tensor]:
            seen.append(torch.get_num_threads())
            raise KeyboardInterrupt

    program.runner = Runner()
    for executor, count in (
        (static.Executor(num_threads=before + 2), before + 2),
        (static.Executor(), before),
    ):
        with pytest.raises(KeyboardInterrupt):
            executor.run(program, {"x": torch.ones(2, 4)})
        assert seen.pop() == count
        assert torch.get_num_threads() == before


@pytest.mark.slow
def test_code_and_values_are_freed_with_their_program() -> None:
    executor = static.Executor()
    model = net()
    program = captured(model, torch.optim.SGD(model.parameters(), lr=0.1))
    executor.run(program, batch(0), ["loss"])
    form, freed = weakref.ref(program.form), weakref.ref(program)
    del program
    gc.collect()
    assert freed() is None
    assert form() is None
    executor.close()
    executor.close()


def test_options_are_whole_numbers_above_zero() -> None:
    for name in ("fetch_frequency", "num_threads"):
        for value in (0, -1, 1.5, True, "2"):
            with pytest.raises(
                ConfigError, match=rf"^{name}: got .*, expected a whole number above 0$"
            ):
                static.Executor(**{name: value})


def test_a_variable_of_another_program_is_refused() -> None:
    programs = []
    for factor in (2, 3):
        with static.program_guard(static.Program(), static.Program()):
            programs.append((static.default_main_program(), static.data("x", [None, 2]) * factor))
    executor = static.Executor()
    (first, mine), (_, other) = programs
    executor.run(first.startup)
    with pytest.raises(ConfigError, match="belongs to another program"):
        executor.run(first, feed={"x": torch.ones(1, 2)}, fetch_list=[other])
    assert executor.run(first, feed={"x": torch.ones(1, 2)}, fetch_list=[mine])[0].sum() == 4


def test_a_variable_may_not_have_the_name_of_a_feed() -> None:
    tripled = static.data("x", [None, 2]) * 3
    with pytest.raises(PlanError, match="the name 'x' belongs to another variable"):
        tripled.name = "x"  # type: ignore[attr-defined]


def test_feeds_are_not_changed_in_place() -> None:
    out = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 1))(static.data("x", [None, 4]))
    executor = static.Executor()
    executor.run(static.default_startup_program())
    given = -torch.ones(2, 4)
    executor.run(feed={"x": given}, fetch_list=[out])
    assert given.sum() == -8


def test_repeated_fetches_are_no_older_than_the_frequency() -> None:
    example = SmallProgram()
    for _ in range(3):
        example.run()
    for _ in range(9):
        example.run(fetch_list=[])
    expected = example.model(torch.tensor(X)).softmax(-1)
    executor = static.Executor(fetch_frequency=4)
    old = executor.run(feed=example.feed, fetch_list=[example.loss])
    assert old[0] == F.cross_entropy(expected, torch.tensor([0, 2]))
    for _ in range(20):
        executor.run(feed=example.feed)
    now = F.cross_entropy(example.model(torch.tensor(X)).softmax(-1), torch.tensor([0, 2]))
    assert executor.run(feed=example.feed, fetch_list=[example.loss])[0] == now


def test_passes_changed_in_place_take_effect() -> None:
    example = SmallProgram()
    program = static.default_main_program()
    program.passes = [GradientMerge(2)]
    example.run()
    program.passes.clear()
    before = example.model.weight.detach().clone()
    example.run()
    assert not torch.equal(example.model.weight, before)


def test_another_program_guard_leaves_the_default_program_open() -> None:
    """Modules called after it keep their names, and their training flag is observed."""
    x = static.data("x", [None, 4])
    with static.program_guard(static.Program()):
        static.data("other", [None])
    nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))(x)
    names = [slot.name for slot in static.default_main_program().state]
    assert "0.weight" in names
    assert "1.num_batches_tracked" in names


def test_a_module_called_after_the_first_run_is_refused() -> None:
    example = SmallProgram()
    example.run()
    with pytest.raises(PlanError, match="call all modules before the first run"):
        nn.Linear(3, 2)(example.prediction)
