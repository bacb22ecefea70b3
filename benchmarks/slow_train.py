# SPDX-License-Identifier: Apache-2.0
"""One worker on a host with a slow link: it reduces or trains 25 million parameters.

Its role comes from torchrun's variables.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks import interleave, jobs
from benchmarks.models import CLASSES, checksum, mlp, stepper

#: 25,021,066 parameters in 26 tensors
WIDTHS = (784, *(1472,) * 12, CLASSES)
SYSTEMS = ("alone", "ddp", "fleetlight")
Step = Callable[[], object]


def main() -> None:
    """Join the others, work, report, leave."""
    options = _parse()
    os.environ.setdefault("FLEET_DEADLINE_S", "300")
    torch.set_num_threads(1)
    _join(options)
    if options.beside:
        beside(options)
    else:
        timed(options)
    _leave(options)


def timed(options: argparse.Namespace) -> None:
    """Some steps, what they took and what the host sent for them."""
    model, step = (reducing if options.task == "reduce" else training)(options, options.system)
    for _ in range(options.warmup):
        step()
    dist.barrier()
    sent, wall, cpu = sent_bytes(), time.perf_counter(), time.process_time()
    for _ in range(options.steps):
        step()
    spent = {"seconds": time.perf_counter() - wall, "cpu_seconds": time.process_time() - cpu}
    dist.barrier()
    sent = sent_bytes() - sent
    jobs.result(
        rank=dist.get_rank(),
        steps=options.steps,
        sent=sent,
        checksum=_checksum(model, options),
        **spent,
    )


def beside(options: argparse.Namespace) -> None:
    """The model trained together and, in turn, another one trained alone."""
    steps = {name: training(options, name)[1] for name in ("alone", options.system)}
    for step in steps.values():
        step()
    plays = {
        name: interleave.stepping(step, options.steps, dist.barrier) for name, step in steps.items()
    }
    rounds = interleave.interleave(plays, options.rounds, options.turns)
    jobs.result(rank=dist.get_rank(), rounds=rounds)


def reducing(options: argparse.Namespace, system: str) -> tuple[nn.Module, Step]:
    """A reduction of all gradients: backward has nothing to compute."""
    torch.manual_seed(0)
    plain = Known(mlp(WIDTHS), seed=1 + dist.get_rank())
    model, _ = _parallel(plain, torch.optim.SGD(plain.parameters(), lr=0.1), system)

    def step() -> None:
        plain.zero_grad()
        model(torch.zeros(1)).sum().backward()

    return plain, step


def training(options: argparse.Namespace, system: str) -> tuple[nn.Module, Step]:
    """A step of momentum SGD on a batch that is the same every time."""
    torch.manual_seed(0)
    plain = mlp(WIDTHS)
    own = torch.optim.SGD(plain.parameters(), lr=0.01, momentum=0.9)
    model, optimizer = _parallel(plain, own, system)
    random = torch.Generator().manual_seed(1 + dist.get_rank())
    x = torch.rand(options.batch, WIDTHS[0], generator=random)
    y = torch.randint(CLASSES, (options.batch,), generator=random)
    return plain, stepper(model, optimizer, [(x, y)])


class Known(nn.Module):
    """Parameters whose gradients are known before backward asks for them."""

    def __init__(self, model: nn.Module, seed: int) -> None:
        super().__init__()
        self.model = model
        random = torch.Generator().manual_seed(seed)
        self.known = [torch.randn(p.shape, generator=random) for p in model.parameters()]

    def forward(self, x: Tensor) -> Tensor:
        """Zero, which depends on all parameters."""
        zero: Tensor = _Given.apply(  # type: ignore[no-untyped-call]
            x, self.known, *self.model.parameters()
        )
        return zero


class _Given(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor, known: list[Tensor], *parameters: Tensor) -> Tensor:
        context.known = known
        return x.new_zeros(1)

    @staticmethod
    def backward(context: Any, *_: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *context.known


def _parallel(
    model: nn.Module, optimizer: torch.optim.Optimizer, system: str
) -> tuple[nn.Module, torch.optim.Optimizer]:
    if system == "alone":
        return model, optimizer
    if system == "ddp":
        return DistributedDataParallel(model, gradient_as_bucket_view=True), optimizer
    import fleetlight as fleet

    return fleet.distributed_model(model), fleet.distributed_optimizer(optimizer)


def _join(options: argparse.Namespace) -> None:
    if options.system == "fleetlight":
        import fleetlight as fleet

        strategy = fleet.DistributedStrategy(**json.loads(options.strategy))
        fleet.init(is_collective=True, strategy=strategy)
        return
    if others := [name for name in counters() if name != "lo"]:
        os.environ["GLOO_SOCKET_IFNAME"] = others[0]
    dist.init_process_group("gloo")


def _leave(options: argparse.Namespace) -> None:
    if options.system == "fleetlight":
        import fleetlight as fleet

        fleet.stop_worker()
    else:
        dist.destroy_process_group()


def _checksum(model: nn.Module, options: argparse.Namespace) -> float | None:
    """Of what should be the same on all workers."""
    if options.system == "alone":
        return None
    if options.task == "reduce":
        return checksum(p.grad for p in model.parameters() if p.grad is not None)
    if options.system == "fleetlight":
        import fleetlight as fleet

        # workers that trained alone average
        fleet.barrier_worker()
    return checksum(model.parameters())


def sent_bytes() -> int:
    """What this host has sent so far, by its interfaces' own counters."""
    return sum(sent for name, sent in counters().items() if name != "lo")


def counters() -> dict[str, int]:
    """Bytes sent by each interface; of this process's network, which /sys may not be."""
    rows = Path("/proc/self/net/dev").read_text().splitlines()[2:]
    named = (row.partition(":") for row in rows)
    return {name.strip(): int(fields.split()[8]) for name, _, fields in named}


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--system", choices=SYSTEMS, default="fleetlight")
    parser.add_argument("--task", choices=("reduce", "train"), default="train")
    parser.add_argument("--strategy", default="{}", help="settings of the strategy, as JSON")
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--beside", action="store_true", help="in turn with training alone")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--turns", type=int, default=20)
    return parser.parse_args()


if __name__ == "__main__":
    main()
