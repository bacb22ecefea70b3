# SPDX-License-Identifier: Apache-2.0
"""An exported program equals the evaluation of the program and does not need it."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.static.nets import batch, captured, net
from torch import Tensor, nn

import fleetlight as fleet
from fleetlight import static
from fleetlight.errors import ConfigError, PlanError
from fleetlight.static.inference import examples_of, inference_module

pytestmark = pytest.mark.slow


@pytest.fixture
def trained() -> static.Program:
    """A program after some steps, so that its statistics differ from the first ones."""
    model = net()
    program = captured(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    executor = static.Executor()
    for number in range(3):
        executor.run(program, batch(number))
    return program


def evaluated(program: static.Program, feed: dict[str, Tensor], *fetches: str) -> list[Tensor]:
    return static.Executor().run(program.clone(for_test=True), feed, list(fetches))


def assert_same(one: Any, other: Any) -> None:
    torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_an_exported_module_computes_fetches_from_feeds(trained: static.Program) -> None:
    module = inference_module(trained, ["x"], ["output"])
    model = trained.model
    assert model is not None
    for number in range(4):
        feed = batch(number)
        assert_same(module(feed["x"]), model.eval()(feed["x"]))
        assert_same([module(feed["x"])], evaluated(trained, feed, "output"))


def test_exported_state_has_the_names_of_the_model(trained: static.Program) -> None:
    module, model = inference_module(trained, ["x"], ["output"]), trained.model
    assert model is not None
    state = {name: t for name, t in model.state_dict().items() if "num_batches" not in name}
    assert_same(dict(module.state_dict()), state)
    assert [name for name, _ in module.named_parameters()] == list(dict(model.named_parameters()))


def test_feeds_keep_the_listed_order(trained: static.Program) -> None:
    feed = batch(1)
    module = inference_module(trained, ["y", "x"], ["loss", "output", "accuracy"])
    outputs = module(feed["y"], feed["x"])
    assert isinstance(outputs, tuple)
    assert_same(list(outputs), evaluated(trained, feed, "loss", "output", "accuracy"))


def test_an_evaluation_is_exported_unchanged(trained: static.Program) -> None:
    feed = batch(2)["x"]
    module = inference_module(trained.clone(for_test=True), ["x"], ["output"])
    assert_same(module(feed), inference_module(trained, ["x"], ["output"])(feed))


def test_a_missing_feed_is_named(trained: static.Program) -> None:
    with pytest.raises(
        ConfigError, match="fetches output, loss are computed from the feed 'y', which is not among"
    ):
        inference_module(trained, ["x"], ["output", "loss"])
    with pytest.raises(ConfigError, match=r"feed 'z' is not one of this program: .*known names: x"):
        inference_module(trained, ["z"], ["output"])
    with pytest.raises(ConfigError, match="feed 'x' is listed twice"):
        inference_module(trained, ["x", "x"], ["output"])
    with pytest.raises(ConfigError, match=r"fetch 'out' is not one of this program: .*'output'"):
        inference_module(trained, ["x"], ["out"])
    with pytest.raises(ConfigError, match="got no fetches"):
        inference_module(trained, ["x"], [])


ALONE = """
import sys, torch
from fleetlight.checkpoint import load_inference
def loaded():
    return {name for name in sys.modules if name.startswith("fleetlight.static")}
torch.save(load_inference(sys.argv[1])(*torch.load(sys.argv[2])), sys.argv[3])
assert not loaded(), loaded()
import fleetlight as fleet
fleet.load_inference_model(sys.argv[1])
assert loaded() <= {
    "fleetlight.static",
    "fleetlight.static.graph",
    "fleetlight.static.graph.variable",
}, loaded()
"""


@pytest.mark.gate
@pytest.mark.long
def test_an_exported_program_runs_without_static_programs(
    tmp_path: Path, trained: static.Program
) -> None:
    feed = batch(3)
    expected = evaluated(trained, feed, "output", "loss")
    fleet.save_inference_model(tmp_path / "m", ["x", "y"], ["output", "loss"], program=trained)
    torch.save([feed["x"], feed["y"]], tmp_path / "inputs")
    paths = [str(tmp_path / name) for name in ("m", "inputs", "out")]
    subprocess.run([sys.executable, "-c", ALONE, *paths], check=True, timeout=100)
    assert_same(list(torch.load(tmp_path / "out")), expected)


def test_an_exported_program_takes_named_feeds_of_any_batch_size(
    tmp_path: Path, trained: static.Program
) -> None:
    trained.save(tmp_path / "program")
    loaded = static.load_program(tmp_path / "program")
    fleet.save_inference_model(tmp_path / "m", feeds=["x"], fetches=["output"], program=loaded)
    model = fleet.load_inference_model(tmp_path / "m")
    assert model.manifest.static_because is None
    assert [(entry.name, entry.shape) for entry in model.inputs] == [("x", (None, 8))]
    assert trained.model is not None
    for rows in (1, 2, 5):
        x = torch.randn(rows, 8).double()
        expected = trained.model.eval()(x).detach()
        torch.testing.assert_close(model(x=x), expected, rtol=1e-12, atol=1e-12)


class Words(nn.Module):
    """Sentences with any number of words, and a feed without a batch dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, 4)
        self.out = nn.Linear(4, 2)

    def forward(self, ids: Tensor, weights: Tensor) -> Tensor:
        rows = self.embedding(ids) * weights
        out: Tensor = self.out(rows.sum(1) / ids.shape[1])
        return out


def test_variables_name_feeds_and_examples_fix_dynamic_sizes(tmp_path: Path) -> None:
    program, model = static.Program(), Words()
    with static.program_guard(program):
        ids = static.data("ids", [None, None], torch.int64)
        weights = static.data("input", [4])
        output = model(ids, weights)
    static.Executor().run(program.startup)
    with pytest.raises(
        ConfigError, match=r"feed ids: int64\[\?, \?\] has a dynamic size beside the"
    ):
        fleet.save_inference_model(tmp_path, [ids, weights], [output], program=program)
    feeds = {"ids": torch.zeros(2, 6, dtype=torch.int64), "input": torch.ones(4)}
    fleet.save_inference_model(tmp_path, feeds, output, program=program)
    loaded = fleet.load_inference_model(tmp_path)
    shapes = [(entry.name, entry.shape) for entry in loaded.inputs]
    assert shapes == [("ids", (None, 6)), ("input", (4,))]
    ids_now, weights_now = torch.randint(0, 9, (5, 6)), torch.rand(4)
    torch.testing.assert_close(loaded(ids_now, weights_now), model(ids_now, weights_now).detach())


def test_examples_match_the_feeds(trained: static.Program) -> None:
    examples, batched = examples_of(trained, ["y", "x"])
    assert {n: (tuple(e.shape), e.dtype) for n, e in examples.items()} == {
        "y": ((3,), torch.int64),
        "x": ((3, 8), torch.float64),
    }
    assert batched == ["y", "x"]


def test_missing_arguments_are_named(tmp_path: Path, trained: static.Program) -> None:
    with pytest.raises(ConfigError, match="expected the feeds and the fetches of the program"):
        fleet.save_inference_model(tmp_path, ["x"], program=trained)  # type: ignore[call-overload]
    with pytest.raises(ConfigError, match="got feeds and fetches without a static program"):
        fleet.save_inference_model(tmp_path, feeds=["x"], fetches=["y"])  # type: ignore[call-overload]


def test_rows_of_tables_are_exported_with_their_model(tmp_path: Path) -> None:
    model = nn.Sequential(fleet.nn.SparseEmbedding(4), nn.Flatten(), nn.Linear(8, 1))
    program = static.capture(model, None, None, {"ids": torch.zeros(3, 2, dtype=torch.int64)})
    with pytest.raises(PlanError, match=r"save_inference_model\(.*\) exports both"):
        inference_module(program, ["ids"], ["output"])
    with pytest.raises(PlanError, match="the rows of a SparseEmbedding are in a table of a job"):
        fleet.save_inference_model(tmp_path, ["ids"], ["output"], program=program)
