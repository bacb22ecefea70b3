# SPDX-License-Identifier: Apache-2.0
"""`Table`: the rows of one table on one server, and the operations on them."""

from __future__ import annotations

import contextlib
import functools
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from fleetlight.errors import CheckpointError, CorruptCheckpointError, PlanError
from fleetlight.kernels import (
    RowTable,
    dedup,
    first_values,
    rule_named,
    sum_by,
    table_seed,
)
from fleetlight.ps.messages import TableFile
from fleetlight.ps.plan import TablePlan
from fleetlight.ps.tables.counts import admission
from fleetlight.ps.tables.counts.eviction import Eviction
from fleetlight.ps.tables.optimizers import rule_options
from fleetlight.ps.tables.ordered_snapshot import OrderedSnapshot
from fleetlight.ps.tables.publishing.table_changes import TableChanges, TableCut
from fleetlight.ps.tables.saving.delta_files import about_file, part_of, take_rows
from fleetlight.ps.tables.saving.unsaved_rows import UnsavedChanges
from fleetlight.ps.tables.table_file import (
    Pause,
    TableReader,
    TableWriter,
    columns_of,
    no_pause,
    refuse_other_columns,
    shared_columns,
    table_errors,
    write_table,
)
from fleetlight.ps.tables.table_lock import TableLock, UpkeepLock
from fleetlight.ps.tables.table_snapshot import TableSnapshot
from fleetlight.ps.tables.tier.kinds import rows_of
from fleetlight.ps.tables.unordered_snapshot import UnorderedSnapshot
from fleetlight.ps.update import Floats, Ids
from fleetlight.ps.wire_forms import Output, encoded_rows, no_output

Array = NDArray[Any]
_T = TypeVar("_T")
#: The bytes of rows that one holder of the lock writes, reads or scans. Pushes wait for a few
#: milliseconds; the waits of a save for the lock and for the GIL are by piece, so fewer are faster.
CHUNK_BYTES = 4 << 20
#: the same for a table with a file, whose rows may each need an access to the disk
_FILE_CHUNK_BYTES = 1 << 18
#: in a file: the pushes so far, to which the metadata of a table with a maximum of rows refers
_PUSHES = "pushes"


class Table:
    """All methods are thread-safe; callers hold `lock` to make several calls atomic.

    With `geo` rows have no state: workers apply the rule, and the server adds differences.
    """

    def __init__(
        self,
        plan: TablePlan,
        seed: int,
        geo: bool = False,
        folder: Path | None = None,
        server_num: int = 1,
    ) -> None:
        """`folder`: for rows that are not in memory; None: the system's temporary folder."""
        self.plan = plan
        self._folder = Path(tempfile.gettempdir()) if folder is None else folder
        self.lock = TableLock()
        self._rule = rule_named("add" if geo else plan.rule.name, plan.rule.options)
        self._seed = table_seed(seed, plan.name)
        self._admission: admission.Admission | None = None
        if plan.entry is not None or plan.max_rows:
            self._admission = admission.admission_of(plan.entry, self._seed)
        #: the table whose counts admit ids here, and the tables that this one admits ids of
        self._leader: Table | None = None
        self._followers: list[Table] = []
        self._eviction: Eviction | None = None
        if plan.max_rows:
            self._eviction = Eviction(max(1, plan.max_rows // server_num), plan.evict)
        self._columns = columns_of(plan.dim, self._rule, admission.meta_width(plan))
        self._rows = self._empty()
        self._cut: TableSnapshot | None = None
        #: what the file of the cut has beside rows
        self._about_cut: dict[str, str] = {}
        #: what changed since the last publication; None where nothing is published
        self._changes: TableChanges | None = None
        #: what changed since the last save of all rows; None where saves always have all rows
        self._unsaved: UnsavedChanges | None = None
        self._saving = False
        self._upkeep = UpkeepLock(plan.name)

    def __len__(self) -> int:
        return len(self._rows)

    def follow(self, leader: Table) -> None:
        """Admit ids by their scores in another table, and remove rows with those there."""
        assert isinstance(self._admission, admission.ScoreAdmission)
        self._leader, self._admission.scores = leader, leader.scores
        leader._followers.append(self)

    def scores(self, ids: Ids) -> Floats:
        """The score of each id, from its shows and clicks; 0 without a row."""
        with self.lock:
            return admission.scores(self._rows, ids)

    def drop(self, ids: Ids) -> None:
        """Remove the rows of ids, where there are some."""
        with self.lock:
            numbers = self._rows.find(ids)
            self._remove(numbers[numbers >= 0])

    @property
    def counts_pulls(self) -> bool:
        """True when training pulls change counts.

        In a table with a maximum of rows they do so only where the entry needs it.
        """
        if self._admission is None:
            return False
        return self._eviction is None or self._admission.counts_pulls

    @property
    def nbytes(self) -> int:
        """Bytes of memory in use."""
        more = (one.nbytes for one in (self._cut, self._changes, self._unsaved) if one is not None)
        return self._rows.nbytes + sum(more)

    def pull(self, ids: Ids, insert: bool, step: int = 0, out: Floats | None = None) -> Floats:
        """The weights of ids; `insert` counts them as seen in training, at this step."""
        # the lock of the leader comes first, as when it removes rows
        with contextlib.nullcontext() if self._leader is None else self._leader.lock, self.lock:
            if self._admission is None or not insert or not self.counts_pulls:
                # a push gives rows in a table with a maximum: the order of pulls is by chance
                return self._rows.pull(ids, out, insert=insert and self._eviction is None)
            numbers = self._admission.give_rows(self._rows, ids, step)
            self._keep(numbers, ids)
            self._admission.count_sighting(self._rows, numbers[numbers >= 0])
            if self._eviction is not None:
                self._eviction.stamp(self._rows, numbers)
            return self._rows.pull(ids, out, insert=False)

    def expect(self, ids: Ids) -> None:
        """Let the disk read the rows of these ids, which are needed soon."""
        with self.lock:
            begin = self._rows.reading(ids)
        if begin is not None:
            begin()

    def encoded(self, ids: Ids, insert: bool, step: int, output: Output) -> list[Array]:
        """`pull`, as the rows cross the connection."""
        return encoded_rows(
            lambda out: self.pull(ids, insert, step, out), len(ids), self.plan, output
        )

    def push(
        self,
        ids: Ids,
        gradients: Floats,
        options: Mapping[str, Any],
        step: int,
        shows: Floats | None = None,
        clicks: Floats | None = None,
    ) -> None:
        """Change the row of each id once, by the sum of its gradients; `step` counts from 0."""
        hyper = self._rule.hyper(rule_options(self.plan.rule, options), step + 1)
        with self.lock:
            self._learn(ids, gradients, hyper, step, shows, clicks)

    def exchange(
        self,
        ids: Ids,
        differences: Floats,
        wants: bool,
        step: int = 0,
        output: Output = no_output,
    ) -> list[Array]:
        """Add differences, of the worker's step; return the new rows if `wants`, as they travel.

        Without memory from `output`, the differences' own memory is reused if it is writable.
        """
        own = differences if differences.flags.writeable else None
        with self.lock:
            self._learn(ids, differences, self._rule.hyper({}), step)
            if not wants:
                return []
            return encoded_rows(
                lambda out: self._rows.pull(ids, own if out is None else out, insert=False),
                len(ids),
                self.plan,
                output,
            )

    def fill(self, ids: Ids, rows: Floats) -> None:
        """Set the weights of the rows of ids."""
        size = self._piece()
        for start in range(0, len(ids), size):
            with self.lock:
                its = ids[start : start + size]
                known = self._rows.find(its) >= 0
                numbers = self._rows.insert(its)
                self._keep_and_mark(numbers, its)
                self._rows.set_weights(numbers, rows[start : start + size])
                if self.plan.is_counted:
                    # rows without counts were trained, so their ids are admitted
                    self._rows.meta[numbers[~known], admission.LET_IN] = 1
                if self._eviction is not None:
                    self._eviction.stamp(self._rows, numbers)

    def reset(self) -> None:
        """Give all rows their first values; their state does not change."""
        how = self._rows.initializer
        with self._upkeep.held("reset"):
            with self.lock:
                numbers = self._rows.numbers
            size = self._piece()
            for start in range(0, len(numbers), size):
                piece = numbers[start : start + size].astype(np.int64)
                with self.lock.piece:
                    ids = self._rows.ids_of(piece)
                    self._keep_and_mark(piece, ids)
                    first = first_values(ids, self.plan.dim, self._seed, how)
                    self._rows.set_weights(piece, first)

    def shrink(self, unseen_days: int, score: float, decay: float) -> tuple[int, int]:
        """End a day; remove rows unseen for longer, or with a lower score.

        Returns how many rows were removed and how many are left.
        """
        if not self.plan.is_counted:
            raise PlanError(
                f"table {self.plan.name!r} has no counts to shrink it by; give its layer an entry="
            )
        with self._upkeep.held("shrink"):
            with self.lock:
                numbers = self._rows.numbers
            removed, size = 0, self._piece()
            for start in range(0, len(numbers), size):
                piece = numbers[start : start + size].astype(np.int64)
                with self.lock.piece:
                    self._keep(piece)
                    out = admission.pass_day(self._rows, piece, unseen_days, score, decay)
                    removed += self._remove(piece[out])
            return removed, len(self)

    def cut(self, *, ordered: bool = True, base: str = "", delta: bool = False) -> TableSnapshot:
        """Cut the rows: keep their present values until a save or the next cut.

        Checkpoints need `ordered` rows; an unordered cut is less work. A save of all rows that may
        be a `base` has a name: changes after it are marked. A `delta` has what changed since.
        """
        with self.lock:
            self._refuse_while_saving("cut again")
            changed = self._unsaved.delta() if self._unsaved and delta else ()
            kind = OrderedSnapshot if ordered else UnorderedSnapshot
            self._cut = kind(self._rows, self._piece(), *changed)
            if base:
                self._unsaved = self._unsaved or UnsavedChanges()
                self._unsaved.begin(self._rows, base)
            self._about_cut = about_file(
                self.plan.name, self._rule.name, part_of(self._cut.removed)
            )
            if self._eviction is not None:
                self._about_cut[_PUSHES] = str(self._eviction.clock)
            return self._cut

    def knows_since(self, base: str) -> bool:
        """Whether all changes since a base are known; ends a base that was not saved."""
        with self.lock:
            return self._unsaved is not None and self._unsaved.settle(base)

    def drop_cut(self) -> None:
        """Drop a cut that will not be saved."""
        with self.lock:
            if not self._saving:
                self._cut = None

    def save(
        self,
        cut: TableSnapshot,
        number: int,
        folder: Path,
        name: str,
        pause: Pause = no_pause,
    ) -> TableFile:
        """Write the cut into a file during training; `number` is the table's in the plan."""
        write = functools.partial(write_table, folder / name)
        size, digest = self.write(cut, write, pause)
        return TableFile(number, name, len(cut), size, digest, part=part_of(cut.removed))

    def write(self, cut: TableSnapshot, write: TableWriter[_T], pause: Pause = no_pause) -> _T:
        """Write the cut during training; returns what `write` returns."""
        with self.lock:
            self._refuse_while_saving("saved again")
            if cut is not self._cut:
                raise CheckpointError(
                    f"table {self.plan.name!r} was cut again or loaded before this cut was saved"
                )
            self._saving, about = True, self._about_cut

        def pause_with_room() -> None:
            cut.make_room()
            pause()

        try:
            cut.make_room()
            cut.prepare(self.lock.piece, pause_with_room)
            pieces = ((ids, self._rows.whole(rows)) for ids, rows in cut.pieces(self.lock.piece))
            return write(self._columns, len(cut), pieces, about, pause_with_room, cut.starts)
        finally:
            with self.lock:
                self._saving, self._cut = False, None

    # -- publications

    def changes(self) -> TableChanges:
        """What changed since the last publication; changes are marked from the first call on."""
        with self.lock:
            if self._changes is None:
                self._changes = self._no_changes()
            return self._changes

    def stop_marking(self) -> None:
        """Publish the table no longer."""
        with self.lock:
            self._changes = None

    def cut_changes(self, *, whole: bool) -> TableCut:
        """Cut what is published: all rows, or those that changed since the last publication."""
        with self.lock:
            return self.changes().cut(whole=whole)

    def settle_changes(self, *, published: bool) -> None:
        """End the cut of a publication; without one, its changes belong to the next."""
        with self.lock:
            if self._changes is not None:
                self._changes.settle(published=published)

    def published_pieces(self, cut: TableCut) -> Iterator[tuple[Ids, Floats]]:
        """The ids and weights of a cut; a piece is valid until the next is read."""
        for ids, rows in cut.pieces(self.lock.piece):
            yield ids, self._rows.whole(rows)[:, : self.plan.dim]

    def load(self, paths: Sequence[Path], buckets: range | None) -> None:
        """Replace all rows by the rows of these buckets in the files; None: all buckets."""
        readers = [self.reader(path) for path in paths]
        spans = [reader.span(buckets) for reader in readers]
        self.load_from(readers, buckets, sum(stop - start for start, stop in spans))

    def load_from(self, readers: Iterable[TableReader], buckets: range | None, about: int) -> None:
        """Replace all rows by those that readers have, about so many.

        What a delta has comes after its base: first the ids that lost their row, then rows.
        """
        with self._upkeep.held("load"), self.lock:
            self._refuse_while_saving("loaded")
            # free the memory of the old rows before the new ones need it
            self._rows, self._cut = self._empty(), None
            self._rows = self._empty(about)
            if self._eviction is not None:
                self._eviction.clock = 0
            self._unsaved = None
            if self._changes is not None:
                self._changes = self._no_changes()
            count = 0
            for reader in readers:
                self.check(reader)
                count += self._take(reader, buckets)
            if len(self) != count:
                raise CorruptCheckpointError(
                    f"table {self.plan.name!r}: {count - len(self)} ids are in the files twice; "
                    "load another checkpoint"
                )

    @property
    def row_floats(self) -> int:
        """The number of floats of a row in a file."""
        return self._columns[-1].stop

    def reader(self, path: Path) -> TableReader:
        """A file with rows of this table; raises if the rows do not fit."""
        with table_errors(self.plan.name):
            reader = TableReader(path)
        self.check(reader)
        return reader

    def _empty(self, count: int = 0) -> RowTable:
        return rows_of(self.plan, self._rule, self._seed, count, self._folder)

    def _learn(
        self,
        ids: Ids,
        gradients: Floats,
        hyper: NDArray[np.float64],
        step: int,
        shows: Floats | None = None,
        clicks: Floats | None = None,
    ) -> None:
        """Apply the rule to the rows of admitted ids."""
        if self._admission is None:
            keep = self._keep_and_mark if self._is_watched else None
            self._rows.push(ids, gradients, hyper, changing=keep, step=step)
            return
        distinct = dedup(ids)
        count = len(distinct.ids)
        learning = self._admission.learning(self._rows, distinct.ids)
        # a push without ids depends on the number of workers
        if self._eviction is not None and count:
            self._eviction.pushed()
            self._remove(self._eviction.chosen(self._rows, distinct.ids, learning))
        known = np.ascontiguousarray(distinct.ids[learning])
        keep = self._keep_and_mark if self._is_watched else None
        summed = sum_by(gradients, distinct.inverse, count)[learning]
        self._rows.push(known, summed, hyper, distinct=True, changing=keep, step=step)
        if self.plan.counts_steps:
            # each step counts once, however many workers had the id
            admission.note_push(self._rows, known, np.ones(len(known), np.float32), None)
        elif self.plan.is_counted:
            events = (
                None if c is None else sum_by(c[:, None], distinct.inverse, count)[learning, 0]
                for c in (shows, clicks)
            )
            admission.note_push(self._rows, known, *events)
        if self._eviction is not None:
            self._eviction.stamp(self._rows, self._rows.find(known))

    def _remove(self, numbers: NDArray[np.int64]) -> int:
        """Remove rows, which the cuts keep; return how many there were."""
        if not len(numbers):
            return 0
        self._keep(numbers)
        for log in (self._changes, self._unsaved):
            if log is not None:
                log.remove(numbers)
        for follower in self._followers:
            follower.drop(self._rows.ids_of(numbers))
        return self._rows.remove(numbers)

    def _keep(self, numbers: NDArray[np.integer], ids: Ids | None = None) -> None:
        """Let the cuts keep these rows before they change."""
        if self._cut is not None:
            self._cut.keep(numbers, ids)
        if self._unsaved is not None:
            self._unsaved.mark(numbers)
        if self._changes is not None:
            self._changes.keep(numbers, ids)

    def _keep_and_mark(self, numbers: NDArray[np.integer], ids: Ids | None = None) -> None:
        """`_keep` rows whose weights are about to change."""
        self._keep(numbers, ids)
        if self._changes is not None:
            self._changes.mark(numbers)

    @property
    def _is_watched(self) -> bool:
        """True while a save or a publication must know which rows change."""
        return any(one is not None for one in (self._cut, self._changes, self._unsaved))

    def _no_changes(self) -> TableChanges:
        return TableChanges(self._rows, self._piece())

    def _piece(self) -> int:
        size = min(CHUNK_BYTES, _FILE_CHUNK_BYTES) if self.plan.memory else CHUNK_BYTES
        return max(1, size // (4 * self._rows.width))

    def check(self, reader: TableReader) -> None:
        """Raise if the columns of the file differ from this table's."""
        refuse_other_columns(reader, self.plan.name, self._columns, self._rule.name)

    def _take(self, reader: TableReader, buckets: range | None) -> int:
        """Load rows; returns how many more the table must have."""
        blank = np.zeros(self._rows.whole_width, np.float32)
        blank[self.plan.dim : self.plan.dim + self._rows.state_width] = self._rule.initial
        if self.plan.is_counted:
            # rows without counts were trained, so their ids are admitted
            blank[self.plan.dim + self._rows.state_width + admission.LET_IN] = 1
        if self._eviction is not None:
            self._eviction.resume(int(reader.about.get(_PUSHES, "0")))
        columns = shared_columns(reader, self._columns, self._rule.name)
        return take_rows(self._rows, reader, buckets, columns, blank, self._piece())

    def _refuse_while_saving(self, what: str) -> None:
        if self._saving:
            raise CheckpointError(
                f"table {self.plan.name!r} cannot be {what} while it is being saved; wait until "
                "save_persistables is done"
            )
