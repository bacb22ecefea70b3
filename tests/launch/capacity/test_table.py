# SPDX-License-Identifier: Apache-2.0
"""Predictions as text and as JSON."""

from __future__ import annotations

import json

from tests.launch.capacity.workloads import profile, workload

from fleetlight.launch.capacity.prediction import Layout, predict
from fleetlight.launch.capacity.table import as_values, of_predictions, of_workload


def test_a_row_has_the_speed_and_what_limits_it() -> None:
    some = [predict(workload(), Layout(workers=n, servers=1)) for n in (1, 32)]
    head, one, many = of_predictions(some).splitlines()
    assert head.split()[:3] == ["workers", "servers", "examples/s"]
    assert one.split()[:4] == ["1", "1", "4,545", "worker"]
    # 84 ms in place of 22
    assert many.split()[:4] == ["32", "1", "38,095", "server"]


def test_without_a_batch_size_a_row_has_steps() -> None:
    lines = of_predictions([predict(workload(batch=None), Layout(workers=1, servers=1))])
    assert lines.split()[2] == "steps/s"
    assert lines.splitlines()[1].split()[2] == "45.45"


def test_the_workload_is_one_line() -> None:
    assert of_workload(workload()) == (
        "sync, batch 100; a step: 20 ms CPU of a worker, 2 ms of the servers; 1.91 MiB sent, "
        "1.91 MiB received"
    )
    assert "batch not known" in of_workload(workload(batch=None))


def test_json_has_no_infinite_number() -> None:
    one = predict(workload(), Layout(workers=1, servers=1))
    text = json.dumps(as_values(profile(), ["cores 8 (here 2)"], [one]), allow_nan=False)
    values = json.loads(text)
    assert values["differences"] == ["cores 8 (here 2)"]
    (told,) = values["predictions"]
    assert told["layout"]["link_bits_per_s"] is None
    assert (told["step_s"], told["connections"]) == (one.step_s, 4)
