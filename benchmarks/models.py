# SPDX-License-Identifier: Apache-2.0
"""The timed models, small ones and ResNet-50, and workers that train them in several ways."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from benchmarks import interleave, jobs

CLASSES = 10


def mlp(widths: tuple[int, ...] = (784, 128, 128, CLASSES)) -> nn.Sequential:
    """Linear layers with tanh between them."""
    layers: list[nn.Module] = [nn.Flatten()]
    for fan_in, fan_out in itertools.pairwise(widths):
        layers += [nn.Linear(fan_in, fan_out), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


class Bottleneck(nn.Module):
    """1x1, 3x3, 1x1 convolutions beside a shortcut; the 3x3 one carries the stride."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        out = 4 * width
        self.body = nn.Sequential(
            *_convolution(channels, width, 1), nn.ReLU(inplace=True),
            *_convolution(width, width, 3, stride), nn.ReLU(inplace=True),
            *_convolution(width, out, 1),
        )  # fmt: skip
        same = channels == out and stride == 1
        self.shortcut: nn.Module = nn.Identity()
        if not same:
            self.shortcut = nn.Sequential(*_convolution(channels, out, 1, stride))

    def forward(self, x: Tensor) -> Tensor:
        """The block's output."""
        return functional.relu(self.body(x) + self.shortcut(x))


def resnet50() -> nn.Sequential:
    """ResNet-50 for images of any size from 32x32 up."""
    layers: list[nn.Module] = [*_convolution(3, 64, 7, 2), nn.ReLU(inplace=True)]
    layers.append(nn.MaxPool2d(3, 2, 1))
    channels = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            stride = 2 if block == 0 and width > 64 else 1
            layers.append(Bottleneck(channels, width, stride))
            channels = 4 * width
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, CLASSES))
    return nn.Sequential(*layers, *head)


def _convolution(fan_in: int, fan_out: int, size: int, stride: int = 1) -> tuple[nn.Module, ...]:
    weights = nn.Conv2d(fan_in, fan_out, size, stride, size // 2, bias=False)
    return weights, nn.BatchNorm2d(fan_out)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    """Adam at its usual rate."""
    return torch.optim.Adam(model.parameters(), lr=1e-3)


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    """SGD with momentum 0.9."""
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


Batches = list[tuple[Tensor, Tensor]]


@dataclasses.dataclass(frozen=True)
class Workload:
    """A model, its optimizer, and one worker's batch of synthetic data."""

    title: str
    model: Callable[[], nn.Module]
    optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    shape: tuple[int, ...]
    batch: int
    #: turns a round, and steps a turn: short turns, so that all variants see the same load
    turns: tuple[int, int]
    classes: int = CLASSES

    def batches(self, count: int, seed: int) -> Batches:
        """`count` batches, the same for the same seed."""
        random = torch.Generator().manual_seed(seed)
        return [
            (
                torch.rand(self.batch, *self.shape, generator=random),
                torch.randint(self.classes, (self.batch,), generator=random),
            )
            for _ in range(count)
        ]


IMAGES, LARGE = (3, 32, 32), (3, 224, 224)
WORKLOADS = {
    "mlp": Workload("MLP 784-128-128-10, batch 64, Adam", mlp, adam, (1, 28, 28), 64, (40, 25)),
    "mlp8": Workload(
        "MLP of 8 layers of 128, batch 16, Adam",
        lambda: mlp((128,) * 8 + (CLASSES,)),
        adam,
        (128,),
        16,
        (40, 25),
    ),
    "tiny": Workload(
        "MLP 32-64-64-2, batch 32, momentum",
        lambda: mlp((32, 64, 64, 2)),
        momentum,
        (32,),
        32,
        (20, 40),
        2,
    ),
    "mnist": Workload("MLP 784-128-128-10, batch 8, Adam", mlp, adam, (1, 28, 28), 8, (20, 30)),
    "resnet50": Workload(
        "ResNet-50, 32x32, batch 8, momentum", resnet50, momentum, IMAGES, 8, (4, 2)
    ),
    "resnet50_224": Workload(
        "ResNet-50, 224x224, batch 8, momentum", resnet50, momentum, LARGE, 8, (2, 1)
    ),
}


# -- variants of one model, trained in turn by the same Gloo processes


@dataclasses.dataclass(frozen=True)
class Variant:
    """A model being trained: its step, and what it cost to make ready, in CPU seconds."""

    model: nn.Module
    step: Callable[[], object]
    prepared_s: float = 0.0


MakeVariant = Callable[[Workload, Batches], Variant]


def stepper(
    model: nn.Module, optimizer: torch.optim.Optimizer, batches: Batches
) -> Callable[[], object]:
    """A step with the next batch."""

    def step() -> None:
        x, y = next_batch(batches)
        loss = functional.cross_entropy(model(x), y)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()

    return step


def next_batch(batches: Batches) -> tuple[Tensor, Tensor]:
    """Each comes again when all were used."""
    batches.append(batches.pop(0))
    return batches[-1]


def add_options(
    parser: argparse.ArgumentParser, workloads: Sequence[str], variants: Sequence[str]
) -> None:
    """What to train, and how."""
    add = parser.add_argument
    add("--workloads", nargs="+", choices=WORKLOADS, default=list(workloads))
    add("--variants", nargs="+", choices=variants, default=list(variants), help="the first is 1.0")
    add("--deadline_s", type=float, default=1800.0, help="for each workload")
    add("--worker", choices=WORKLOADS, help=argparse.SUPPRESS)


def measure(
    program: str, name: str, processes: int, options: argparse.Namespace
) -> list[dict[str, Any]]:
    """The results of the workers of one workload, by rank."""
    argv = [sys.executable, "-m", f"benchmarks.{program}", "--worker", name]
    argv += ["--rounds", str(options.rounds), "--variants", *options.variants]
    argv += ["--quick"] * options.quick
    job = jobs.Job(name, jobs.workers(argv, processes), processes, options.deadline_s)
    found = sorted(jobs.run(job).results, key=lambda result: int(result["rank"]))
    if any(one["parameters"] != found[0]["parameters"] for one in found):
        raise jobs.BenchmarkError(f"the workers' parameters differ: {found}")
    return found


def work(
    options: argparse.Namespace,
    made: Mapping[str, MakeVariant],
    with_fleet: bool,
    warm_up: Callable[[], object] = lambda: None,
) -> None:
    """One of the workers: trains all variants in turn."""
    torch.set_num_threads(1)
    if with_fleet:
        import fleetlight as fleet

        fleet.init(is_collective=True)
        warm_up()
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    workload = WORKLOADS[options.worker]
    variants = {name: _variant(workload, made[name]) for name in options.variants}
    first = {name: _first_steps(variant.step) for name, variant in variants.items()}
    turns, steps = (1, 2) if options.quick else workload.turns
    plays = {n: interleave.stepping(v.step, steps, dist.barrier) for n, v in variants.items()}
    interleave.interleave(plays, 1, 1)  # to warm up
    rounds = interleave.interleave(plays, 1 if options.quick else options.rounds, turns)
    jobs.result(
        rank=dist.get_rank(),
        rounds=rounds,
        parameters={
            name: checksum(variant.model.parameters()) for name, variant in variants.items()
        },
        prepared={name: (v.prepared_s, first[name]) for name, v in variants.items()},
    )
    dist.barrier()


def _variant(workload: Workload, made: MakeVariant) -> Variant:
    """A fresh model, the same on all workers, with batches of this worker."""
    torch.manual_seed(0)
    return made(workload, workload.batches(8, seed=1 + dist.get_rank()))


def _first_steps(step: Callable[[], object]) -> float:
    """CPU seconds of two steps: what is compiled is compiled in them."""
    dist.barrier()
    began = time.process_time()
    step()
    step()
    return time.process_time() - began


def checksum(tensors: Iterable[Tensor]) -> float:
    """Of what should be the same on all workers."""
    return float(sum(tensor.detach().double().abs().sum() for tensor in tensors))
