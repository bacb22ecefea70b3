# SPDX-License-Identifier: Apache-2.0
"""Steps of a single process."""

from typing import Any

import pytest
import torch
from tests.errors import refuses
from tests.static.nets import batch, captured, net

from fleetlight import static
from fleetlight.errors import ConfigError
from fleetlight.static.passes import GradientMerge
from fleetlight.static.running.devices import place_of


@pytest.mark.slow
def test_a_schedule_may_step_before_merged_gradients() -> None:
    """torch warns of schedules that step before their optimizer, and warnings are errors."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    program = captured(model, optimizer)
    program.passes = (GradientMerge(3, True),)
    static.Executor().run(program, batch(0))
    schedule.step()
    assert optimizer.param_groups[0]["lr"] == 0.05


# -- A place has many spellings; one that this machine lacks is an error --------------------------


@pytest.mark.parametrize("place", ["cpu", torch.device("cpu")])
def test_cpu_places_are_accepted(place: Any) -> None:
    assert place_of(place) == torch.device("cpu")


@pytest.mark.parametrize("place", ["gpu", "cuda", 0, "gpu:1", 1, torch.device("cuda:1")])
def test_gpu_places_are_accepted(place: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert place_of(place).type == "cuda"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"^Executor: got the place .*, but torch sees no GPU on"):
        place_of(place)


def test_a_missing_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with refuses(ConfigError, "Executor: got the place 2, expected a GPU from 0 to 1:"):
        place_of(2)


def test_a_misspelt_place_is_quoted() -> None:
    with pytest.raises(ConfigError, match="got the place 'gpuu', expected"):
        place_of("gpuu")


@pytest.mark.parametrize("place", [None, "moon", True, -1, 1.5, object()])
def test_other_values_are_refused(place: Any) -> None:
    with pytest.raises(ConfigError, match=r"^Executor: got the place .*, expected 'cpu', 'cuda', "):
        place_of(place)
