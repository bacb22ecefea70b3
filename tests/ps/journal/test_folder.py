# SPDX-License-Identifier: Apache-2.0
"""Folder: which job owns a server's folder, where recovery starts, what is deleted."""

import errno
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.ps.journal.full_disk import FullDisk
from tests.ps.serving import plan

from fleetlight.errors import JournalError
from fleetlight.ps.journal import folder as folder_module
from fleetlight.ps.journal.folder import FORMAT, Folder, FolderIdentity
from fleetlight.ps.journal.segment import Segment, segments
from fleetlight.ps.messages import TableFile
from fleetlight.ps.resume import BEGINNING, KEPT, NOTHING, OVER, POSITIONS, VALUES, Decision

FILES = [TableFile(0, "users", 3, 100, "abc")]


def identity(**facts: Any) -> FolderIdentity:
    return FolderIdentity(**{"server": 0, "server_num": 2, "job": "j", "plan": plan(), **facts})


def opened(path: Path, **facts: Any) -> Folder:
    return Folder.open(path, identity(**facts))


def test_each_open_begins_an_incarnation(tmp_path: Path) -> None:
    for incarnation in (1, 2, 3):
        folder = opened(tmp_path / "deep" / "er")
        assert (folder.identity.incarnation, folder.is_new) == (incarnation, incarnation == 1)
        folder.close()


@pytest.mark.parametrize(
    ("facts", "text"),
    [
        ({"server": 1}, "has server = 0, and this process has server = 1"),
        ({"server_num": 3}, "has server_num = 2, and this process has server_num = 3"),
        ({"job": "k"}, "a job that did not finish"),
    ],
)
def test_a_folder_of_another_server_or_job_is_refused(
    tmp_path: Path, facts: dict[str, Any], text: str
) -> None:
    opened(tmp_path).close()
    with pytest.raises(JournalError, match=text):
        opened(tmp_path, **facts)
    # its owner can still open it
    opened(tmp_path).close()


def test_state_of_a_job_with_other_server_num_is_refused(tmp_path: Path) -> None:
    opened(tmp_path / "server-0-of-2").close()
    for resume in (False, True):
        with pytest.raises(JournalError, match=r"server-0-of-2 has what .* with 2 server\(s\)"):
            Folder.open(tmp_path / "server-0-of-1", identity(server_num=1, job="k"), resume=resume)
    opened(tmp_path / "server-0-of-2").clear()
    opened(tmp_path / "server-0-of-1", server_num=1, job="k").close()


def test_a_running_job_with_other_server_num_is_refused(tmp_path: Path) -> None:
    running = opened(tmp_path / "server-0-of-2")
    with pytest.raises(JournalError, match="server-0-of-2 is in use by another process"):
        opened(tmp_path / "server-0-of-1", server_num=1, job="k")
    # the running job still holds its lock
    with pytest.raises(JournalError, match="server-0-of-2 is in use by another process"):
        opened(tmp_path / "server-0-of-2")
    running.close()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS])
@pytest.mark.parametrize("name", ["lock", "identity.json.new"])
def test_an_unwritable_disk_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, name: str
) -> None:
    os_open = os.open

    def refuse(path: Any, flags: int, mode: int = 0o777) -> int:
        if Path(path).name == name and flags & os.O_CREAT:
            raise OSError(code, os.strerror(code))
        return os_open(path, flags, mode)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(JournalError, match=rf"{os.strerror(code)}; .*name another folder"):
        opened(tmp_path)
    monkeypatch.undo()
    opened(tmp_path).close()


@pytest.mark.parametrize("name", ["lock", "identity.json.new"])
def test_opening_waits_for_disk_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    for incarnation in (1, 2):
        with monkeypatch.context() as patch:
            full = FullDisk(patch, name, 4)
            full.only_open = name == "lock"
            folder = Folder.open(tmp_path, identity(), patience_s=60.0)
            assert (full.left, folder.identity.incarnation, folder.is_new) == (
                0,
                incarnation,
                incarnation == 1,
            )
            if name != "lock":
                full.left = 4
                folder.own()
                assert full.left == 0
        folder.close()


@pytest.mark.parametrize("resume", [False, True])
def test_a_partly_cleared_folder_counts_as_empty(
    tmp_path: Path, resume: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path = tmp_path / "server-0-of-2"
    folder = opened(tmp_path)
    for first in (1, 5):
        Segment(tmp_path, first).write([b"x"])
    kept = [path for _, path in segments(tmp_path)]
    unlink = Path.unlink

    def crash(path: Path, missing_ok: bool = False) -> None:
        unlink(path, missing_ok)
        if path in kept:
            raise KeyboardInterrupt

    monkeypatch.setattr(Path, "unlink", crash)
    with pytest.raises(KeyboardInterrupt):
        folder.clear()
    monkeypatch.undo()
    folder.close()
    assert [path.exists() for path in kept] == [False, True]
    # nor does it stop a job with another number of servers
    other = Folder.open(tmp_path.parent / "server-0-of-1", identity(server_num=1, job="k"))
    other.clear()
    other.close()
    folder = Folder.open(tmp_path, identity(job="k"), resume=resume)
    assert (folder.is_new, folder.identity.incarnation, folder.identity.over) == (True, 1, False)
    assert folder.base() == (1, None)
    assert not list(segments(tmp_path))
    folder.close()


def test_state_stays_resumed_until_the_new_job_owns_it(tmp_path: Path) -> None:
    opened(tmp_path).close()
    for incarnation in (2, 3):
        # it crashes before it writes anything
        folder = Folder.open(tmp_path, identity(job="k"), resume=True)
        assert (folder.identity.incarnation, folder.is_resumed) == (incarnation, True)
        folder.close()
    folder = opened(tmp_path, job="k")
    assert folder.is_resumed
    folder.own()
    folder.close()
    folder = opened(tmp_path, job="k")
    assert not folder.is_resumed
    folder.close()


def test_must_exist_refuses_an_empty_folder(tmp_path: Path) -> None:
    with pytest.raises(JournalError, match="no state to resume from; start without --resume"):
        Folder.open(tmp_path, identity(), resume=True, must_exist=True)
    opened(tmp_path).close()
    Folder.open(tmp_path, identity(job="k"), resume=True, must_exist=True).close()


def test_an_unknown_format_or_a_damaged_identity_is_refused(tmp_path: Path) -> None:
    opened(tmp_path).close()
    path = tmp_path / "identity.json"
    later = {**msgspec.json.decode(path.read_bytes()), "format": 9, "more": 1}
    path.write_bytes(msgspec.json.encode(later))
    with pytest.raises(JournalError, match=rf"written in format 9, this version .* reads {FORMAT}"):
        opened(tmp_path)
    for nonsense in (b"", b"{}", b"[1]", b"\xff\xfe", b'{"format": %d}' % FORMAT):
        path.write_bytes(nonsense)
        with pytest.raises(JournalError, match=rf"is damaged.* remove the folder {tmp_path} "):
            opened(tmp_path)


@pytest.mark.parametrize("left", ["journal", "rows"])
@pytest.mark.parametrize("resume", [False, True])
def test_files_without_an_identity_are_refused(tmp_path: Path, left: str, resume: bool) -> None:
    folder = opened(tmp_path)
    if left == "journal":
        Segment(tmp_path, 1).close()
    else:
        snapshot(folder, 5)
    folder.close()
    (tmp_path / "identity.json").unlink()
    for job in ("j", "k"):
        with pytest.raises(JournalError, match=r"no identity\.json .* or remove the folder"):
            Folder.open(tmp_path, identity(job=job), resume=resume)


def test_an_impossible_folder_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(JournalError, match="cannot be used: Not a directory; name another folder"):
        opened(tmp_path / "file" / "folder")


def snapshot(folder: Folder, first: int, *, is_complete: bool = True) -> None:
    folder.rows_folder(first).mkdir()
    (folder.rows_folder(first) / "users").write_bytes(os.urandom(100))
    if is_complete:
        folder.complete(first, FILES)


def test_recovery_starts_from_the_newest_complete_snapshot(tmp_path: Path) -> None:
    folder = opened(tmp_path)
    assert folder.base() == (1, None)
    for first in (1, 5, 9):
        Segment(tmp_path, first).write([b"x"])
    assert folder.base() == (1, None)
    snapshot(folder, 5)
    snapshot(folder, 9, is_complete=False)
    assert folder.base() == (5, FILES)
    folder.drop_incomplete()
    assert not folder.rows_folder(9).exists()
    snapshot(folder, 9)
    assert folder.base() == (9, FILES)
    folder.drop_before(9)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "00000000000000000009.journal",
        "identity.json",
        "lock",
        "rows-00000000000000000009",
        "synced",
    ]
    folder.close()


def test_an_unreadable_snapshot_is_not_completed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = opened(tmp_path)
    snapshot(folder, 5, is_complete=False)
    os.truncate(folder.rows_folder(5) / "users", 99)
    with pytest.raises(JournalError, match=r"users has 99 bytes, 100 were written"):
        folder.complete(5, FILES)
    assert not (folder.rows_folder(5) / "manifest.json").exists()
    snapshot(folder, 9, is_complete=False)
    monkeypatch.setattr(
        folder_module, "replace_file", lambda path, data, mode: path.write_bytes(data[:-1])
    )
    with pytest.raises(JournalError, match=r"manifest\.json was not read as it was written"):
        folder.complete(9, FILES)
    folder.close()


def test_a_journal_without_its_first_records_is_an_error(tmp_path: Path) -> None:
    folder = opened(tmp_path)
    Segment(tmp_path, 5).write([b"x"])
    with pytest.raises(JournalError, match="begins with record 5, and no snapshot precedes it"):
        folder.base()
    folder.close()


@pytest.mark.parametrize("kind", [POSITIONS, VALUES, BEGINNING])
def test_a_resumed_job_keeps_its_first_name(tmp_path: Path, kind: str) -> None:
    opened(tmp_path).close()
    decision = Decision(kind, job="j")
    for incarnation, job in enumerate(("second", "third"), 2):
        requested = identity(job=job)
        assert not folder_module.is_of_launch(tmp_path, folder_module.launch_of(job, 0))
        folder = Folder.open(tmp_path, requested, resume=True, decision=decision)
        assert (folder.identity.job, folder.identity.incarnation) == ("j", incarnation)
        # worker state is used only if the workers resume with it
        assert folder.is_resumed == (kind != POSITIONS)
        folder.own()
        folder.close()
        assert folder_module.is_of_launch(tmp_path, folder_module.launch_of(job, 0))
    # a server restarted alone in this launch needs no decision
    folder = Folder.open(tmp_path, identity(job="third"), resume=True)
    assert (folder.identity.job, folder.identity.incarnation, folder.is_resumed) == ("j", 4, False)
    folder.close()


def test_a_decision_for_another_start_clears_the_folder(tmp_path: Path) -> None:
    opened(tmp_path).close()
    decision = Decision(BEGINNING, job="j", start=1)
    folder = Folder.open(tmp_path, identity(job="k"), resume=True, decision=decision)
    assert folder.is_new
    assert (folder.identity.job, folder.identity.start) == ("j", 1)
    folder.close()


def test_remains_reports_the_state_of_a_folder(tmp_path: Path) -> None:
    assert folder_module.remains(tmp_path / "none").state == NOTHING
    folder = opened(tmp_path, start=3)
    remains = folder_module.remains(tmp_path)
    assert (remains.state, remains.job, remains.start) == (KEPT, "j", 3)
    # a crash while another start replaces the state
    folder.end()
    assert folder_module.remains(tmp_path).state == NOTHING
    folder.end(ended=True)
    assert folder_module.remains(tmp_path).state == OVER
    folder.clear()
    folder.close()
    assert folder_module.remains(tmp_path).state == OVER
    # the next job starts in an empty folder
    folder = opened(tmp_path, job="next")
    assert folder.is_new
    folder.close()
    opened(tmp_path / "loading", loading=True).close()
    assert folder_module.remains(tmp_path / "loading").state == NOTHING


def test_a_job_of_another_size_is_refused_before_the_decision(tmp_path: Path) -> None:
    path = tmp_path / "server-0-of-2"
    folder = opened(path)
    folder.close()
    folder_module.refuse_another_size(path, 2, 2)
    with pytest.raises(JournalError, match=r"with 2 worker\(s\) has left.*this one has 3: resume"):
        folder_module.refuse_another_size(path, 2, 3)
    with pytest.raises(JournalError, match=r"with 2 server\(s\) has left.*this one has 3: resume"):
        folder_module.refuse_another_size(tmp_path / "server-0-of-3", 3, 2)
    folder.end(ended=True)
    folder_module.refuse_another_size(path, 2, 3)
    folder_module.refuse_another_size(tmp_path / "server-0-of-3", 3, 2)
