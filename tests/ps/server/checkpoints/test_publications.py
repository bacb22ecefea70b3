# SPDX-License-Identifier: Apache-2.0
"""PublicationHandler: the rows that changed, in any order of pushes, removals and failures."""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.ps.serving import Worker, ids_of, opened, plan

from fleetlight.errors import PublicationError
from fleetlight.ps import messages as m
from fleetlight.ps.plan import BF16, FP32, EntryPlan
from fleetlight.publication.row_file import read_rows
from fleetlight.store.local import LocalStore

DIM = 2
IDS = np.arange(12)


@dataclasses.dataclass
class Follower:
    """Publishes what one server has, and applies it to a dict."""

    worker: Worker
    folder: Path
    published: str = ""
    made: int = 0
    rows: dict[int, Any] = dataclasses.field(default_factory=dict)

    def ask(self) -> m.Changed:
        reply: m.Changed = self.worker.say(m.PublicationRequest([0], self.published))[0]
        return reply

    def cut(self) -> str:
        """Cut what changed, or all rows where the server does not know it; returns its name."""
        since = self.published if self.ask().is_complete else ""
        self.made += 1
        name = f"p{self.made}"
        self.worker.say(m.PublicationCut(name, [0], since))
        if not since:
            self.published = ""
        return name

    def write(self, name: str) -> m.PublishedFile:
        url = LocalStore(self.folder).url
        reply = self.worker.say(m.PublicationWrite(name, url, f"{name}/", ["f32"]))[0]
        [file] = reply.files
        assert isinstance(file, m.PublishedFile)
        return file

    def complete(self, name: str) -> m.PublishedFile:
        """Write the cut, and apply it."""
        file = self.write(name)
        if not self.published:
            self.rows.clear()
        seen: set[int] = set()
        for piece in read_rows(self.folder / file.name, DIM, "f32"):
            for one, row, gone in zip(*piece, strict=True):
                assert int(one) not in seen, "an id is there twice"
                seen.add(int(one))
                if gone:
                    self.rows.pop(int(one), None)
                else:
                    self.rows[int(one)] = row.tolist()
        self.published = name
        return file

    def publish(self) -> m.PublishedFile:
        return self.complete(self.cut())


def followed(folder: Path, dtype: str = FP32) -> Follower:
    """An async server with a table that shrinks; first values are zeros."""
    tables = [
        msgspec.structs.replace(table, entry=EntryPlan("show_click", 0.0), dtype=dtype)
        for table in plan().tables
    ]
    server = opened(plan("async", workers=1, tables=tables))
    return Follower(Worker(server, 0, 1), folder)


def live(worker: Worker) -> list[Any]:
    """All rows of the server, by id."""
    message = m.Pull([m.TablePull(0, False)], dense=False)
    found: list[Any] = worker.say(message, IDS, lane="pull")[1][0].tolist()
    return found


def expected(follower: Follower) -> list[Any]:
    """The rows by a reader: an id without a row has its first value."""
    return [follower.rows.get(one, [0.0] * DIM) for one in IDS.tolist()]


some = st.lists(st.integers(0, len(IDS) - 1), min_size=1, max_size=6, unique=True)
action = st.one_of(
    st.tuples(st.just("push"), some),
    st.tuples(st.just("see"), some),
    st.tuples(st.just("fill"), some),
    st.tuples(st.sampled_from(["shrink", "publish", "fail", "reset"]), st.none()),
)


@settings(deadline=None)
@example(
    FP32,
    [("push", [1, 2]), ("publish", None), ("shrink", None), ("shrink", None), ("push", [2]),
     ("fail", None), ("see", [1])],
    [("shrink", None)],
)  # fmt: skip
@example(FP32, [("push", [1]), ("publish", None), ("reset", None), ("fail", None)], [])
@given(st.sampled_from([FP32, BF16]), st.lists(action, max_size=12), st.lists(action, max_size=4))
def test_bases_and_deltas_equal_the_table(
    dtype: str, before: list[tuple[str, Any]], meanwhile: list[tuple[str, Any]]
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        follower = followed(Path(folder), dtype)
        follower.publish()
        for step, one in enumerate(before):
            act(follower, step, *one)
        # what changes after the cut is in the next publication
        want = live(follower.worker)
        name = follower.cut()
        for step, one in enumerate(meanwhile):
            if one[0] not in ("publish", "fail"):
                act(follower, 100 + step, *one)
        follower.complete(name)
        assert expected(follower) == want
        follower.publish()
        assert expected(follower) == live(follower.worker)
        # nothing has changed since
        assert follower.ask().changed == [0]


def act(follower: Follower, step: int, what: str, ids: Any) -> None:
    worker = follower.worker
    if what == "push":
        worker.say(m.Pull([m.TablePull(0, True)], dense=False), ids_of(ids), lane="pull")
        worker.push(step, {0: (ids, [0.5 * (step + 1)] * len(ids))})
    elif what == "see":
        worker.say(m.Pull([m.TablePull(0, True)], dense=False), ids_of(ids), lane="pull")
    elif what == "fill":
        rows = np.full((len(ids), DIM), 3.0 + step, np.float32)
        worker.say(m.Fill([0], False, loaded=True), ids_of(ids), rows)
    elif what == "reset":
        rows = np.ones((1, DIM), np.float32)
        worker.say(m.Fill([0], False, loaded=True, reset=True), ids_of([3]), rows)
    elif what == "shrink":
        worker.say(m.Shrink(0, 1, 0.0, 1.0, 1000 + step))
    elif what == "publish":
        follower.publish()
        assert expected(follower) == live(worker)
    else:
        # a publication that is cut, perhaps written, and never completed
        published = follower.published
        name = follower.cut()
        if step % 2:
            follower.write(name)
        follower.published = published


@pytest.fixture
def follower(tmp_path: Path) -> Follower:
    made = followed(tmp_path)
    act(made, 0, "push", [1, 2, 3])
    made.publish()
    return made


def test_a_delta_has_only_the_rows_that_changed(follower: Follower) -> None:
    act(follower, 1, "push", [2])
    # a pull with a new row changes no value, as its row is its first value
    act(follower, 2, "see", [1, 9])
    assert follower.ask() == m.Changed(True, [1], [4], follower.ask().bytes)
    file = follower.publish()
    assert (file.rows, file.removed) == (1, 0)
    assert (follower.folder / file.name).stat().st_size == file.bytes


def test_a_restarted_server_publishes_all_rows(follower: Follower) -> None:
    other = followed(follower.folder)
    follower.worker = other.worker
    act(follower, 0, "push", [5])
    assert not follower.ask().is_complete
    with pytest.raises(PublicationError, match="does not know all changes since publication p1"):
        follower.worker.say(m.PublicationCut("p9", [0], "p1"))
    follower.publish()
    assert expected(follower) == live(follower.worker)


def test_a_loaded_checkpoint_is_published_whole(follower: Follower, tmp_path: Path) -> None:
    worker = follower.worker
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / "token").touch()
    saved = worker.say(m.Save(str(tmp_path / "saved"), "token", 0))[0]
    act(follower, 1, "push", [2, 7])
    follower.publish()
    name = follower.cut()
    files = [(file.table, file.name) for file in saved.files]
    worker.say(m.Load(str(tmp_path / "saved"), files, epoch=1))
    # the cut is of the values before the load, and stays whole
    follower.complete(name)
    assert not follower.ask().is_complete
    follower.publish()
    assert expected(follower) == live(worker)


def test_a_cut_that_another_has_replaced_is_not_written(follower: Follower) -> None:
    name = follower.cut()
    follower.worker.say(m.PublicationCut("other", [0], ""))
    with pytest.raises(PublicationError, match=f"has no cut of publication {name}"):
        follower.write(name)


def test_a_table_that_is_published_no_longer_marks_no_changes(follower: Follower) -> None:
    state = follower.worker.server._open_service().state
    assert state.tables[0]._changes is not None
    # no other table is published
    assert state.tables[1]._changes is None
    follower.worker.say(m.PublicationRequest([], ""))
    assert state.tables[0]._changes is None


def test_dense_values_are_those_of_the_cut(follower: Follower) -> None:
    worker = follower.worker
    _, [before] = worker.say(m.PublicationCut("p5", [0], ""))
    before = before.copy()
    worker.push(1, {}, [1, 1, 1])
    assert before.tolist() == [1, 1, 1]
    assert worker.say(m.PublicationCut("p6", [0], ""))[1][0].tolist() == [0, 0, 0]
