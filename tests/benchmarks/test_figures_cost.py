# SPDX-License-Identifier: Apache-2.0
"""The cost of figures: a job that records them beside a page, and the switch of both."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from benchmarks.figures_switch import FiguresSwitch

from benchmarks import figures_cost, machine
from fleetlight.dashboard.feed import JobFeed
from fleetlight.observe.figures.recorder import FigureRecorder
from fleetlight.observe.figures.registry import Registry


def test_every_process_records_figures_and_a_page_is_open(tmp_path: Path) -> None:
    *processes, page = figures_cost.job(tmp_path).commands
    assert len(processes) == 4
    assert all(one.environment["FLEET_LOG_DIR"] == str(tmp_path) for one in processes)
    assert all(one.argv[-2] == "--figures_switch" for one in processes)
    assert page.argv[-2:] == ["--page", str(tmp_path)]


def test_nothing_is_recorded_or_read_while_the_switch_is_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for kind, name in ((FigureRecorder, "record"), (JobFeed, "poll")):
        monkeypatch.setattr(kind, name, getattr(kind, name))
    switch = FiguresSwitch(tmp_path / "switch")
    # a process of the job finds the file
    installed = FiguresSwitch(tmp_path / "switch")
    installed.install()
    installed.install_in_page()
    switch.turn(on=False)
    took_turn = threading.Event()
    recorder = FigureRecorder(
        tmp_path, "worker", 0, Registry(), every_s=1e6, each_time=took_turn.set
    )
    assert took_turn.wait(60.0)
    feed = JobFeed(tmp_path)
    recorder.record()
    assert not feed.poll()
    assert not (tmp_path / "figures").exists()
    switch.turn(on=True)
    recorder.record()
    assert feed.poll()
    recorder.close()
    [spent] = switch.spent_s()
    assert spent > 0


def test_the_share_of_all_cores_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "cores", lambda: 2)
    told = figures_cost.shares([0.01, 0.02, 0.07], on_s=10.0)
    assert "| recording, the process with the most | 2.00 | - |" in told
    assert "| all, as a share of 2 cores | 10.00 | 0.50%; at most 1%: met |" in told
