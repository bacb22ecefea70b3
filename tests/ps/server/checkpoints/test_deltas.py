# SPDX-License-Identifier: Apache-2.0
"""Saves with a base and deltas: what a load finds equals a whole save, whatever happened before."""

from __future__ import annotations

import dataclasses
import itertools
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.ps.serving import DIM, Worker, ids_of, opened, plan, rows_of

from fleetlight.kernels import BUCKETS
from fleetlight.ps import messages as m
from fleetlight.ps.plan import BF16, FP32, EntryPlan, Plan, RulePlan
from fleetlight.ps.tables.table_file import DELTA, IDS, REMOVED, TableReader

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
        taken = self.worker.say(m.SnapshotRequest(name, self.base[0], delta))[0]
        return name, taken

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
