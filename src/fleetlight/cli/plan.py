# SPDX-License-Identifier: Apache-2.0
"""`fleetlight plan`: predict a job with parameter servers."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fleetlight.cli.terminal.output import columns
from fleetlight.errors import ConfigError

if TYPE_CHECKING:
    from fleetlight.launch.capacity.prediction import Layout
    from fleetlight.launch.capacity.profile import Profile
    from fleetlight.launch.capacity.table import JobGoodput

#: most processes of one kind in a layout
_MOST = 100_000
_DAY_S = 86_400.0


def add_plan(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command and its flags."""
    plan = commands.add_parser(
        "plan",
        help="predict the speed of a job with parameter servers",
        usage="fleetlight plan [flags] script.py [arguments of the script]",
        description="Runs the script twice for some seconds on this machine, with one server and "
        "with several, and predicts jobs of other sizes. --profile FILE predicts without a run.",
    )
    add = plan.add_argument
    add("--workers", default="1,2,4,8,16", metavar="N,N", help="default: 1,2,4,8,16")
    add("--servers", default="1,2,4", metavar="M,M", help="default: 1,2,4")
    add("--workers_per_host", type=int, metavar="N", help="default: one for each core")
    add("--cores", type=int, metavar="N", help="cores of a host (default: as measured)")
    add("--shared_cores", type=int, metavar="N", help="cores of all hosts, which share them")
    add("--link_gbit", type=float, metavar="G", help="speed of each host's link, in Gbit/s")
    add("--round_trip_ms", type=float, default=0.0, metavar="MS", help="between hosts (default: 0)")
    add("--rows", type=int, metavar="N", help="rows of all tables (default: those of the run)")
    add(
        "--mtbf_days",
        metavar="D,D",
        help="predict the goodput too, if a process fails once in so many days",
    )
    add(
        "--restart_s",
        type=float,
        default=30.0,
        metavar="S",
        help="until a failed process is at work again (default: 30)",
    )
    add(
        "--save_s",
        type=float,
        default=1.0,
        metavar="S",
        help="how long a checkpoint holds up the training (default: 1)",
    )
    add("--profile", metavar="FILE", help="what an earlier plan measured, in place of a script")
    add("--save_profile", metavar="FILE", help="write what is measured")
    add("--json", action="store_true", help="print JSON")
    add("--deadline_s", type=float, default=60.0, metavar="S", help="of each run (default: 60)")
    add("script", nargs=argparse.REMAINDER, help="the training script, and its arguments")
    plan.set_defaults(command=_plan)


def _plan(found: argparse.Namespace) -> int:
    from fleetlight.launch.capacity import probe, table
    from fleetlight.launch.capacity.prediction import predict
    from fleetlight.launch.capacity.profile import QUIET

    _check(found)
    measured = _profile(found)
    differences = probe.this_machine().differences(measured.machine)
    layouts = _layouts(found, measured)
    predictions = [predict(measured.workload, layout) for layout in layouts]
    with_failures = _with_failures(found, layouts, measured.workload.mode)
    if found.json:
        values = table.as_values(measured, differences, predictions)
        values["goodput"] = [dataclasses.asdict(one) for one in with_failures]
        print(json.dumps(values, indent=2))
        return 0
    if differences:
        print(f"from the profile of another machine: {', '.join(differences)}")
    if measured.other_programs > QUIET:
        print(
            f"other programs used {measured.other_programs:.0%} of the machine meanwhile, expected "
            f"at most {QUIET:.0%}: the figures are rough; measure again on an idle machine"
        )
    width = columns()
    print(f"{table.of_workload(measured.workload)}\n\n{table.of_predictions(predictions, width)}")
    if with_failures:
        print(f"\n{table.of_goodput(with_failures, width)}")
    return 0


def _with_failures(
    found: argparse.Namespace, layouts: Sequence[Layout], mode: str
) -> list[JobGoodput]:
    """The goodput of each layout, for each rate of failures."""
    from fleetlight.launch.capacity.goodput import FailureModel, goodput
    from fleetlight.launch.capacity.table import JobGoodput

    if found.mtbf_days is None:
        return []
    return [
        JobGoodput(
            workers=layout.workers,
            servers=layout.servers,
            mtbf_days=days,
            goodput=goodput(
                layout.workers,
                layout.servers,
                mode,
                FailureModel(mtbf_s=days * _DAY_S, restart_s=found.restart_s, save_s=found.save_s),
            ),
        )
        for layout in layouts
        for days in _numbers("--mtbf_days", found.mtbf_days)
    ]


def _check(found: argparse.Namespace) -> None:
    """Refuse flags that contradict each other, and numbers without meaning."""
    if bool(found.script) == bool(found.profile):
        given = "both a script and --profile" if found.script else "no script"
        raise ConfigError(f"plan: got {given}, expected either: {_USAGE}")
    if found.profile and found.save_profile:
        raise ConfigError("--save_profile writes what a script's run measures; omit --profile")
    if found.script and not os.path.isfile(found.script[0]):
        raise ConfigError(f"script {found.script[0]!r} does not exist (looked in {os.getcwd()})")
    for flag in (
        "workers_per_host",
        "cores",
        "shared_cores",
        "link_gbit",
        "rows",
        "deadline_s",
        "restart_s",
        "save_s",
    ):
        value = getattr(found, flag)
        if value is not None and not 0 < value < math.inf:
            raise ConfigError(f"--{flag} {value:g}: expected more than 0")
    if not 0 <= found.round_trip_ms < math.inf:
        raise ConfigError(f"--round_trip_ms {found.round_trip_ms:g}: expected at least 0")


_USAGE = "fleetlight plan SCRIPT [ARGUMENTS], or fleetlight plan --profile FILE"


def _profile(found: argparse.Namespace) -> Profile:
    """What a step costs: measured now, or read from a file."""
    from fleetlight.launch.capacity import probe, profile

    if found.profile:
        return profile.load(Path(found.profile))
    measured = probe.measure(found.script, found.deadline_s, _say)
    if found.save_profile:
        profile.save(measured, Path(found.save_profile))
    return measured


def _layouts(found: argparse.Namespace, measured: Profile) -> list[Layout]:
    from fleetlight.launch.capacity.prediction import Layout

    cores = found.cores or measured.machine.cores
    return [
        Layout(
            workers=workers,
            servers=servers,
            workers_per_host=found.workers_per_host or cores,
            cores=cores,
            link_bits_per_s=math.inf if found.link_gbit is None else 1e9 * found.link_gbit,
            round_trip_s=found.round_trip_ms / 1e3,
            total_cores=found.shared_cores,
            rows=found.rows,
        )
        for servers in _numbers("--servers", found.servers)
        for workers in _numbers("--workers", found.workers)
    ]


def _numbers(flag: str, text: str) -> list[int]:
    words = [word.strip() for word in text.split(",")]
    numbers = [int(word) if word.isdigit() else 0 for word in words]
    if not all(1 <= number <= _MOST for number in numbers):
        raise ConfigError(f"{flag} {text!r}: expected numbers of 1 to {_MOST:,}, such as 1,2,4")
    return numbers


def _say(text: str) -> None:
    # the table or the JSON alone goes to standard output
    print(f"fleetlight: {text}", file=sys.stderr, flush=True)
