# SPDX-License-Identifier: Apache-2.0
"""A program can be read, and runs for any of its fetches."""

from __future__ import annotations

import pytest
import torch
from tests.static.nets import batch, captured, net

from fleetlight import static
from fleetlight.errors import ConfigError
from fleetlight.static.form import code_of, has_effect
from fleetlight.static.runners import EVERYTHING


def made() -> static.Program:
    model = net()
    return captured(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))


def test_its_summary_says_what_it_takes_keeps_and_gives() -> None:
    told = made().summary()
    assert "feeds      x: float64[?, 8], y: int64[?]" in told
    assert "parameter  6 tensors" in told
    assert "fetches    output, loss, accuracy" in told


def test_every_operation_has_a_line() -> None:
    program = made()
    lines = str(program).splitlines()
    assert len(lines) == len(program.form.graph.nodes) + len(program.form.fetches)
    assert any(line.endswith("= parameter 0.weight: float64[12, 8]") for line in lines)
    assert any("= addmm(" in line for line in lines)


def test_it_computes_only_what_is_fetched_and_what_changes_the_state() -> None:
    program = made()
    wanted = [(), ("loss",), ("accuracy", "loss", "output")]
    graphs = [code_of(program.form, names, EVERYTHING).graph for names in wanted]
    sizes = [len(graph.nodes) for graph in graphs]
    assert sizes == sorted(sizes)
    assert sizes[0] < sizes[-1]
    assert len({sum(map(has_effect, graph.nodes)) for graph in graphs}) == 1


def test_every_fetch_set_trains_alike() -> None:
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
        static.Executor().run(made(), batch(0), ["acuracy"])
