# SPDX-License-Identifier: Apache-2.0
"""Metrics of other machines arrive on node 0, each line once."""

from pathlib import Path

import msgspec
from tests.launch.machines.doubles import Store

from fleetlight.launch.machines.exchanged.metrics_exchange import MetricsExchange
from fleetlight.observe.telemetry.history import History
from fleetlight.observe.telemetry.recorder import EventFile, ThinnedFile
from fleetlight.observe.telemetry.snapshot import FOLDER, Snapshot, snapshot_file


class Machine:
    """One machine with a log folder of its own."""

    def __init__(self, store: Store, own: int, folder: Path) -> None:
        self.folder = folder / f"node{own}"
        self.folder.mkdir()
        self.exchange = MetricsExchange(store, own, 3, self.folder)

    def record(self, worker: int, at: float) -> None:
        path = self.folder / FOLDER / snapshot_file("worker", worker)
        ThinnedFile(path).append(msgspec.json.encode(Snapshot(at, 7, {"steps": at})))


def test_snapshots_and_events_arrive_once(tmp_path: Path) -> None:
    store = Store()
    first, second, third = (Machine(store, own, tmp_path) for own in range(3))
    first.record(0, 1.0)
    second.record(1, 1.0)
    second.record(1, 2.0)
    third.record(2, 5.0)
    events = EventFile(second.folder, "fleetrun.host.9", "fleetrun", clock=lambda: 3.0)
    events.add("start", "started, pid 9", "worker 1")
    history = History(first.folder)
    for now in (0.0, 2.0, 4.0):
        for machine in (second, third, first):
            machine.exchange.bring()
        events.add("restart", f"at {now}", "worker 1")
    history.poll()
    assert list(history.series["worker.0"].times) == [1.0]
    # only the newest of those between two messages
    assert list(history.series["worker.1"].times) == [2.0]
    assert history.series["worker.2"].last("steps") == 5.0
    assert [one.text for one in history.events] == ["started, pid 9", "at 0.0", "at 2.0"]


def test_no_event_of_a_large_machine_is_lost(tmp_path: Path) -> None:
    store = Store()
    first, second = (Machine(store, own, tmp_path) for own in range(2))
    events = EventFile(second.folder, "fleetrun.host.9", "fleetrun")
    expected = []
    for kind in ("start", "exit"):
        for worker in range(64):
            events.add(kind, f"{kind} of {worker}", f"worker {worker}")
            expected.append(f"{kind} of {worker}")
        second.exchange.bring()
        # this message replaces the one before, which node 0 has not read
        second.exchange.bring()
        first.exchange.bring()
    # what has arrived is not sent again
    second.exchange.bring()
    second.record(1, 1.0)
    second.exchange.bring()
    assert b"exit of" not in store.get("metrics/1")
    first.exchange.bring()
    history = History(first.folder)
    history.poll()
    assert [one.text for one in history.events] == expected


def test_a_restarted_job_continues_the_copies(tmp_path: Path) -> None:
    store = Store()
    first, second = (Machine(store, own, tmp_path) for own in range(2))
    for start, at in enumerate((1.0, 2.0)):
        second.record(1, at)
        if start:
            store = Store()
            for own, machine in enumerate((first, second)):
                copies = machine.exchange.copies
                machine.exchange = MetricsExchange(store, own, 3, machine.folder, copies)
        second.exchange.bring()
        first.exchange.bring()
    history = History(first.folder)
    history.poll()
    assert list(history.series["worker.1"].times) == [1.0, 2.0]


def test_the_last_lines_are_brought_at_once(tmp_path: Path) -> None:
    store = Store()
    first, second, _ = (Machine(store, own, tmp_path) for own in range(3))
    for machine in (second, first):
        machine.exchange.bring()
    second.record(1, 9.0)
    second.exchange.bring()
    first.exchange.bring()
    history = History(first.folder)
    history.poll()
    assert history.series["worker.1"].last("steps") == 9.0


def test_a_missed_message_loses_no_process(tmp_path: Path) -> None:
    store = Store()
    first, second, _ = (Machine(store, own, tmp_path) for own in range(3))
    second.record(1, 1.0)
    second.exchange.bring()
    second.record(2, 2.0)
    second.exchange.bring()
    first.exchange.bring()
    history = History(first.folder)
    history.poll()
    assert history.series.keys() == {"worker.1", "worker.2"}


def test_a_shared_folder_is_not_written_twice(tmp_path: Path) -> None:
    store = Store()
    first = Machine(store, 0, tmp_path)
    second = MetricsExchange(store, 1, 3, first.folder)
    first.record(1, 1.0)
    second.bring()
    first.exchange.bring()
    assert (first.folder / FOLDER / "worker.1.jsonl").read_bytes().count(b"\n") == 1


def test_a_name_does_not_lead_out_of_the_folder(tmp_path: Path) -> None:
    store = Store()
    first = Machine(store, 0, tmp_path)
    message = {"number": 1, "lines": {"../../evil.jsonl": ["x"], "evil.txt": ["x"]}}
    store.set("metrics/1", msgspec.json.encode(message).decode())
    first.exchange.bring()
    assert not list(tmp_path.rglob("evil*"))
