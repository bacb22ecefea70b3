# SPDX-License-Identifier: Apache-2.0
"""Checkpoints, deltas and publications of servers."""

import dataclasses
import itertools
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.ps.serving import (
    DIM,
    OPTIONS,
    Worker,
    hello,
    ids_of,
    opened,
    plan,
    rows_of,
    team,
    together,
)

from fleetlight.errors import CheckpointError, ProtocolError, PublicationError
from fleetlight.kernels import BUCKETS
from fleetlight.ps import messages as m
from fleetlight.ps.plan import BF16, FP32, EntryPlan, Plan, RulePlan
from fleetlight.ps.server.checkpoints import checkpoint_handler
from fleetlight.ps.server.checkpoints.checkpoint_handler import FileTransfer
from fleetlight.ps.tables.table_file import DELTA, IDS, REMOVED, TableReader
from fleetlight.ps.transport.interface import Connection
from fleetlight.publication.row_file import read_rows
from fleetlight.store.local import LocalStore

# CheckpointHandler: a cut between two pushes, saved during training, loaded by any servers.

TRAINED = list(range(-50, 50))


def save(worker: Worker, folder: Path) -> m.Saved:
    folder.mkdir(exist_ok=True)
    (folder / "token").write_text("")
    reply: m.Saved = worker.say(m.Save(str(folder), "token", 0))[0]
    return reply


def files(saved: m.Saved) -> list[tuple[int, str]]:
    return [(file.table, file.name) for file in saved.files]


def trained(mode: str = "async") -> Worker:
    worker = Worker(opened(plan(mode, workers=1)), 0, 1)
    worker.push(0, {0: (TRAINED, TRAINED), 1: ([5], [5])}, [1, 2, 3])
    return worker


def test_a_save_writes_the_cut_without_later_pushes(tmp_path: Path) -> None:
    worker = trained()
    worker.say(m.SnapshotRequest())
    worker.push(1, {0: ([1, 1000], [7, 7])}, [1, 1, 1])
    state, (dense, *_) = worker.say(m.FetchDense())
    saved = save(worker, tmp_path)
    assert [(f.table, f.rows) for f in saved.files] == [(0, 100), (1, 1)]
    # the high-water marks are of the cut, too, without the push after it
    assert saved.marks == [(0, 1, 0)]
    assert dense.tolist() == [0, -1, -2]
    assert isinstance(state, m.FetchedDense)
    target = Worker(opened(plan("async", workers=1)), 0, 1)
    target.say(m.Load(str(tmp_path), files(saved), epoch=1))
    assert target.pull(0, [1, -50, 1000]) == [-1, 50, 0]
    # without a cut, a save writes the current rows and dense values
    later = save(worker, tmp_path / "later")
    assert (later.files[0].rows, later.marks) == (101, [(0, 1, 1)])
    assert worker.say(m.FetchDense())[1][0].tolist() == [-1, -2, -3]


def test_other_servers_load_their_own_rows(tmp_path: Path) -> None:
    saved = save(trained(), tmp_path)
    servers = [
        Worker(opened(plan("async", workers=1, server_num=2), index=n), 0, 1, servers=2)
        for n in range(2)
    ]
    for worker in servers:
        worker.say(m.Load(str(tmp_path), files(saved), epoch=1))
    counts = [worker.server.metrics().rows["users"] for worker in servers]
    assert sum(counts) == len(TRAINED)
    assert min(counts) > 20
    rows = np.array([worker.pull(0, TRAINED, insert=False) for worker in servers])
    # each id is on one server only
    np.testing.assert_array_equal(rows.sum(0), -np.array(TRAINED))
    assert (rows == 0).sum() == len(TRAINED) + 1


def test_a_load_starts_an_epoch(tmp_path: Path) -> None:
    worker = trained()
    saved = save(worker, tmp_path)
    worker.push(1, {0: ([1], [1])})
    load = m.Load(str(tmp_path), files(saved), epoch=1)
    worker.say(load)
    assert worker.pull(0, [1]) == [-1]
    with pytest.raises(ProtocolError, match="pushed for epoch 0, but this server is in epoch 1"):
        worker.push(2)
    worker.epoch = 1
    # step numbers restart as well
    worker.push(0, {0: ([1], [1])})
    assert worker.pull(0, [1]) == [-2]
    assert worker.greet("control") == m.Welcome(0, 1)
    with pytest.raises(ProtocolError, match="epochs only grow"):
        worker.say(load)


def test_initial_values_do_not_replace_a_loaded_checkpoint(tmp_path: Path) -> None:
    worker = trained()
    saved, (state, arrays) = save(worker, tmp_path), worker.say(m.FetchDense())
    target = Worker(opened(plan("async", workers=1)), 0, 1)
    target.say(m.Load(str(tmp_path), files(saved), epoch=1))
    target.say(m.RestoreDense(state.state, state.scalars), *arrays)
    target.say(m.Fill([0], True), ids_of([1]), rows_of([99]), np.zeros(3, np.float32))
    assert target.pull(0, [1]) == [-1]
    assert target.dense() == [0, -1, -2]


def test_dense_optimizer_state_is_restored() -> None:
    momentum = [{**OPTIONS[0], "momentum": 0.5}]
    source, target = (Worker(opened(plan(workers=1)), 0, 1) for _ in range(2))
    source.push(0, {}, [1, 2, 4], options=momentum)
    state, arrays = source.say(m.FetchDense())
    target.say(m.RestoreDense(state.state, state.scalars), *arrays)
    for worker, step in ((source, 1), (target, 0)):
        worker.push(step, {}, [0, 0, 0], options=momentum)
    assert source.dense() == target.dense() == [-0.5, -2, -5]


def test_a_folder_that_is_not_shared_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"server 0 does not see .*shared file system"):
        trained().say(m.Save(str(tmp_path), "token", 0))


def test_an_unwritable_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "table000.server000.safetensors").mkdir()
    with pytest.raises(CheckpointError, match="table000"):
        save(trained(), tmp_path)


def test_a_cut_lies_between_two_pushes(tmp_path: Path) -> None:
    """Each push adds the same value to both tables, so they are equal in each cut."""
    workers = team(opened(plan("async")))

    def train(worker: Worker) -> None:
        for step in range(60):
            worker.push(step, {0: ([1], [1]), 1: ([1], [1])}, [1, 1, 1])

    def save_repeatedly(worker: Worker) -> list[Any]:
        found = []
        for number in range(5):
            worker.say(m.SnapshotRequest())
            dense = worker.say(m.FetchDense())[1][0].tolist()
            folder = tmp_path / str(number)
            saved = save(worker, folder)
            found.append((saved.marks, dense, read(saved, folder)))
        return found

    *trained_, saves = together(
        lambda: train(workers[0]), lambda: train(workers[1]), lambda: save_repeatedly(workers[0])
    )
    assert trained_ == [None, None]
    assert isinstance(saves, list), saves
    for marks, dense, rows in saves:
        pushes = sum(sequence + 1 for _, _, sequence in marks)
        assert rows == [-pushes, -pushes]
        assert dense == [1 - pushes] * 3


@pytest.mark.parametrize("kind", ["snapshot", "sweep"])
def test_pushes_do_not_wait_for_the_preparation_of_a_cut(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """The first cut compiles kernels, which may take seconds."""
    worker = trained()
    pushed: list[Any] = []

    def push_meanwhile() -> None:
        thread = threading.Thread(target=lambda: pushed.append(worker.push(1, {}, [1, 1, 1])))
        thread.start()
        thread.join(30)
        assert not thread.is_alive(), "a push waits"

    monkeypatch.setattr(getattr(checkpoint_handler, kind), "get_ready", push_meanwhile)
    if kind == "snapshot":
        worker.say(m.SnapshotRequest())
    else:
        rows = worker.server._serving().checkpoints.snapshot_job()
        assert rows is not None
        rows.cut()
        rows.close()
    assert len(pushed) == 1


def read(saved: m.Saved, folder: Path) -> list[float]:
    target = Worker(opened(plan("async", workers=1)), 0, 1)
    target.say(m.Load(str(folder), files(saved), epoch=1))
    return [target.pull(0, [1])[0], target.pull(1, [1])[0]]


@pytest.mark.parametrize("folder", ["x" * 300, "a\0b"], ids=["long", "odd"])
def test_an_impossible_folder_name_is_an_unseen_folder(folder: str) -> None:
    worker = Worker(opened(plan("async")), 0)
    with pytest.raises(CheckpointError, match="does not see the file of worker 0"):
        worker.say(m.Save(folder, "token", 0))
    with pytest.raises(CheckpointError, match=r"does not see|cannot be read|not the file"):
        worker.say(m.Load(folder, [(0, "table")], 1))


def test_a_deleted_table_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot be read: No such file"):
        TableReader(tmp_path / "gone")


def test_a_load_waits_for_a_snapshot_in_progress(tmp_path: Path) -> None:
    worker = trained()
    saved = save(worker, tmp_path)
    service = worker.server._service
    assert service is not None
    rows = service.checkpoints.snapshot_job()
    assert rows is not None
    rows.cut()
    table = service.state.tables[0]
    table._saving = True
    waits, wait_for = threading.Event(), service.checkpoints._lock.wait_for

    def notify(*of: Any) -> bool:
        waits.set()
        return wait_for(*of)

    service.checkpoints._lock.wait_for = notify  # type: ignore[method-assign]
    load = m.Load(str(tmp_path), files(saved), epoch=1)
    loading = threading.Thread(target=worker.say, args=(load,))
    loading.start()
    assert waits.wait(60)
    # pushes for the old values are refused once the load starts, not while it waits
    worker.push(1, {0: ([1], [1])})
    table._saving = False
    rows.close()
    loading.join()
    assert worker.pull(0, [1]) == [-1]
    worker.epoch = 1
    worker.push(2, {0: ([1], [1])})
    # the next snapshot may start
    assert service.checkpoints.snapshot_job() is not None


def test_a_cut_of_a_dead_worker_0_is_dropped() -> None:
    server = opened(plan("async", workers=1))
    service = server._service
    assert service is not None
    connections = [Connection("first incarnation"), Connection("second incarnation")]
    for incarnation, connection in enumerate(connections, 1):
        greeting = msgspec.structs.replace(
            hello(0, "control", 1), incarnation=incarnation, away_s=60.0
        )
        server(connection, greeting, [])
        assert service.checkpoints.snapshot_job() is not None
        service.checkpoints._written()
        server(connection, m.SnapshotRequest(), [])
        assert service.checkpoints.snapshot_job() is None
        server.gone(connection, None)


def chunk(text: bytes) -> np.ndarray:  # type: ignore[type-arg]
    return np.frombuffer(text, np.uint8)


def test_files_are_written_and_read_in_chunks() -> None:
    transfer = FileTransfer(0)
    transfer.put("a", 0, chunk(b"abc"))
    for _ in range(2):  # a repeated chunk does no harm
        transfer.put("a", 3, chunk(b"def"))
    transfer.put("a", 6, chunk(b""))
    assert (transfer.folder / "a").read_bytes() == b"abcdef"
    assert [transfer.take("a", at, 4).tobytes() for at in (0, 4, 8)] == [b"abcd", b"ef", b""]
    transfer.clear()


def test_clear_removes_the_folder() -> None:
    transfer = FileTransfer(3)
    folder = transfer.folder
    transfer.put("a", 0, chunk(b"abc"))
    transfer.clear()
    assert not folder.exists()
    transfer.clear()
    assert transfer.folder != folder
    transfer.clear()


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "", "..", "a/b", "a\0"])
def test_only_plain_file_names_are_accepted(name: str) -> None:
    transfer = FileTransfer(0)
    with pytest.raises(ProtocolError, match="expected a plain name"):
        transfer.take(name, 0, 1)
    with pytest.raises(ProtocolError, match="expected a plain name"):
        transfer.put(name, 0, chunk(b"x"))
    transfer.clear()


def test_a_missing_file_is_an_error() -> None:
    transfer = FileTransfer(2)
    with pytest.raises(CheckpointError, match=r"server 2 could not transfer t of .*No such file"):
        transfer.take("t", 0, 1)
    transfer.clear()


@pytest.mark.parametrize("offset", [-1, 4, 1 << 62, (1 << 64) - 1])
def test_a_chunk_after_a_gap_is_refused(offset: int) -> None:
    """A sparse file of any size would be read whole by the next save or load."""
    transfer = FileTransfer(0)
    transfer.put("a", 0, chunk(b"abc"))
    with pytest.raises(ProtocolError, match=f"at {offset}, expected an offset of 0 to 3"):
        transfer.put("a", offset, chunk(b"def"))
    assert (transfer.folder / "a").stat().st_size == 3
    transfer.clear()


def test_a_read_allocates_only_what_the_file_has() -> None:
    transfer = FileTransfer(0)
    transfer.put("a", 0, chunk(b"abc"))
    assert transfer.take("a", 1, (1 << 64) - 1).tobytes() == b"bc"
    assert transfer.take("a", (1 << 64) - 1, 5).tobytes() == b""
    with pytest.raises(ProtocolError, match="expected numbers from 0"):
        transfer.take("a", -1, 5)
    transfer.clear()


# Saves with a base and deltas: what a load finds equals a whole save, whatever happened before.

SOME_IDS = [*range(10), -(2**62), 2**40]
ADAGRAD = RulePlan("adagrad", {"initial_accumulator_value": 0.5, "weight_decay": 0.0})
#: a rule with state and counts; narrow weights; neither state nor counts
KINDS: dict[str, dict[str, Any]] = {
    "state": {"rule": ADAGRAD, "entry": EntryPlan("show_click", 0.0)},
    "narrow": {"dtype": BF16, "entry": EntryPlan("count", 2.0)},
    "plain": {"dtype": FP32},
    "evicting": {"max_rows": 4, "evict": "age"},
    "tiered": {"memory": 64, "entry": EntryPlan("show_click", 0.0)},
}


def plan_of(kind: str, servers: int = 1) -> Plan:
    tables = [msgspec.structs.replace(table, **KINDS[kind]) for table in plan().tables]
    return plan("async", workers=1, tables=tables, server_num=servers)


@dataclasses.dataclass
class Saver:
    """Worker 0, which saves what a server has into numbered folders."""

    worker: Worker
    root: Path
    kind: str
    #: the save with all rows that succeeded last: its name, folder and files
    base: tuple[str, Path, list[m.TableFile]] = ("", Path(), [])
    count: Iterator[int] = dataclasses.field(default_factory=itertools.count)

    def cut(self, *, delta: bool = True) -> tuple[str, m.SnapshotTaken]:
        name = f"save{next(self.count)}"
        return name, self.worker.say(m.SnapshotRequest(name, self.base[0], delta))[0]

    def write(self) -> tuple[Path, list[m.TableFile]]:
        folder = self.root / f"files{next(self.count)}"
        folder.mkdir(parents=True)
        (folder / "token").touch()
        return folder, self.worker.say(m.Save(str(folder), "token", 0))[0].files

    def save(self, *, delta: bool = True) -> m.Load:
        """A save that succeeds; returns the request that loads it."""
        name, taken = self.cut(delta=delta)
        return self.finish(name, taken)

    def finish(self, name: str, taken: m.SnapshotTaken) -> m.Load:
        folder, files = self.write()
        row = 8 + 4 * self.worker.server._service.state.tables[0].row_floats
        rows = sum(f.rows for f in files if f.part != REMOVED)
        ids = sum(f.rows for f in files if f.part == REMOVED)
        assert taken.written == row * rows + 8 * ids
        assert taken.bytes == row * sum(taken.rows)
        assert {bool(f.part) for f in files} == {taken.is_delta}
        if not taken.is_delta:
            self.base = name, folder, files
            return load_of(folder, files)
        whole = self.base[2]
        return msgspec.structs.replace(
            load_of(folder, [*whole, *files]),
            base=str(self.base[1]),
            base_files=[file.name for file in whole],
        )

    def plain(self) -> dict[int, dict[int, bytes]]:
        """All rows of the server now, by an ordinary save."""
        self.worker.say(m.SnapshotRequest())
        return rows_in(*self.write())


def load_of(folder: Path, files: list[m.TableFile]) -> m.Load:
    sums = {file.name: (file.bytes, file.sha256) for file in files}
    return m.Load(str(folder), [(f.table, f.name) for f in files], epoch=1, sums=sums)


def rows_in(folder: Path, files: list[m.TableFile]) -> dict[int, dict[int, bytes]]:
    """By table and id: the weights, state and counts of each row."""
    found: dict[int, dict[int, bytes]] = {}
    for file in files:
        assert not file.part
        reader = TableReader(folder / file.name)
        names = [name for name in reader._tensors if name != IDS]
        for place, one in enumerate(reader._tensors[IDS].tolist()):
            row = b"".join(reader._tensors[name][place].tobytes() for name in names)
            assert one not in found.setdefault(file.table, {})
            found[file.table][one] = row
    return found


def restored(saver: Saver, load: m.Load, servers: int) -> dict[int, dict[int, bytes]]:
    """The rows of other servers after a load."""
    found: dict[int, dict[int, bytes]] = {}
    for number in range(servers):
        worker = Worker(opened(plan_of(saver.kind, servers), index=number), 0, 1, servers)
        worker.say(msgspec.structs.replace(load, dry=True))
        worker.say(load)
        for table, rows in Saver(worker, saver.root / f"{next(saver.count)}", "").plain().items():
            assert not found.setdefault(table, {}).keys() & rows.keys()
            found[table] |= rows
    return found


def saver_of(root: Path, kind: str) -> Saver:
    return Saver(Worker(opened(plan_of(kind)), 0, 1), root, kind)


some = st.lists(st.integers(0, len(SOME_IDS) - 1), min_size=1, max_size=6, unique=True)
change = st.one_of(
    st.tuples(st.sampled_from(["push", "push", "see", "fill"]), some),
    st.tuples(st.sampled_from(["forget", "shrink", "reset"]), some),
)
saving = st.tuples(st.sampled_from(["delta", "delta", "base", "lost base", "lost delta"]), some)


@settings(deadline=None)
@example(
    "plain",
    [("push", [0, 1, 2, 3]), ("base", [0]), ("forget", [1, 2]), ("see", [7, 8]), ("delta", [0]),
     ("forget", [7]), ("lost base", [0]), ("push", [0]), ("see", [2]), ("forget", [0])],
    [("push", [3]), ("forget", [8])],
    2,
)  # fmt: skip
@example("plain", [("push", [0, 1]), ("forget", [1]), ("base", [0])], [], 1)
@given(
    st.sampled_from(sorted(KINDS)),
    st.lists(st.one_of(change, saving), max_size=14),
    st.lists(change, max_size=4),
    st.integers(1, 3),
)
def test_a_load_finds_the_rows_of_the_cut(
    kind: str, before: list[tuple[str, Any]], meanwhile: list[tuple[str, Any]], servers: int
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        saver = saver_of(Path(folder), kind)
        for step, one in enumerate(before):
            act(saver, step, *one)
        # a new row may have the number of one that was removed before
        act(saver, 99, "see", [2])
        want = saver.plain()
        name, taken = saver.cut()
        for step, one in enumerate(meanwhile):
            act(saver, 100 + step, *one)
        assert restored(saver, saver.finish(name, taken), servers) == want
        want = saver.plain()
        assert restored(saver, saver.save(), servers) == want


def act(saver: Saver, step: int, what: str, which: list[int]) -> None:
    worker, ids = saver.worker, [SOME_IDS[one] for one in which]
    table = worker.server._service.state.tables[0]
    if what in ("push", "see"):
        worker.say(m.Pull([m.TablePull(0, True)], dense=False), ids_of(ids), lane="pull")
    if what == "push":
        worker.push(step, {0: (ids, [0.5 * (step + 1)] * len(ids))})
    elif what == "fill":
        rows = np.full((len(ids), DIM), 3.0 + step, np.float32)
        worker.say(m.Fill([0], False, loaded=True), ids_of(ids), rows)
    elif what == "reset":
        worker.say(m.Fill([0], False, loaded=True, reset=True), ids_of(ids), rows_of(ids))
    elif what == "forget":
        # rows may leave a table without any change of the others
        with table.lock:
            numbers = table._rows.find(ids_of(ids))
            table._remove(numbers[numbers >= 0])
    elif what == "shrink" and table._admission is not None:
        worker.say(m.Shrink(0, 1, 0.0, 0.5, 1000 + step))
    elif what in ("delta", "base"):
        saver.save(delta=what == "delta")
    elif what.startswith("lost"):
        # a save that is cut, perhaps written, and never completed
        saver.cut(delta=what == "lost delta")
        if step % 2:
            saver.write()


def test_a_delta_has_the_rows_that_changed_since_the_base(tmp_path: Path) -> None:
    saver = saver_of(tmp_path, "plain")
    act(saver, 0, "push", list(range(12)))
    saver.save()
    act(saver, 1, "push", [2, 3])
    saver.save()
    # a delta has what the previous one had, too: a load reads one of them
    act(saver, 2, "see", [4])
    act(saver, 3, "push", [5])
    act(saver, 4, "forget", [6])
    name, taken = saver.cut()
    assert (taken.is_delta, taken.rows) == (True, [11, 0])
    load = saver.finish(name, taken)
    own = [name for _, name in load.files if name not in load.base_files]
    assert own == [
        "table000.server000.removed.safetensors",
        "table000.server000.delta.safetensors",
        "table001.server000.delta.safetensors",
    ]
    removed, delta, _ = (TableReader(Path(load.folder) / name) for name in own)
    assert (removed.part, delta.part) == (REMOVED, DELTA)
    assert removed._tensors[IDS].tolist() == [6]
    assert sorted(delta._tensors[IDS].tolist()) == [2, 3, 5]
    assert removed.span(range(BUCKETS)) == (0, 1)


def test_removed_ids_are_those_of_the_base(tmp_path: Path) -> None:
    """A table that always gains and loses rows does not collect ids."""
    saver = saver_of(tmp_path, "plain")
    act(saver, 0, "push", [0, 1, 2])
    act(saver, 0, "forget", [2])
    saver.save()
    for which in ([3], [0], [2], [3], [0, 4]):
        act(saver, 1, "push", which)
        act(saver, 1, "forget", which)
    name, taken = saver.cut()
    load = saver.finish(name, taken)
    removed = TableReader(Path(load.folder) / "table000.server000.removed.safetensors")
    assert removed._tensors[IDS].tolist() == [0]
    assert taken.rows == [1, 0]


@pytest.mark.parametrize("how", ["restart", "load", "other base"])
def test_a_server_that_does_not_know_all_changes_cuts_all_rows(tmp_path: Path, how: str) -> None:
    saver = saver_of(tmp_path, "plain")
    act(saver, 0, "push", [1, 2])
    load = saver.save()
    act(saver, 1, "push", [2])
    if how == "restart":
        saver.worker = saver_of(tmp_path, "plain").worker
    elif how == "load":
        saver.worker.say(load)
        saver.worker.epoch = 1
    else:
        saver.base = ("of another job", *saver.base[1:])
    assert not saver.cut()[1].is_delta
    assert saver.base[0] != "save0" or how != "other base"


def test_a_save_without_deltas_marks_nothing(tmp_path: Path) -> None:
    saver = saver_of(tmp_path, "plain")
    act(saver, 0, "push", [1, 2])
    assert not saver.worker.say(m.SnapshotRequest())[0].is_delta
    saver.write()
    assert saver.worker.server._service.state.tables[0]._unsaved is None
    saver.save()
    act(saver, 1, "push", [1])
    # one in between, as into another folder, changes nothing
    saver.plain()
    assert saver.cut()[1].is_delta


# PublicationHandler: the rows that changed, in any order of pushes, removals and failures.

FOLLOWED = np.arange(12)


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
    return Follower(Worker(opened(plan("async", workers=1, tables=tables)), 0, 1), folder)


def live(worker: Worker) -> list[Any]:
    """All rows of the server, by id."""
    message = m.Pull([m.TablePull(0, False)], dense=False)
    found: list[Any] = worker.say(message, FOLLOWED, lane="pull")[1][0].tolist()
    return found


def expected(follower: Follower) -> list[Any]:
    """The rows by a reader: an id without a row has its first value."""
    return [follower.rows.get(one, [0.0] * DIM) for one in FOLLOWED.tolist()]


some_followed = st.lists(st.integers(0, len(FOLLOWED) - 1), min_size=1, max_size=6, unique=True)
action = st.one_of(
    st.tuples(st.just("push"), some_followed),
    st.tuples(st.just("see"), some_followed),
    st.tuples(st.just("fill"), some_followed),
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
            act_followed(follower, step, *one)
        # what changes after the cut is in the next publication
        want = live(follower.worker)
        name = follower.cut()
        for step, one in enumerate(meanwhile):
            if one[0] not in ("publish", "fail"):
                act_followed(follower, 100 + step, *one)
        follower.complete(name)
        assert expected(follower) == want
        follower.publish()
        assert expected(follower) == live(follower.worker)
        # nothing has changed since
        assert follower.ask().changed == [0]


def act_followed(follower: Follower, step: int, what: str, ids: Any) -> None:
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
    act_followed(made, 0, "push", [1, 2, 3])
    made.publish()
    return made


def test_a_delta_has_only_the_rows_that_changed(follower: Follower) -> None:
    act_followed(follower, 1, "push", [2])
    # a pull with a new row changes no value, as its row is its first value
    act_followed(follower, 2, "see", [1, 9])
    assert follower.ask() == m.Changed(True, [1], [4], follower.ask().bytes)
    file = follower.publish()
    assert (file.rows, file.removed) == (1, 0)
    assert (follower.folder / file.name).stat().st_size == file.bytes


def test_a_restarted_server_publishes_all_rows(follower: Follower) -> None:
    follower.worker = followed(follower.folder).worker
    act_followed(follower, 0, "push", [5])
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
    act_followed(follower, 1, "push", [2, 7])
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
