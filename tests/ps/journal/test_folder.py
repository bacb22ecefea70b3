# SPDX-License-Identifier: Apache-2.0
"""A server's folder: whose it is, where to begin, what may go."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.ps.journal.full import NoRoom
from tests.ps.serving import plan

from fleetlight.errors import JournalError
from fleetlight.ps.journal import folder as at
from fleetlight.ps.journal.folder import FORMAT, Folder, FolderIdentity
from fleetlight.ps.journal.segment import Segment, segments
from fleetlight.ps.messages import TableFile
from fleetlight.ps.resume import BEGINNING, KEPT, NOTHING, OVER, POSITIONS, VALUES, Decision

FILES = [TableFile(0, "users", 3, 100, "abc")]


def identity(**facts: Any) -> FolderIdentity:
    return FolderIdentity(**{"server": 0, "server_num": 2, "job": "j", "plan": plan(), **facts})


def opened(path: Path, **facts: Any) -> Folder:
    return Folder.open(path, identity(**facts))


def test_each_start_is_a_life(tmp_path: Path) -> None:
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
def test_whose_it_is_not_is_told(tmp_path: Path, facts: dict[str, Any], text: str) -> None:
    opened(tmp_path).close()
    with pytest.raises(JournalError, match=text):
        opened(tmp_path, **facts)
    # and it can be had still
    opened(tmp_path).close()


def test_what_a_job_with_another_number_of_servers_has_left_is_told(tmp_path: Path) -> None:
    opened(tmp_path / "server-0-of-2").close()
    for resume in (False, True):
        with pytest.raises(JournalError, match=r"server-0-of-2 has what .* with 2 server\(s\)"):
            Folder.open(tmp_path / "server-0-of-1", identity(server_num=1, job="k"), resume=resume)
    opened(tmp_path / "server-0-of-2").clear()
    opened(tmp_path / "server-0-of-1", server_num=1, job="k").close()


def test_a_job_that_runs_with_another_number_of_servers_is_told(tmp_path: Path) -> None:
    running = opened(tmp_path / "server-0-of-2")
    with pytest.raises(JournalError, match="server-0-of-2 is in use by another process"):
        opened(tmp_path / "server-0-of-1", server_num=1, job="k")
    # it has not been disturbed
    with pytest.raises(JournalError, match="server-0-of-2 is in use by another process"):
        opened(tmp_path / "server-0-of-2")
    running.close()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS])
@pytest.mark.parametrize("name", ["lock", "identity.json.new"])
def test_a_disk_that_cannot_be_written_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, name: str
) -> None:
    before = os.open

    def refuse(path: Any, flags: int, mode: int = 0o777) -> int:
        if Path(path).name == name and flags & os.O_CREAT:
            raise OSError(code, os.strerror(code))
        return before(path, flags, mode)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(JournalError, match=rf"{os.strerror(code)}; .*name another folder"):
        opened(tmp_path)
    monkeypatch.undo()
    opened(tmp_path).close()


@pytest.mark.parametrize("name", ["lock", "identity.json.new"])
def test_a_full_disk_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    for incarnation in (1, 2):
        with monkeypatch.context() as patch:
            full = NoRoom(patch, name, 4)
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
def test_what_somebody_died_over_removing_is_nothing_to_go_on_from(
    tmp_path: Path, resume: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path = tmp_path / "server-0-of-2"
    folder = opened(tmp_path)
    for first in (1, 5):
        Segment(tmp_path, first).write([b"x"])
    kept = [path for _, path in segments(tmp_path)]
    unlink = Path.unlink

    def die(path: Path, missing_ok: bool = False) -> None:
        unlink(path, missing_ok)
        if path in kept:
            raise KeyboardInterrupt

    monkeypatch.setattr(Path, "unlink", die)
    with pytest.raises(KeyboardInterrupt):
        folder.clear()
    monkeypatch.undo()
    folder.close()
    assert [path.exists() for path in kept] == [False, True]
    # nor is it in the way of a job with another number of servers
    other = Folder.open(tmp_path.parent / "server-0-of-1", identity(server_num=1, job="k"))
    other.clear()
    other.close()
    folder = Folder.open(tmp_path, identity(job="k"), resume=resume)
    assert (folder.is_new, folder.identity.incarnation, folder.identity.over) == (True, 1, False)
    assert folder.base() == (1, None)
    assert not list(segments(tmp_path))
    folder.close()


def test_what_was_inherited_is_so_until_the_heir_has_its_own(tmp_path: Path) -> None:
    opened(tmp_path).close()
    for incarnation in (2, 3):
        # it dies before it has written anything
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


def test_where_there_must_be_something_nothing_is_told(tmp_path: Path) -> None:
    with pytest.raises(JournalError, match="no state to resume from; start without --resume"):
        Folder.open(tmp_path, identity(), resume=True, must_exist=True)
    opened(tmp_path).close()
    Folder.open(tmp_path, identity(job="k"), resume=True, must_exist=True).close()


def test_another_format_and_nonsense_are_told(tmp_path: Path) -> None:
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
def test_what_is_nobodys_is_not_taken_up(tmp_path: Path, left: str, resume: bool) -> None:
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


def test_a_folder_that_cannot_be_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(JournalError, match="cannot be used: Not a directory; name another folder"):
        opened(tmp_path / "file" / "folder")


def snapshot(folder: Folder, first: int, *, is_complete: bool = True) -> None:
    folder.rows_folder(first).mkdir()
    (folder.rows_folder(first) / "users").write_bytes(os.urandom(100))
    if is_complete:
        folder.complete(first, FILES)


def test_one_begins_with_the_newest_snapshot_that_is_whole(tmp_path: Path) -> None:
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


def test_a_snapshot_that_cannot_be_read_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = opened(tmp_path)
    snapshot(folder, 5, is_complete=False)
    os.truncate(folder.rows_folder(5) / "users", 99)
    with pytest.raises(JournalError, match=r"users has 99 bytes, 100 were written"):
        folder.complete(5, FILES)
    assert not (folder.rows_folder(5) / "manifest.json").exists()
    snapshot(folder, 9, is_complete=False)
    monkeypatch.setattr(at, "replace_file", lambda path, data, mode: path.write_bytes(data[:-1]))
    with pytest.raises(JournalError, match=r"manifest\.json was not read as it was written"):
        folder.complete(9, FILES)
    folder.close()


def test_a_journal_without_its_beginning_is_an_error(tmp_path: Path) -> None:
    folder = opened(tmp_path)
    Segment(tmp_path, 5).write([b"x"])
    with pytest.raises(JournalError, match="begins with record 5, and no snapshot lies before it"):
        folder.base()
    folder.close()


@pytest.mark.parametrize("kind", [POSITIONS, VALUES, BEGINNING])
def test_a_job_that_is_resumed_stays_the_job_that_began(tmp_path: Path, kind: str) -> None:
    opened(tmp_path).close()
    decision = Decision(kind, job="j")
    for incarnation, job in enumerate(("second", "third"), 2):
        wanted = identity(job=job)
        assert not at.is_of_launch(tmp_path, at.launch_of(job, 0))
        folder = Folder.open(tmp_path, wanted, resume=True, decision=decision)
        assert (folder.identity.job, folder.identity.incarnation) == ("j", incarnation)
        # of the workers it speaks only where they go on with it
        assert folder.is_resumed == (kind != POSITIONS)
        folder.own()
        folder.close()
        assert at.is_of_launch(tmp_path, at.launch_of(job, 0))
    # a server that was started again alone in this launch asks nobody
    folder = Folder.open(tmp_path, identity(job="third"), resume=True)
    assert (folder.identity.job, folder.identity.incarnation, folder.is_resumed) == ("j", 4, False)
    folder.close()


def test_an_earlier_start_of_a_job_that_is_resumed_goes(tmp_path: Path) -> None:
    opened(tmp_path).close()
    decision = Decision(BEGINNING, job="j", start=1)
    folder = Folder.open(tmp_path, identity(job="k"), resume=True, decision=decision)
    assert folder.is_new
    assert (folder.identity.job, folder.identity.start) == ("j", 1)
    folder.close()


def test_a_folder_tells_what_is_left_in_it(tmp_path: Path) -> None:
    assert at.remains(tmp_path / "none").state == NOTHING
    folder = opened(tmp_path, start=3)
    found = at.remains(tmp_path)
    assert (found.state, found.job, found.start) == (KEPT, "j", 3)
    # somebody died amid making way for another start
    folder.end()
    assert at.remains(tmp_path).state == NOTHING
    folder.end(ended=True)
    assert at.remains(tmp_path).state == OVER
    folder.clear()
    folder.close()
    assert at.remains(tmp_path).state == OVER
    # the next job has it for itself
    folder = opened(tmp_path, job="next")
    assert folder.is_new
    folder.close()
    loading = opened(tmp_path / "loading", loading=True)
    loading.close()
    assert at.remains(tmp_path / "loading").state == NOTHING


def test_a_job_of_another_size_is_refused_before_anything_is_decided(tmp_path: Path) -> None:
    path = tmp_path / "server-0-of-2"
    folder = opened(path)
    folder.close()
    at.refuse_another_size(path, 2, 2)
    with pytest.raises(JournalError, match=r"with 2 worker\(s\) has left.*this one has 3: resume"):
        at.refuse_another_size(path, 2, 3)
    with pytest.raises(JournalError, match=r"with 2 server\(s\) has left.*this one has 3: resume"):
        at.refuse_another_size(tmp_path / "server-0-of-3", 3, 2)
    folder.end(ended=True)
    at.refuse_another_size(path, 2, 3)
    at.refuse_another_size(tmp_path / "server-0-of-3", 3, 2)
