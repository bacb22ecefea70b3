# SPDX-License-Identifier: Apache-2.0
"""The record of a launcher in its log folder."""

import os
import pathlib
import stat

import pytest

from fleetlight.launch.process_identity import start_of, this_system
from fleetlight.launch.processes import record as module
from fleetlight.launch.processes.record import ProcessEntry, RecordFile, read_records

ENTRY = ProcessEntry(name="worker 0", pid=7, start=8, status=-9, restarts=2)


def test_a_record_says_what_a_launcher_has_started(tmp_path: pathlib.Path) -> None:
    file = RecordFile(tmp_path, "j", "10.0.0.1")
    [(record, owner)] = read_records(tmp_path)
    assert owner == os.getuid()
    assert (record.job, record.host, record.system) == ("j", "10.0.0.1", this_system())
    assert (record.pid, record.start) == (os.getpid(), start_of(os.getpid()))
    assert (record.ended, record.code, record.processes) == (False, None, ())
    file.update([ENTRY])
    file.conclude(75)
    file.close()
    [(record, _)] = read_records(tmp_path)
    assert (record.ended, record.code, record.processes) == (True, 75, (ENTRY,))


def test_only_its_user_may_read_the_one_file(tmp_path: pathlib.Path) -> None:
    RecordFile(tmp_path, "j", "::1").update([ENTRY])
    [path] = tmp_path.glob("launcher.*")
    assert path.name == f"launcher.::1.{os.getpid()}.json"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_damaged_records_are_omitted(tmp_path: pathlib.Path) -> None:
    RecordFile(tmp_path, "j", "a")
    (tmp_path / "launcher.b.1.json").write_text("{")
    (tmp_path / "launcher.c.1.json").write_text("{}")
    assert [record.host for record, _ in read_records(tmp_path)] == ["a"]


def test_a_link_is_no_record(tmp_path: pathlib.Path) -> None:
    RecordFile(tmp_path, "j", "a")
    [path] = tmp_path.iterdir()
    (tmp_path / "launcher.z.1.json").symlink_to(path)
    with pytest.raises(OSError, match=r"launcher\.z"):
        read_records(tmp_path)


def test_a_full_disk_does_not_end_the_job(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: object, **options: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(module, "replace_file", full)
    RecordFile(tmp_path, "j", "a").update([ENTRY])
    assert read_records(tmp_path) == []
