# SPDX-License-Identifier: Apache-2.0
"""What a host sends to the others in a step, counted at its cable."""

from __future__ import annotations

import pathlib
import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from rig.hosts import hosts
from tests.rig.needed import NEEDED, run_on
from torch import nn

import fleetlight as fleet

pytestmark = NEEDED

WIDTH, LAYERS = 512, 4
MODEL_BYTES = 4 * LAYERS * (WIDTH * WIDTH + WIDTH)
#: the first ones say what else is to be said once, and buckets find their order
WARM, STEPS = 4, 4

LEVELS: dict[str, Any] = {"use_hierarchical_allreduce": True}
LOCAL: dict[str, Any] = {"localsgd": True, "localsgd_configs": {"k_steps": 4, "begin_step": 0}}
DILOCO: dict[str, Any] = {"diloco": True, "diloco_configs": {"k_steps": 4, "begin_step": 0}}
DGC: dict[str, Any] = {"dgc": True, "dgc_configs": {"sparsity": [0.99], "rampup_step": 1}}
#: neighbours in the order of the workers are on different hosts
INTERLEAVED = (0, 1, 0, 1)
UNEQUAL = (0, 1, 2, 0, 1)


def sent() -> int:
    """What this worker's host has sent."""
    (line,) = re.findall(r"^ *cable\d+:(.*)$", pathlib.Path("/proc/net/dev").read_text(), re.M)
    return int(line.split()[8])


def train(settings: dict[str, Any]) -> tuple[float, bytes]:
    """How many times the model its host sends in a step; the parameters in the end."""
    strategy = fleet.DistributedStrategy(**settings)
    torch.manual_seed(0)
    plain = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    model = fleet.distributed_model(plain)
    optimizer = fleet.distributed_optimizer(optimizer, strategy)
    torch.manual_seed(fleet.worker_index())
    before = 0
    for step in range(WARM + STEPS):
        if step == WARM:
            fleet.all_reduce(0.0)
            before = sent()
        optimizer.zero_grad()
        model(torch.randn(2, WIDTH)).square().mean().backward()
        optimizer.step()
    fleet.all_reduce(0.0)
    share = (sent() - before) / (MODEL_BYTES * STEPS)
    return share, b"".join(p.detach().numpy().tobytes() for p in plain.parameters())


def shares(places: Sequence[int], settings: dict[str, Any]) -> list[float]:
    """What the host of each worker sends; all must have the same model in the end."""
    with hosts(max(places) + 1) as rig:
        answers = run_on(rig, places, train, settings)
    assert len({parameters for _, parameters in answers}) == 1
    return [share for share, _ in answers]


def test_one_ring_of_all_workers_crosses_with_every_step() -> None:
    assert min(shares(INTERLEAVED, {})) > 2.9


@pytest.mark.parametrize(
    ("places", "settings", "least", "most"),
    [
        pytest.param(INTERLEAVED, LEVELS, 1.0, 1.05, id="levels, interleaved"),
        pytest.param(UNEQUAL, LEVELS, 1.2, 1.05 * 4 / 3, id="levels, three unequal hosts"),
        pytest.param(INTERLEAVED, LEVELS | {"compression": "bf16"}, 0.5, 0.525, id="bf16"),
        pytest.param(INTERLEAVED, LEVELS | {"compression": "int8"}, 0.25, 1 / 3.5, id="int8"),
        pytest.param(
            UNEQUAL, LEVELS | {"compression": "int8"}, 0.3, 4 / 3 / 3.5, id="int8, three hosts"
        ),
        pytest.param(INTERLEAVED, LEVELS | {"compression": "topk"}, 0.01, 0.05, id="topk"),
        pytest.param(INTERLEAVED, LEVELS | DGC, 0.01, 0.05, id="dgc"),
        pytest.param(INTERLEAVED, LEVELS | LOCAL, 0.25, 1.05 / 4, id="localsgd"),
        pytest.param(INTERLEAVED, LEVELS | DILOCO, 0.25, 1.05 / 4, id="diloco"),
        pytest.param(
            INTERLEAVED,
            LEVELS | LOCAL | {"compression": "int8"},
            0.0625,
            1 / 3.5 / 4 * 1.05,
            id="localsgd and int8",
        ),
    ],
)
def test_a_host_sends_its_share(
    places: Sequence[int], settings: dict[str, Any], least: float, most: float
) -> None:
    for share in shares(places, settings):
        assert least <= share <= most
