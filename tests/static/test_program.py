# SPDX-License-Identifier: Apache-2.0
"""A program can be printed, and runs for any of its fetches."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.errors import refuses
from tests.static.nets import accuracy, batch, captured, net
from torch import Tensor, nn

import fleetlight as fleet
from fleetlight import static
from fleetlight.errors import ConfigError, PlanError
from fleetlight.optim import Ftrl, Lamb, Lars, RowwiseAdagrad, RowwiseAdam
from fleetlight.static.graph.form import graph_of, has_effect
from fleetlight.static.inference import examples_of, inference_module
from fleetlight.static.passes import GradientMerge, SplitPS
from fleetlight.static.running.runners import EVERYTHING

pytestmark = pytest.mark.slow


def make_program() -> static.Program:
    model = net()
    return captured(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))


def test_the_summary_lists_feeds_state_and_fetches() -> None:
    summary = make_program().summary()
    assert "feeds      x: float64[?, 8], y: int64[?]" in summary
    assert "parameter  6 tensors" in summary
    assert "fetches    output, loss, accuracy" in summary


def test_every_operation_has_a_line() -> None:
    program = make_program()
    lines = str(program).splitlines()
    assert len(lines) == len(program.form.graph.nodes) + len(program.form.fetches)
    first, *_, last = lines
    assert first.split() == ["p_0_weight", "float64[12,", "8]", "parameter", "0.weight"]
    assert last.split() == ["mean", "fetch", "accuracy"]
    assert any("  float64[batch, 12]  addmm(p_0_bias, x, t)" in line for line in lines)


def test_columns_are_aligned_and_long_lists_are_short() -> None:
    lines = str(make_program()).splitlines()
    starts = {line.index("feed ") for line in lines if "  feed " in line}
    starts |= {line.index("parameter ") for line in lines if "  parameter " in line}
    assert len(starts) == 1
    assert any("[p_0_weight, p_0_bias, p_1_weight, p_1_bias and 2 more]" in line for line in lines)


def test_untrained_parameters_are_named() -> None:
    class Halves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused, self.seen = (nn.Linear(2, 2) for _ in range(3))
            self.many = nn.ParameterList(torch.zeros(1) for _ in range(8))

        def forward(self, x: Tensor) -> Tensor:
            self.looked_at = self.seen(x)
            return self.used(x)

    model = Halves()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    program = static.capture(model, torch.sum, optimizer, {"x": torch.ones(2, 2)})
    lines = program.summary().splitlines()
    [unused] = [line for line in lines if line.startswith("unused ")]
    assert unused == (
        "unused     unused.weight, unused.bias, many.0, many.1 and 6 more: the program does not "
        "read them, they do not change"
    )
    [seen] = [line for line in lines if line.startswith("untrained ")]
    assert seen == (
        "untrained  seen.weight, seen.bias: the loss does not depend on them, they do not change"
    )


def test_a_run_computes_only_fetches_and_state_changes() -> None:
    program = make_program()
    wanted = [(), ("loss",), ("accuracy", "loss", "output")]
    graphs = [graph_of(program.form, names, EVERYTHING) for names in wanted]
    sizes = [len(graph.nodes) for graph in graphs]
    assert sizes == sorted(sizes)
    assert sizes[0] < sizes[-1]
    assert len({sum(map(has_effect, graph.nodes)) for graph in graphs}) == 1


@pytest.mark.contract
def test_fetches_do_not_change_the_training() -> None:
    states = []
    for names in ([], ["output"], ["accuracy", "loss"]):
        model = net()
        program = captured(model, torch.optim.SGD(model.parameters(), lr=0.1))
        torch.manual_seed(7)
        assert len(static.Executor().run(program, batch(0), names)) == len(names)
        states.append(model.state_dict())
    for state in states[1:]:
        torch.testing.assert_close(state, states[0], rtol=0, atol=0)


def test_a_fetch_that_does_not_exist_is_named() -> None:
    with refuses(ConfigError, "fetch 'acuracy' is not one of this program:", "accuracy"):
        static.Executor().run(make_program(), batch(0), ["acuracy"])


def test_state_of_passes_survives_a_rebuilt_form() -> None:
    """The accumulated gradients, and the number of merged backwards."""
    with static.program_guard(static.Program(), static.Program()):
        x = static.data("x", [None, 8], "float64")
        model = net()
        output = model(x)
        static.minimize(torch.optim.SGD(model.parameters(), lr=0.1), output.square().mean())
        program = static.default_main_program()
        program.passes = (GradientMerge(3),)
        executor = static.Executor()
        executor.run(program.startup)
        executor.run(program, {"x": batch(0)["x"]})
        before = {s.name: s.tensor.clone() for s in program.state if s.kind == "gradient"}
        output.name = "out"
        after = {s.name: s.tensor for s in program.state if s.kind == "gradient"}
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    assert any(tensor.any() for tensor in after.values())
    assert [int(s.tensor) for s in program.state if s.kind == "schedule"] == [1]


def test_unknown_fetches_get_suggestions_from_user_names() -> None:
    program = make_program()
    with pytest.raises(ConfigError, match=r"known names: output, loss, accuracy, x, y$"):
        program.form.node("qqq")
    with pytest.raises(ConfigError, match="did you mean 'addmm"):
        program.form.node("addm")


def test_startup_of_an_initialised_program_does_nothing(tmp_path: Path) -> None:
    program, executor = make_program(), static.Executor()
    program.save(tmp_path / "program")
    loaded = static.load_program(tmp_path / "program")
    for one in (program, loaded, loaded.clone(), program.clone(for_test=True)):
        executor.run(one, batch(0), ["output"])
        before = [slot.tensor.clone() for slot in one.state]
        assert one.startup is not None
        assert executor.run(one.startup) == []
        executor.run(one, batch(0), ["output"] if one.form.late else [])
        assert len(before) == len(one.state)


def test_a_clone_needs_the_startup_program_of_its_origin() -> None:
    main = static.Program()
    with static.program_guard(main):
        out = nn.Linear(2, 2)(static.data("x", [None, 2]))
    feed, executor = {"x": torch.ones(1, 2)}, static.Executor()
    copies = [main.clone(), main.clone(for_test=True), main.apply()]
    for copy in copies:
        with pytest.raises(ConfigError, match="ran before its startup program"):
            executor.run(copy, feed, [out])
    executor.run(main.startup)
    for copy in (*copies, main.clone()):
        executor.run(copy, feed, [out])


def test_a_program_without_state_needs_no_startup() -> None:
    main = static.Program()
    with static.program_guard(main):
        out = static.data("x", [None, 2]).sum()
    assert static.Executor().run(main, {"x": torch.ones(1, 2)}, [out])[0] == 2


def test_programs_of_parameter_servers_are_not_saved_as_files(tmp_path: Path) -> None:
    program = make_program().apply(SplitPS())
    assert not program.form.lookups
    with pytest.raises(PlanError, match=r"^Program\.save: parameter servers make the steps"):
        program.save(tmp_path / "program")


# -- A captured step changes model and optimizer as the eager step does ---------------------------

OPTIMIZERS: list[tuple[Any, dict[str, Any]]] = [
    (torch.optim.Adam, {"lr": 0.01, "amsgrad": True}),
    (torch.optim.SGD, {"lr": 0.1}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    (torch.optim.AdamW, {"lr": 0.01}),
    (torch.optim.Adagrad, {"lr": 0.1, "lr_decay": 0.1, "initial_accumulator_value": 0.5}),
    (torch.optim.RMSprop, {"lr": 0.01, "momentum": 0.5, "centered": True}),
    (torch.optim.Adadelta, {"lr": 1.0}),
    (Lars, {"lr": 1.0, "lars_coeff": 0.1}),
    (Lamb, {"lr": 0.01}),
    (Ftrl, {"lr": 0.1, "l1": 0.01, "l2": 0.01}),
    (RowwiseAdagrad, {"lr": 0.1, "lr_decay": 0.1, "initial_accumulator_value": 0.5}),
    (RowwiseAdam, {"lr": 0.01, "weight_decay": 0.01}),
]


def eager(
    model: nn.Module, optimizer: torch.optim.Optimizer, given: dict[str, Tensor]
) -> tuple[Tensor, Tensor]:
    output = model(given["x"])
    loss = nn.functional.cross_entropy(output, given["y"])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach(), accuracy(output, given["y"])


@pytest.mark.parametrize(("kind", "options"), OPTIMIZERS)
def test_captured_steps_equal_eager_training(kind: Any, options: dict[str, Any]) -> None:
    """With dropout, running statistics, batches of all sizes and a schedule."""
    ours, theirs = net(), net()
    mine, other = (kind(model.parameters(), **options) for model in (ours, theirs))
    program, executor = captured(ours, mine), static.Executor()
    schedules = [torch.optim.lr_scheduler.ExponentialLR(o, 0.7) for o in (mine, other)]
    for number in range(6):
        torch.manual_seed(number)
        expected = eager(theirs, other, batch(number))
        torch.manual_seed(number)
        found = executor.run(program, batch(number), ["loss", "accuracy"])
        torch.testing.assert_close(found, list(expected), rtol=1e-9, atol=1e-9)
        for schedule in schedules:
            schedule.step()
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict(), rtol=1e-8, atol=1e-9)
    torch.testing.assert_close(
        mine.state_dict()["state"], other.state_dict()["state"], rtol=1e-6, atol=1e-8
    )


def test_captured_and_eager_steps_can_alternate() -> None:
    """The program uses the state of the live model and optimizer."""
    ours, theirs = net(), net()
    mine, other = (torch.optim.Adam(m.parameters(), lr=0.01) for m in (ours, theirs))
    program = captured(ours, mine)
    executor = static.Executor()
    for number in range(4):
        torch.manual_seed(number)
        eager(theirs, other, batch(number))
        torch.manual_seed(number)
        if number % 2:
            eager(ours, mine, batch(number))
        else:
            executor.run(program, batch(number))
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict(), rtol=1e-6, atol=1e-9)


def test_capturing_changes_nothing() -> None:
    model = net()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    batch(0)  # sets the seed
    rng = torch.get_rng_state()
    captured(model, torch.optim.Adam(model.parameters()))
    torch.testing.assert_close(dict(model.state_dict()), before, rtol=0, atol=0)
    assert torch.equal(torch.get_rng_state(), rng)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_frozen_and_unused_parameters_do_not_change() -> None:
    class Partly(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused, self.frozen = (nn.Linear(2, 2) for _ in range(3))
            self.frozen.requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            return self.used(self.frozen(x))

    model = Partly()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    given = {"x": torch.ones(3, 2), "y": torch.zeros(3, 2)}
    static.Executor().run(static.capture(model, nn.functional.mse_loss, optimizer, given), given)
    moved = {n for n, v in model.state_dict().items() if not torch.equal(v, before[n])}
    assert moved == {"used.weight", "used.bias"}


def test_each_param_group_has_its_own_rate() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    groups = [{"params": model[0].parameters(), "lr": 0.0}, {"params": model[1].parameters()}]
    optimizer = torch.optim.SGD(groups, lr=0.5)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    given = {"x": torch.ones(3, 2), "y": torch.zeros(3, 2)}
    static.Executor().run(static.capture(model, nn.functional.mse_loss, optimizer, given), given)
    moved = {n for n, v in model.state_dict().items() if not torch.equal(v, before[n])}
    assert moved == {"1.weight", "1.bias"}


def branches_on_values(output: Tensor, _: Tensor) -> Tensor:
    return output.sum() if output.sum() > 0 else -output.sum()


def loops_over_values(output: Tensor, _: Tensor) -> Tensor:
    return sum((output.sum() for _ in range(int(output.argmax()))), output.sum())


@pytest.mark.parametrize("loss", [branches_on_values, loops_over_values])
def test_control_flow_on_values_is_refused(loss: Any) -> None:
    model = nn.Linear(8, 3).double()
    with pytest.raises(PlanError, match=r"reads the values of its tensors .*torch\.where"):
        static.capture(model, loss, torch.optim.SGD(model.parameters(), lr=0.1), batch(0))


def test_unsupported_optimizers_are_refused() -> None:
    model = net()
    with pytest.raises(PlanError, match=r"got the optimizer NAdam, expected .* SGD, Adam, AdamW"):
        captured(model, torch.optim.NAdam(model.parameters()))
    with pytest.raises(PlanError, match=r"dampening=0\.1"):
        captured(model, torch.optim.SGD(model.parameters(), lr=1, momentum=0.9, dampening=0.1))
    with pytest.raises(PlanError, match=r"a parameter of shape \[12, 8\] that is not one of"):
        captured(model, torch.optim.SGD(net().parameters(), lr=0.1))


def test_a_fixed_batch_size_is_checked() -> None:
    """The loss reads the batch size, so the program is valid for that size."""
    model = nn.Linear(8, 3).double()

    def loss(output: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(output, labels, reduction="sum") / len(labels)

    program = static.capture(model, loss, torch.optim.SGD(model.parameters(), lr=0.1), batch(0))
    assert program.feeds["y"].shape == (16,)
    with pytest.raises(ConfigError, match=r"got the shape \[7, 8\], expected \[16, 8\]"):
        static.Executor().run(program, batch(1))


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "given", [(torch.zeros(2, 4),), torch.zeros(2, 4)], ids=["tuple", "tensor"]
)
def test_unnamed_inputs_are_refused(given: Any) -> None:
    with pytest.raises(ConfigError, match="expected a mapping of names to tensors"):
        static.capture(nn.Linear(4, 1), None, None, given)


# -- an exported program equals the evaluation of the program and does not need it ----------------


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
    with refuses(ConfigError, "feed ids: int64[?, ?] has a dynamic size beside the"):
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
