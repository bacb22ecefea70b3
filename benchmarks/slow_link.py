# SPDX-License-Identifier: Apache-2.0
"""Two hosts with links of 200 Mbit/s: the time of an all-reduce, and of a training step.

The hosts are network namespaces with two workers each, which requires root, `ip` and `tc`. Every
variant is a job of its own; they take turns, and ratios are within a round.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rig.hosts import Rig, hosts

from benchmarks import interleave, jobs, report
from fleetlight.security import certificates

CLAIM = (
    "25 million parameters, 2 hosts with 2 workers each, links of 200 Mbit/s. One reduction: by "
    "levels 1.4 times as fast as by one all-reduce, 2.8 times where the workers' indices "
    "alternate between hosts, with at most 1.05 times the gradients' bytes sent by a host; with "
    "levels and bfloat16 2.4 times, int8 2.2 times for at most 1/3.5 of the bytes, the largest 1 "
    "% 8 times. Training: LocalSGD with k = 4 and levels makes 4.3 times the steps per second of "
    "flat synchronous training; DiLoCo with H = 500 at least 0.95 times those of workers that "
    "never meet; over links of 1 Gbit/s TLS keeps 0.9 of the steps."
)
PROGRAM = str(Path(__file__).parent / "slow_train.py")
HOSTS, WORKERS = 2, 4
#: of float32 gradients, in MiB
MODEL_MIB = 4 * 25_021_066 / 2**20
Settings = Mapping[str, Any]
LEVELS: Settings = {"use_hierarchical_allreduce": True}
BF16: Settings = {"compression": "bf16"}
INT8: Settings = {"compression": "int8"}
TOPK: Settings = {"compression": "topk", "compression_configs": {"ratio": 0.01}}
DGC: Settings = {"dgc": True, "dgc_configs": {"sparsity": [0.999]}}
LOCALSGD: Settings = {"localsgd": True, "localsgd_configs": {"k_steps": 4, "begin_step": 0}}
FLAT, DDP, ALONE = "flat", "plain DDP", "no communication"


@dataclasses.dataclass(frozen=True)
class Variant:
    """One way to do it: settings of the strategy, or no strategy of ours at all."""

    name: str
    settings: Settings = dataclasses.field(default_factory=dict)
    system: str = "fleetlight"
    #: workers with consecutive indices are on different hosts
    alternating: bool = False
    #: inside TLS, with certificates made for the hosts
    encrypted: bool = False
    #: untimed steps, and timed ones: whole periods of those who meet now and then
    warmup: int = 2
    steps: int = 3


@dataclasses.dataclass(frozen=True)
class Bar:
    """How many times as fast one is as another; the bytes it sends, as a part of the other's."""

    over: str
    under: str
    at_least: float | None = None
    bytes_at_most: float | None = None


@dataclasses.dataclass(frozen=True)
class Section:
    """Variants that are compared, over links of one rate."""

    title: str
    task: str
    variants: Sequence[Variant]
    bars: Sequence[Bar]
    rate: str = "200mbit"


INTERLEAVED = "flat, alternating indices"
LEVELS_INTERLEAVED = "by levels, alternating indices"
BY_LEVELS = "by levels"

REDUCTION = Section(
    f"One reduction of {MODEL_MIB:.1f} MiB",
    "reduce",
    [
        Variant(FLAT),
        Variant(DDP, system="ddp"),
        Variant(BY_LEVELS, LEVELS),
        Variant(INTERLEAVED, alternating=True, steps=2),
        Variant(LEVELS_INTERLEAVED, LEVELS, alternating=True),
        Variant("by levels, bf16", {**LEVELS, **BF16}),
        Variant("by levels, int8", {**LEVELS, **INT8}, steps=5),
        Variant("by levels, top 1 %", {**LEVELS, **TOPK}, steps=10),
    ],
    [
        Bar(BY_LEVELS, FLAT, 1.4),
        Bar(LEVELS_INTERLEAVED, INTERLEAVED, 2.8),
        Bar("by levels, bf16", FLAT, 2.4),
        Bar("by levels, int8", FLAT, 2.2),
        Bar("by levels, int8", BY_LEVELS, bytes_at_most=1 / 3.5),
        Bar("by levels, top 1 %", FLAT, 8.0),
    ],
)

LOCAL = "LocalSGD, k = 4, by levels"
TRAINING = Section(
    "Training, a step",
    "train",
    [
        Variant(FLAT),
        Variant(DDP, system="ddp"),
        Variant(BY_LEVELS, LEVELS),
        Variant("by levels, int8", {**LEVELS, **INT8}, steps=5),
        Variant("DGC, 0.1 %, by levels", {**LEVELS, **DGC}, steps=10),
        Variant(LOCAL, {**LEVELS, **LOCALSGD}, warmup=4, steps=8),
        Variant(f"{LOCAL}, int8", {**LEVELS, **LOCALSGD, **INT8}, warmup=4, steps=16),
        Variant(ALONE, system="alone", steps=20),
    ],
    [
        Bar(LOCAL, FLAT, 4.3),
    ],
)

ENCRYPTED, LEVELS_ENCRYPTED = "flat, TLS", "by levels, TLS"
TLS = Section(
    "Training inside TLS, a step",
    "train",
    [
        Variant(FLAT, steps=5),
        Variant(ENCRYPTED, encrypted=True, steps=5),
        Variant(BY_LEVELS, LEVELS, steps=5),
        Variant(LEVELS_ENCRYPTED, LEVELS, encrypted=True, steps=5),
    ],
    [Bar(ENCRYPTED, FLAT, 0.9), Bar(LEVELS_ENCRYPTED, BY_LEVELS, 0.9)],
    rate="1gbit",
)

SECTIONS = {"reduction": REDUCTION, "training": TRAINING, "tls": TLS}
#: H and how many times the speed of no communication is promised
DILOCO: Mapping[int, float | None] = {50: None, 500: 0.95}


def job(
    variant: Variant, task: str, rig: Rig, flags: Sequence[str] = (), ssl: str = ""
) -> jobs.Job:
    """Four workers on two hosts; `ssl` has the certificates of what is encrypted."""
    argv = [sys.executable, PROGRAM, "--system", variant.system, "--task", task]
    settings = {**variant.settings, **({"ssl": ssl} if variant.encrypted else {})}
    argv += ["--strategy", json.dumps(settings)]
    argv += ["--warmup", str(variant.warmup), "--steps", str(variant.steps), *flags]
    port = str(jobs.free_port())
    commands = [_command(argv, rank, variant, rig, port) for rank in range(WORKERS)]
    return jobs.Job(variant.name, commands, results=WORKERS)


def _command(argv: Sequence[str], rank: int, variant: Variant, rig: Rig, port: str) -> jobs.Command:
    each = WORKERS // HOSTS
    at, local = (rank % HOSTS, rank // HOSTS) if variant.alternating else divmod(rank, each)
    who = {"RANK": rank, "LOCAL_RANK": local, "WORLD_SIZE": WORKERS, "LOCAL_WORLD_SIZE": each}
    where = {"MASTER_ADDR": rig.addresses[0], "MASTER_PORT": port}
    environment = {name: str(value) for name, value in {**who, **where}.items()}
    return jobs.Command([*rig.hosts[at].prefix, *argv], environment)


def measured(section: Section, options: argparse.Namespace) -> str:
    """All variants of a section, round by round."""
    wanted = [one for one in section.variants if one.name in (options.variants or one.name)]
    with hosts(HOSTS, rate=section.rate) as rig, tempfile.TemporaryDirectory() as ssl:
        certificates.make(ssl, rig.addresses)
        make: dict[str, Callable[[], jobs.Job]] = {
            one.name: functools.partial(
                job, _short(one) if options.quick else one, section.task, rig, ssl=ssl
            )
            for one in wanted
        }
        runs = interleave.run_jobs(make, options.rounds, options.idle_s)
    for run in [run for of in runs.values() for run in of]:
        jobs.check_same(run, "checksum")
    return written(section, runs)


def _short(variant: Variant) -> Variant:
    """A step; those who meet now and then, a period of four."""
    steps = 4 if "localsgd" in variant.settings else 1
    return dataclasses.replace(variant, warmup=steps, steps=steps)


def written(section: Section, runs: interleave.Runs) -> str:
    """A section of the page: seconds and bytes, then ratios with their bars."""
    series = {one.name: one for one in interleave.job_series(runs).values()}
    rows = [
        (
            name,
            str(report.Spread.of([1 / rate for rate in series[name].rates])),
            str(report.Spread.of([1e-3 * ms for ms in series[name].cpu_ms])),
            str(report.Spread.of([_sent_mib(run) for run in of])),
        )
        for name, of in runs.items()
    ]
    head = ("variant", "seconds: median (min..max)", "CPU s of a worker", "MiB a host sends")
    first, *rest = section.variants
    others = {one.name for one in rest} - {bar.over for bar in section.bars}
    bars = [*section.bars, *(Bar(name, first.name) for name in sorted(others))]
    bars = [bar for bar in bars if bar.over in runs and bar.under in runs]
    parts = [
        f"## {section.title}, {_of(section.rate)}",
        report.table(head, rows),
        report.table(
            ("compared", "times as fast", "at least", "of the bytes", "at most", "each round"),
            [_compared(bar, series, runs) for bar in bars],
        ),
        f"Rounds: {len(next(iter(runs.values())))}. "
        f"{report.foreign_line(interleave.job_foreign(runs))}",
    ]
    return "\n\n".join(parts)


def _of(rate: str) -> str:
    return f"links of {rate.replace('mbit', ' Mbit/s').replace('gbit', ' Gbit/s')}"


def _compared(
    bar: Bar, series: Mapping[str, report.Series], runs: interleave.Runs
) -> tuple[str, ...]:
    ratio = report.Ratio(series[bar.over], series[bar.under], bar.at_least)
    parts = [
        _sent_mib(over) / max(1e-9, _sent_mib(under))
        for over, under in zip(runs[bar.over], runs[bar.under], strict=True)
    ]
    spread = report.Spread.of(parts)
    limit = bar.bytes_at_most
    verdict = "-" if limit is None else report.at_most(spread.median, limit)
    *row, rounds = ratio.row()
    return *row, report.short(spread.median), verdict, rounds


def _sent_mib(run: jobs.Run) -> float:
    """MiB that the busiest host sent for a step."""
    return float(max(r["sent"] / r["steps"] for r in run.results)) / 2**20


def beside_alone(every: int, options: argparse.Namespace) -> str:
    """DiLoCo in turn with training without communication, in the same processes.

    The effect is a few per cent, less than the noise between two jobs. A round has as many steps
    as there are between two outer steps, so each round has one outer step. Its time depends on the
    link only; here a step computes for a quarter of a second.
    """
    settings = {"diloco": True, "diloco_configs": {"k_steps": every, "begin_step": 0}}
    variant = Variant(f"DiLoCo, H = {every}", {**LEVELS, **settings}, steps=25)
    rounds, steps = (1, 50) if options.quick else (3, max(every, 500))
    flags = ["--beside", "--rounds", str(rounds), "--turns", str(steps // variant.steps)]
    flags += ["--batch", "32"]
    with hosts(HOSTS, rate="200mbit") as rig:
        made = dataclasses.replace(job(variant, "train", rig, flags), deadline_s=3600.0)
        found = sorted(jobs.run(made).results, key=lambda result: int(result["rank"]))
    workers = [result["rounds"] for result in found]
    alone, ours = interleave.series(workers)
    names = [dataclasses.replace(alone, name=ALONE), dataclasses.replace(ours, name=variant.name)]
    ratio = report.Ratio(names[1], names[0], DILOCO.get(every))
    title = f"DiLoCo, H = {every}, batch 32, {_of('200mbit')}, in turn with no communication"
    return report.section(title, names, [ratio], interleave.foreign(workers))


def main(argv: Sequence[str] | None = None) -> int:
    """Measure what is asked for and write the result page."""
    parser = interleave.parser(__doc__, rounds=5)
    add, every = parser.add_argument, [*SECTIONS, "diloco"]
    add("--sections", nargs="+", choices=every, default=every)
    add("--variants", nargs="+", help="only these, by name")
    options = parser.parse_args(argv)
    options.rounds = 1 if options.quick else options.rounds

    def sections() -> Iterator[str]:
        for name in options.sections:
            if name in SECTIONS:
                yield measured(SECTIONS[name], options)
            else:
                yield from (beside_alone(every, options) for every in DILOCO)

    return report.page("slow_link", CLAIM, sections(), options.quick)


if __name__ == "__main__":
    sys.exit(main())
