# SPDX-License-Identifier: Apache-2.0
"""The bytes that a host sends to others in a step, counted at its interface."""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from rig.hosts import hosts
from tests.rig.needed import NEEDED, run_on
from torch import Tensor, nn
from torch.nn import functional as F

import fleetlight as fleet
from fleetlight import static

pytestmark = NEEDED

WIDTH, LAYERS = 512, 4
MODEL_BYTES = 4 * LAYERS * (WIDTH * WIDTH + WIDTH)
#: the first steps exchange one-time facts, and buckets find their order
WARM, STEPS = 4, 4
#: TCP counts retransmissions in packets of an Ethernet without headers
SEGMENT = 1448

LEVELS: dict[str, Any] = {"use_hierarchical_allreduce": True}
LOCAL: dict[str, Any] = {"localsgd": True, "localsgd_configs": {"k_steps": 4, "begin_step": 0}}
DILOCO: dict[str, Any] = {"diloco": True, "diloco_configs": {"k_steps": 4, "begin_step": 0}}
ADAPTIVE: dict[str, Any] = {
    "adaptive_localsgd": True,
    "adaptive_localsgd_configs": {"init_k_steps": 4, "max_k_steps": 4, "begin_step": 0},
}
DGC: dict[str, Any] = {"dgc": True, "dgc_configs": {"sparsity": [0.99], "rampup_step": 1}}
#: consecutive workers are on different hosts
INTERLEAVED = (0, 1, 0, 1)
UNEQUAL = (0, 1, 2, 0, 1)


def sent() -> int:
    """The bytes that this worker's host has sent, without TCP retransmissions."""
    (line,) = re.findall(r"^ *cable\d+:(.*)$", Path("/proc/net/dev").read_text(), re.M)
    names, numbers = re.findall(r"^Tcp:(.*)$", Path("/proc/net/snmp").read_text(), re.M)
    tcp = dict(zip(names.split(), map(int, numbers.split()), strict=True))
    return int(line.split()[8]) - SEGMENT * tcp["RetransSegs"]


def eager_step(model: nn.Module, optimizer: Any) -> Callable[[Tensor], None]:
    """A function that makes an eager step with a batch."""

    def step(x: Tensor) -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    return step


def program_step(model: nn.Module, optimizer: Any) -> Callable[[Tensor], None]:
    """A function that makes a step with a program."""
    example = {"x": torch.zeros(2, WIDTH), "y": torch.zeros(2, WIDTH)}
    program = static.capture(model, F.mse_loss, optimizer, example)

    def step(x: Tensor) -> None:
        static.Executor().run(program, {"x": x, "y": example["y"]})

    return step


def train(settings: dict[str, Any], stepping: Any = eager_step) -> tuple[float, bytes]:
    """The bytes that the host sends in a step, in sizes of the model; the final parameters."""
    strategy = fleet.DistributedStrategy(**settings)
    torch.manual_seed(0)
    plain = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    model = fleet.distributed_model(plain)
    optimizer = fleet.distributed_optimizer(optimizer, strategy)
    torch.manual_seed(fleet.worker_index())
    make_step = stepping(model, optimizer)
    before = 0
    for step in range(WARM + STEPS):
        if step == WARM:
            fleet.all_reduce(0.0)
            before = sent()
        make_step(torch.randn(2, WIDTH))
    fleet.all_reduce(0.0)
    share = (sent() - before) / (MODEL_BYTES * STEPS)
    return share, b"".join(p.detach().numpy().tobytes() for p in plain.parameters())


def shares(
    places: Sequence[int], settings: dict[str, Any], stepping: Any = eager_step
) -> list[float]:
    """The bytes that the host of each worker sends; all must end with the same model."""
    with hosts(max(places) + 1) as rig:
        answers = run_on(rig, places, train, settings, stepping)
    assert len({parameters for _, parameters in answers}) == 1
    return [share for share, _ in answers]


def test_single_ring_sends_between_hosts_at_every_hop() -> None:
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
        pytest.param(UNEQUAL, LEVELS | {"compression": "topk"}, 0.02, 0.08, id="topk, three hosts"),
        pytest.param(INTERLEAVED, LEVELS | DGC, 0.01, 0.05, id="dgc"),
        pytest.param(INTERLEAVED, LEVELS | LOCAL, 0.25, 1.05 / 4, id="localsgd"),
        pytest.param(UNEQUAL, LEVELS | LOCAL, 0.3, 1.05 / 3, id="localsgd, three hosts"),
        pytest.param(INTERLEAVED, LEVELS | ADAPTIVE, 0.25, 1.05 / 4, id="adaptive localsgd"),
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
def test_hierarchical_all_reduce_sends_the_share_of_a_host(
    places: Sequence[int], settings: dict[str, Any], least: float, most: float
) -> None:
    for share in shares(places, settings):
        assert least <= share <= most


def test_program_sends_the_share_of_a_host() -> None:
    for share in shares(INTERLEAVED, LEVELS | {"compression": "int8"}, program_step):
        assert 0.25 <= share <= 1 / 3.5
