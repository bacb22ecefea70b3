# SPDX-License-Identifier: Apache-2.0
"""Compression by a strategy: covered parameters, and error feedback in checkpoints."""

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.collective.routes.test_exchange import hellos
from tests.errors import error_text
from tests.workers import descend, run_workers
from torch import nn
from torch.nn import functional as F

import fleetlight as fleet
from fleetlight.collective.codecs.forms.topk import TopK
from fleetlight.errors import PlanError, StrategyError
from fleetlight.fleet.job import current
from fleetlight.fleet.training import compression

pytestmark = pytest.mark.multiprocess


def prepared(**settings: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3))
    model = fleet.distributed_model(plain)
    strategy = fleet.DistributedStrategy(shared_memory=False, **settings)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return model, fleet.distributed_optimizer(optimizer, strategy)


def steps(model: nn.Module, optimizer: Any, first: int, last: int) -> None:
    for step in range(first, last):
        generator = torch.Generator().manual_seed(10 * step + fleet.worker_index())
        x = torch.randn(8, 6, generator=generator)
        descend(optimizer, F.cross_entropy(model(x), torch.arange(8) % 3))


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def compressed(kind: str, **configs: Any) -> dict[str, Any]:
    return {"compression": kind, "compression_configs": {"min_size": 1, **configs}}


def coded_names(settings: dict[str, Any]) -> Any:
    model, optimizer = prepared(**settings)
    steps(model, optimizer, 0, 4)
    [compression] = current().compressions.values()
    return flat(model), sorted(compression.residuals.state())


@pytest.mark.parametrize(
    ("settings", "residual", "tolerance"),
    [
        (compressed("int8"), ["owed/0.weight", "owed/2.weight"], 5e-3),
        (compressed("topk", ratio=0.5), ["owed/0.weight", "owed/2.weight"], 0.2),
        (compressed("int8", exclude=["2"], error_feedback=False), [], 1e-2),
        (compressed("int8", min_size=40), ["owed/0.weight"], 5e-3),
    ],
    ids=["int8", "topk", "without_feedback", "min_size"],
)
def test_workers_are_equal_and_near_the_exact_result(
    settings: dict[str, Any], residual: list[str], tolerance: float
) -> None:
    [(exact, _), _] = run_workers(exactly)
    for end, names in run_workers(coded_names, 2, settings):
        assert names == residual
        assert not torch.equal(end, exact)
        torch.testing.assert_close(end, exact, rtol=0, atol=tolerance)


def exactly() -> Any:
    model, optimizer = prepared()
    steps(model, optimizer, 0, 4)
    assert not current().compressions
    return flat(model), None


def unknown_name() -> str:
    model, optimizer = prepared(**compressed("topk", exclude=["1.weight"]))
    return error_text(StrategyError, steps, model, optimizer, 0, 1)


def test_unknown_excluded_name_is_refused() -> None:
    for text in run_workers(unknown_name):
        assert text.startswith("exclude: the model has no parameter or module '1.weight'")


def save_and_continue(folder: Path) -> torch.Tensor:
    model, optimizer = prepared(**compressed("topk", ratio=0.1))
    steps(model, optimizer, 0, 3)
    fleet.save_persistables(folder)
    steps(model, optimizer, 3, 6)
    return flat(model)


def load_and_continue(folder: Path, drops: bool = False) -> tuple[torch.Tensor, list[str]]:
    messages: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("fleetlight").addHandler(handler)
    model, optimizer = prepared(**compressed("topk", ratio=0.1))
    fleet.load_persistables(folder)
    if drops:
        [compression] = current().compressions.values()
        compression.residuals.load({})
    steps(model, optimizer, 3, 6)
    return flat(model), [text for text in messages if "dropped" in text]


def test_checkpoint_keeps_error_feedback_for_equal_worker_numbers(tmp_path: Path) -> None:
    continued = run_workers(save_and_continue, 2, tmp_path)[0]
    for end, warnings in run_workers(load_and_continue, 2, tmp_path):
        assert torch.equal(end, continued)
        assert warnings == []
    # dropping the feedback changes the result
    assert not torch.equal(run_workers(load_and_continue, 2, tmp_path, True)[0][0], continued)
    # feedback belongs to one worker
    first, *others = [warnings for _, warnings in run_workers(load_and_continue, 3, tmp_path)]
    what = "the error feedback of the checkpoint is dropped: it is of 2 workers"
    assert first == [f"{what}, and this job has 3"]
    assert others == [[], []]


class Workers(SimpleNamespace):
    """Stands for a group of four workers on two hosts."""

    def __init__(self, index: int) -> None:
        super().__init__(index=index, size=4, alone=False, hellos=hellos([0, 0, 1, 1]))


def context_of(index: int, **settings: Any) -> Any:
    model = nn.Linear(3, 2)
    workers = Workers(index)
    return SimpleNamespace(
        group=workers,
        dense_group=workers,
        collective_group=workers,
        strategy=fleet.DistributedStrategy(**settings),
        models=[SimpleNamespace(module=model)],
        compressions={},
    )


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("index", "is_sender"), [(2, True), (1, False)])
def test_worker_that_no_longer_sends_drops_its_feedback(
    index: int, is_sender: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(logging.getLogger("fleetlight"), "propagate", True)
    kept = {"0/owed/weight": torch.ones(6)}
    for levels in (False, True):
        caplog.clear()
        context = context_of(index, compression="topk", use_hierarchical_allreduce=levels)
        compression.load_feedback(context, kept, workers=4)
        [made] = context.compressions.values()
        assert ("owed/weight" in made.residuals.state()) is (is_sender or not levels)
        assert ("another worker sends its" in caplog.text) is (levels and not is_sender)


def test_dgc_with_servers_is_refused() -> None:
    context = context_of(0, dgc=True)
    context.collective_group = None
    assert compression.compression_of(context, context.models[0].module) is None
    context = context_of(0, compression="topk", a_sync_configs={"dense": "allreduce"})
    context.collective_group = None
    found = compression.compression_of(context, context.models[0].module)
    assert found is not None
    assert isinstance(found.codec, TopK)


def scaled(enabled: bool) -> str:
    model, optimizer = prepared(**compressed("int8"))
    scaler = torch.amp.GradScaler("cpu", enabled=enabled)
    try:
        scaler.scale(F.cross_entropy(model(torch.ones(8, 6)), torch.arange(8) % 3)).backward()
        scaler.step(optimizer)
    except PlanError as error:
        return str(error)
    return ""


def test_loss_scaler_changes_the_unit_of_the_feedback() -> None:
    for messages in run_workers(scaled, 2, True):
        assert "a GradScaler steps the optimizer" in messages
        assert "compute in bfloat16" in messages
    assert run_workers(scaled, 2, False) == ["", ""]


def adversaries() -> tuple[int, int, torch.Tensor]:
    """How often workers agreed on the second model: in alternation, and after a layer froze."""
    first, optimizer = prepared(**compressed("int8"))
    second = fleet.distributed_model(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1)))
    other = fleet.distributed_optimizer(torch.optim.SGD(second.parameters(), lr=0.1))
    plan = current().models[1]
    agreed: list[int] = []
    again = plan.rebuild_replica
    plan.rebuild_replica = lambda: (agreed.append(1), again())[1]  # type: ignore[method-assign,func-returns-value]
    generator = torch.Generator().manual_seed(fleet.worker_index())
    for _ in range(5):
        x = torch.randn(8, 6, generator=generator)
        second.requires_grad_(False)
        second(first(x)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        second.requires_grad_()
        second(first(x).detach()).square().mean().backward()
        other.step()
        other.zero_grad()
    in_turns = len(agreed)
    second[0].requires_grad_(False)
    second(torch.ones(2, 3))
    return in_turns, len(agreed), torch.cat([flat(first), flat(second)])


def test_alternating_models_are_agreed_on_once() -> None:
    results = run_workers(adversaries)
    for in_turns, frozen, end in results:
        assert (in_turns, frozen) == (0, 1)
        assert torch.equal(end, results[0][2])
