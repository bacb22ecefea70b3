# SPDX-License-Identifier: Apache-2.0
"""A program can be printed, and runs for any of its fetches."""

from pathlib import Path

import pytest
import torch
from tests.static.nets import batch, captured, net
from torch import Tensor, nn

from fleetlight import static
from fleetlight.errors import ConfigError, PlanError
from fleetlight.static.graph.form import graph_of, has_effect
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
    with pytest.raises(
        ConfigError, match=r"fetch 'acuracy' is not one of this program: .*accuracy"
    ):
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
