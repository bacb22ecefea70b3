# SPDX-License-Identifier: Apache-2.0
"""torch's profiler never runs beside one of the script: the process would crash."""

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.workers import run_processes

from fleetlight.torch_compat.profiling import YieldingProfiler, is_profiled

pytestmark = [pytest.mark.contract, pytest.mark.multiprocess]


def names_in(profiler: torch.profiler.profile, folder: str) -> set[str]:
    path = Path(folder, "trace.json")
    profiler.export_chrome_trace(str(path))
    return {event["name"] for event in json.loads(path.read_text())["traceEvents"]}


def alone(folder: str) -> list[Any]:
    own = YieldingProfiler()
    found: list[Any] = [is_profiled(), own.start(), is_profiled()]
    torch.ones(2).cos()
    recorded = own.stop()
    assert recorded is not None
    return [*found, "aten::cos" in names_in(recorded, folder), is_profiled()]


def beside_one_that_runs(folder: str) -> list[Any]:
    with torch.profiler.profile() as script:
        own = YieldingProfiler()
        found = [own.start(), own.stop()]
        torch.ones(2).cos()
    return [*found, "aten::cos" in names_in(script, folder)]


def beside_one_that_warms_up(folder: str) -> list[Any]:
    script = torch.profiler.profile(schedule=torch.profiler.schedule(wait=0, warmup=1, active=2))
    script.start()
    found = [YieldingProfiler().start()]
    script.step()
    torch.ones(2).cos()
    script.stop()
    return [*found, "aten::cos" in names_in(script, folder)]


def begun_later(folder: str) -> list[Any]:
    own = YieldingProfiler()
    found: list[Any] = [own.start()]
    with torch.profiler.profile() as script:
        torch.ones(2).cos()
        found.append(own.stop())
        torch.ones(2).sin()
    return [*found, {"aten::cos", "aten::sin"} <= names_in(script, folder), own.start()]


def begun_later_without_kineto(folder: str) -> list[Any]:
    own = YieldingProfiler()
    found: list[Any] = [own.start()]
    with torch.autograd.profiler.profile(use_kineto=False) as script:
        torch.ones(2).cos()
    names = {event.key for event in script.key_averages()}
    return [*found, "aten::cos" in names, own.stop()]


def begun_in_another_thread(folder: str) -> list[Any]:
    own = YieldingProfiler()
    found: list[Any] = [own.start()]

    def profile() -> None:
        with torch.profiler.profile() as script:
            torch.ones(2).cos()
        found.append("aten::cos" in names_in(script, folder))

    thread = threading.Thread(target=profile)
    thread.start()
    thread.join()
    return [*found, own.stop()]


@pytest.mark.parametrize(
    ("work", "expected"),
    [
        (alone, [False, True, True, True, False]),
        (beside_one_that_runs, [False, None, True]),
        (beside_one_that_warms_up, [False, True]),
        (begun_later, [True, None, True, True]),
        (begun_later_without_kineto, [True, True, None]),
        (begun_in_another_thread, [True, True, None]),
    ],
)
def test_one_profiler_runs_at_a_time(
    work: Callable[[str], list[Any]], expected: list[Any], tmp_path: Path
) -> None:
    assert run_processes(work, [(str(tmp_path),)]) == [expected]
