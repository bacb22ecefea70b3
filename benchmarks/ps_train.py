# SPDX-License-Identifier: Apache-2.0
"""One process of a timed job: plain torch, or a worker or server of Fleetlight.

Its role comes from the environment. With `--profile FILE` the timed part is profiled.
"""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import inspect
import os
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.utils.data import DataLoader

from benchmarks.figures_switch import FiguresSwitch
from benchmarks.peers import ps_timed
from benchmarks.ps_models import MODELS, Bags
from benchmarks.turns import Counter

Batch = tuple[Tensor, ...]
#: makes so many steps and returns the last loss
Drive = Callable[[Iterator[Batch], int], float]


def main() -> None:
    """Train, report, leave."""
    options = _parse()
    os.environ.setdefault("FLEET_DEADLINE_S", "120")
    if options.core is not None:
        os.sched_setaffinity(0, {_cores()[options.core]})
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if options.figures_switch is not None:
        FiguresSwitch(options.figures_switch).install()
    {"torch": plain_torch}.get(options.system, fleetlight)(options)


def plain_torch(options: argparse.Namespace) -> None:
    """One process, no fleet."""
    model = MODELS[options.model](Bags)
    optimizer = torch.optim.SGD(model.parameters(), lr=ps_timed.LR)
    train(options, _step(model, optimizer), _batches(options.model, 0), 0, _nothing, _nothing)


def fleetlight(options: argparse.Namespace) -> None:
    """Fleetlight, eager or by a static program: a server serves, a worker trains."""
    import fleetlight as fleet
    from fleetlight.strategy.config_dicts import ASyncConfigsDict

    configs: ASyncConfigsDict = {"k_steps": options.k_steps} if options.mode == "geo" else {}
    if options.staleness is not None:
        configs["staleness"] = options.staleness
    if options.table_wire != "fp32":  # earlier versions do not have it
        configs["table_wire"] = options.table_wire
    strategy = fleet.DistributedStrategy(
        a_sync=options.mode != "sync",
        a_sync_configs=configs,
        durability=options.durability,
        durability_configs={"snapshot_s": options.snapshot_s},
        ssl=options.ssl,
        shared_memory=options.shared_memory,
    )
    fleet.init(strategy=strategy)
    plain = MODELS[options.model](lambda rows, dim: fleet.nn.SparseEmbedding(dim))
    optimizer = torch.optim.SGD(plain.parameters(), lr=ps_timed.LR)
    optimizer = fleet.distributed_optimizer(optimizer)
    program = Program(plain, optimizer, options.model) if options.system == "static" else None
    step = program.step if program else _step(fleet.distributed_model(plain), optimizer)
    if fleet.is_server():
        ps_timed.announce_server()
        fleet.init_server()
        fleet.run_server()
        return
    fleet.init_worker()
    rank = fleet.worker_index()
    data = _batches(options.model, rank)
    batches: Iterable[Batch] = data
    if options.lookahead:
        batches = fleet.shard(DataLoader(data, batch_size=1, collate_fn=_first))  # type: ignore[arg-type]
    # all begin together; a barrier at the end leaves nothing in a queue
    train(
        options,
        step,
        batches,
        rank,
        lambda: fleet.all_reduce(1),
        fleet.barrier_worker,
        _several(options.steps_per_call, step, program),
    )
    fleet.stop_worker()


def _several(steps: int, step: Callable[..., float], program: Program | None) -> Drive | None:
    """Makes the steps of a call, several a call; None: one a call."""
    import fleetlight as fleet

    if steps == 1:
        return None
    if program is not None:
        return program.steps

    def eager(batches: Iterator[Batch], count: int) -> float:
        last: float | None = fleet.run_steps(lambda batch: step(*batch), batches, count).result
        assert last is not None
        return last

    return eager


def train(
    options: argparse.Namespace,
    step: Callable[..., float],
    batches: Iterable[Batch],
    rank: int,
    begin: Callable[[], object],
    end: Callable[[], object],
    several: Drive | None = None,
) -> None:
    """Warm up, time the steps and what is left behind them, report."""
    endless = _endless(batches)
    count = Counter(Path(), rank).add if options.count else _nothing

    def one(batches: Iterator[Batch], _: int) -> float:
        loss = step(*next(batches))
        count()
        return loss

    def drive(steps: int) -> float:
        for _ in range(0, steps, options.steps_per_call):
            loss = (several or one)(endless, options.steps_per_call)
        return float(loss)

    drive(options.warmup)
    begin()
    with _profiled(options.profile, rank), ps_timed.Window() as window:
        loss = drive(options.steps)
        end()
    window.report(options, rank, loss=loss, system=f"{options.system}, torch {torch.__version__}")


def _step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[..., float]:
    def step(*batch: Tensor) -> float:
        loss = binary_cross_entropy_with_logits(model(*batch[:-1]), batch[-1])
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss.item()

    return step


class Program:
    """The same as a program; servers write it too, which tells them what is trained."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, name: str) -> None:
        from fleetlight import static

        self._names = [*inspect.signature(model.forward).parameters, "labels"]
        example = map(torch.from_numpy, ps_timed.batches(name, 0, count=1)[0])
        inputs = dict(zip(self._names, example, strict=True))
        loss = binary_cross_entropy_with_logits
        self._program = static.capture(model, loss, optimizer, inputs)
        self._executor = static.Executor()
        self._bind = static.bind

    def step(self, *batch: Tensor) -> float:
        """One step a call."""
        feed = dict(zip(self._names, batch, strict=True))
        [loss] = self._executor.run(self._program, feed, ["loss"])
        return loss.item()  # type: ignore[no-any-return]

    def steps(self, batches: Iterator[Batch], count: int) -> float:
        """Several steps a call, of the started loader."""
        if self._program.loader is None:
            self._bind(batches, self._names, self._program).start()
        [loss] = self._executor.run(self._program, fetch_list=["loss"], steps=count)
        return loss.item()  # type: ignore[no-any-return]


def _batches(model: str, rank: int) -> list[Batch]:
    return [tuple(map(torch.from_numpy, batch)) for batch in ps_timed.batches(model, rank)]


def _endless(batches: Iterable[Batch]) -> Iterator[Batch]:
    while True:
        yield from batches


def _first(batches: list[Batch]) -> Batch:
    return batches[0]


def _nothing() -> None:
    return None


@contextlib.contextmanager
def _profiled(path: str, rank: int) -> Iterator[None]:
    if not path:
        yield
        return
    # CPU seconds of the thread that trains
    with cProfile.Profile(time.thread_time) as profile:
        yield
    profile.dump_stats(f"{path}.{rank}")


def _cores() -> list[int]:
    return sorted(os.sched_getaffinity(0))


def _parse() -> Any:
    parser = ps_timed.parser()
    parser.description = __doc__
    parser.add_argument("--system", choices=("torch", "fleetlight", "static"), required=True)
    parser.add_argument("--staleness", type=int, help="a bound for async")
    parser.add_argument("--table_wire", default="fp32", help="fp32, bf16, fp16 or int8")
    parser.add_argument("--lookahead", action="store_true", help="pull the next batch's rows ahead")
    parser.add_argument("--durability", choices=("none", "snapshot", "log"), default="none")
    parser.add_argument("--snapshot_s", type=float, default=300.0)
    parser.add_argument("--ssl", help="folder of certificates")
    parser.add_argument("--no_shared_memory", dest="shared_memory", action="store_false")
    parser.add_argument("--core", type=int, help="stay on this one of the cores, counted from 0")
    parser.add_argument("--steps_per_call", type=int, default=1, help="a divisor of the others")
    parser.add_argument("--count", action="store_true", help="for jobs that take turns")
    parser.add_argument("--figures_switch", type=Path, help="figures are recorded while it is on")
    parser.add_argument("--profile", default="", metavar="FILE", help="with FILE.<worker>")
    return parser.parse_args()


if __name__ == "__main__":
    main()
