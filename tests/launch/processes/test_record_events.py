# SPDX-License-Identifier: Apache-2.0
"""Changes of a launcher's processes are events."""

from pathlib import Path

from fleetlight.launch.processes.record import ProcessEntry, RecordFile, changes
from fleetlight.observe.telemetry.history import History


def entry(pid: int, status: int | None = None, restarts: int = 0) -> ProcessEntry:
    return ProcessEntry(name="worker 1", pid=pid, start=1, status=status, restarts=restarts)


def test_what_changes_is_an_event() -> None:
    cases = [
        ([], [entry(3)], [("worker 1", "start", "started, pid 3")]),
        ([entry(3)], [entry(3)], []),
        ([entry(3)], [entry(3, 1)], [("worker 1", "exit", "exited with code 1")]),
        ([entry(3, 1)], [entry(3, 1)], []),
        ([entry(3)], [entry(4, restarts=1)], [("worker 1", "restart", "restart 1, pid 4")]),
        # it started and ended between two looks
        (
            [entry(3)],
            [entry(4, 0, 1)],
            [
                ("worker 1", "restart", "restart 1, pid 4"),
                ("worker 1", "exit", "exited with code 0"),
            ],
        ),
    ]
    for before, after, expected in cases:
        assert [(one.name, kind, text) for one, kind, text in changes(before, after)] == expected


def test_a_launcher_records_its_events(tmp_path: Path) -> None:
    record = RecordFile(tmp_path, "job", "127.0.0.1")
    record.update([entry(3)])
    record.update([entry(3, -9)])
    record.conclude(1)
    history = History(tmp_path)
    history.poll()
    assert [(one.who, one.kind) for one in history.events] == [
        ("worker 1", "start"),
        ("worker 1", "exit"),
        ("fleetrun", "end"),
    ]
    started, ended, end = history.events
    assert "SIGKILL" in ended.text
    assert [(one.host, one.pid, one.status) for one in (started, ended, end)] == [
        ("127.0.0.1", 3, None),
        ("127.0.0.1", 3, -9),
        ("127.0.0.1", None, 1),
    ]


def test_a_restart_has_its_number(tmp_path: Path) -> None:
    record = RecordFile(tmp_path, "job", "127.0.0.1")
    record.update([entry(3)])
    record.update([entry(3, -9)])
    record.update([entry(4, restarts=1)])
    history = History(tmp_path)
    history.poll()
    assert [one.restart for one in history.events] == [0, 0, 1]
