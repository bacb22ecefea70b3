# SPDX-License-Identifier: Apache-2.0
"""Modules that recompute their activations in backward: equal numbers in less memory."""

import pytest
import torch
from tests.static.nets import batch, captured
from tests.static.peak_memory import peak_bytes
from torch import Tensor, nn

from fleetlight import static
from fleetlight.errors import PlanError
from fleetlight.static.graph.form import graph_of
from fleetlight.static.passes import Recompute
from fleetlight.static.running.runners import EVERYTHING

pytestmark = pytest.mark.slow

BLOCKS = ("1", "2", "3", "4", "5")


def block() -> nn.Module:
    """With operations in place, and with everything that must not run twice."""
    return nn.Sequential(
        *(nn.Linear(32, 32), nn.BatchNorm1d(32), nn.ReLU(inplace=True)),
        *(nn.Linear(32, 32), nn.Dropout(0.2, inplace=True), nn.Tanh(), nn.Linear(32, 32)),
    )


def deep() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), *[block() for _ in BLOCKS], nn.Linear(32, 3)).double()


class RepeatedBlock(nn.Module):
    """One block that is called several times on its own output."""

    def __init__(self, times: int = 6) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.enter, self.block, self.leave = nn.Linear(8, 32), block(), nn.Linear(32, 3)
        self.times = times
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for _ in range(self.times):
            x = x + self.block(x)
        return self.leave(x)


class Recurrent(nn.Module):
    """Its gates are slices of one tensor."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net, self.leave = nn.LSTM(4, 6, batch_first=True), nn.Linear(6, 3)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(self.net(x.reshape(-1, 2, 4))[0][:, -1])


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
        self.leave = nn.Linear(4, 3)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(self.layer(x.reshape(-1, 2, 4)).mean(1))


def trained(model: nn.Module, names: tuple[str, ...]) -> tuple[static.Program, list[Tensor]]:
    """Three steps; returns the fetched values and the final state."""
    program = captured(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    if names:
        program.passes = (Recompute(names),)
    found = []
    executor = static.Executor()
    for number in range(3):
        given = batch(number)
        torch.manual_seed(number)
        found += executor.run(program, given, ["loss", "output"])
    return program, [*found, *(slot.tensor for slot in program.state)]


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        (deep, BLOCKS),
        pytest.param(deep, ("2.0", "2.1", "2.2", "4"), marks=pytest.mark.long),
        pytest.param(deep, ("",), marks=pytest.mark.long),
        pytest.param(RepeatedBlock, ("block",), marks=pytest.mark.long),
        (RepeatedBlock, ("block.0", "block.4", "enter")),
        (Recurrent, ("net",)),
        (Attention, ("layer",)),
        pytest.param(Attention, ("layer.self_attn", "layer.linear1"), marks=pytest.mark.long),
    ],
)
def test_recompute_changes_no_bit_of_the_results(kind: type[nn.Module], names: tuple[str]) -> None:
    """With dropout, with statistics that must count a batch once, and in place."""
    _, expected = trained(kind(), ())
    program, found = trained(kind(), names)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert "again in backward" in program.explain()
    assert "compute 0 operations" not in program.explain()


def memory(kind: type[nn.Module], names: tuple[str, ...]) -> int:
    form = trained(kind(), names)[0].form
    torch.manual_seed(0)
    return peak_bytes(form, [torch.randn(256, 8).double(), torch.randint(0, 3, (256,))])


@pytest.mark.long
def test_recompute_needs_less_memory() -> None:
    whole = memory(deep, ())  # type: ignore[arg-type]
    assert memory(deep, BLOCKS) < 0.6 * whole  # type: ignore[arg-type]
    # one region as large as the model saves nothing
    assert memory(deep, ("",)) == whole  # type: ignore[arg-type]


@pytest.mark.long
def test_each_call_of_a_module_is_recomputed_separately() -> None:
    assert memory(RepeatedBlock, ("block",)) < 0.6 * memory(RepeatedBlock, ())


def test_random_numbers_and_statistics_are_not_recomputed() -> None:
    program, _ = trained(deep(), BLOCKS)
    plain, _ = trained(deep(), ())
    for target in (torch.ops.aten.bernoulli_.float, torch.ops.aten.add_.Tensor):
        counts = [
            sum(n.target is target for n in graph_of(p.form, [], EVERYTHING).nodes)
            for p in (plain, program)
        ]
        assert counts[0] == counts[1] > 0
    statistics = [
        node.args[3:5]
        for node in program.form.graph.nodes
        if node.target is torch.ops.aten.native_batch_norm.default
        and node.meta["part"] == "backward"
    ]
    assert statistics == [(None, None)] * len(BLOCKS)
    assert f"keep {len(BLOCKS)} values that must not be computed twice" in program.explain()


class Shifted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(self.inner(torch.cos(x)))


class ChangesInput(nn.Module):
    """The input of a module changes after the call."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.shifted, self.last = nn.Linear(8, 8), Shifted(), nn.Linear(8, 8)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        y = self.shifted(x.detach())
        x.detach().mul_(3)
        return self.last(y + x.detach())


def test_values_read_from_a_changed_input_are_kept() -> None:
    _, expected = trained(ChangesInput(), ())
    program, found = trained(ChangesInput(), ("shifted",))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert "keep 1 values" in program.explain()


def test_a_module_that_does_not_exist_is_named() -> None:
    with pytest.raises(
        PlanError, match=r"checkpoints: no module 'blok' computes a value .*'block'"
    ):
        trained(RepeatedBlock(), ("blok",))


def test_a_program_without_training_accepts_recompute() -> None:
    program, _ = trained(deep(), ())
    test = program.clone(for_test=True)
    again = test.apply(Recompute(BLOCKS))
    given = {"x": batch(0)["x"]}
    for one, other in zip(
        static.Executor().run(test, given, ["output"]),
        static.Executor().run(again, given, ["output"]),
        strict=True,
    ):
        assert torch.equal(one, other)
