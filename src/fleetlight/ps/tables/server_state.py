# SPDX-License-Identifier: Apache-2.0
"""`ServerState`: the tables and dense blocks of one server, and the operations on them."""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from fleetlight.errors import CheckpointError, PlanError, ProtocolError
from fleetlight.kernels import dedup, sum_by
from fleetlight.ps.changes import DifferencesAdded, StepApplied, StepHeld
from fleetlight.ps.gradients import Gradients, TablePart, dense_square, square
from fleetlight.ps.messages import Apply, Fill, GeoExchange, Load, Pull, Push, Shrink, TableFile
from fleetlight.ps.placement import Block, Placement, buckets_of
from fleetlight.ps.plan import Plan
from fleetlight.ps.tables.dense import DenseBlocks
from fleetlight.ps.tables.dense_state import DenseState
from fleetlight.ps.tables.saving.delta_files import name_of, part_of, write_ids
from fleetlight.ps.tables.table import Table
from fleetlight.ps.tables.table_file import (
    REMOVED,
    Pause,
    TableReader,
    no_pause,
    table_errors,
    write_table,
)
from fleetlight.ps.tables.table_snapshot import TableSnapshot
from fleetlight.ps.tables.unpacking import Unpacking
from fleetlight.ps.update import Ids
from fleetlight.ps.wire_forms import Output, no_output

Array = NDArray[Any]
Options = list[dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class StateSnapshot:
    """The tables and the dense state of a server at one moment."""

    tables: list[TableSnapshot]
    dense: DenseState
    #: by table: all its rows, including those that only the base has
    rows: list[int]

    @property
    def is_delta(self) -> bool:
        """Whether it needs a base."""
        return any(table.removed is not None for table in self.tables)


def is_file(path: Path) -> bool:
    """Whether a file exists; the path comes from a worker and may be invalid."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


class ServerState:
    """All methods are thread-safe; each table and the dense blocks have a lock."""

    def __init__(
        self,
        plan: Plan,
        server: int,
        optimizers: Sequence[torch.optim.Optimizer],
        parameters: Sequence[Tensor],
        folder: Path | None = None,
    ) -> None:
        """`folder`: for rows that are not in memory, unless the plan names one."""
        self.plan = plan
        self._server = server
        self._placement = Placement(plan)
        if plan.table_folder:
            folder = Path(plan.table_folder)
        self.tables = [
            Table(table, plan.seed, plan.exchanges_differences, folder, plan.server_num)
            for table in plan.tables
        ]
        for table in self.tables:
            if table.plan.entry is not None and table.plan.entry.table:
                table.follow(self.tables[plan.table(table.plan.entry.table)])
        self.dense = DenseBlocks.build(plan, self._placement, server, optimizers, parameters)
        #: the server has first values or a checkpoint's, and refuses other first values
        self._has_values = False
        #: by table: the number of its last shrink, and the result
        self._shrunk: dict[int, tuple[int, int, int]] = {}
        #: a repeated request waits for the first one
        self._once = threading.Lock()

    @property
    def server(self) -> int:
        """The number of this server."""
        return self._server

    def blocks(self, optimizer: int | None = None) -> list[Block]:
        """The dense blocks here (of one optimizer), in the order of messages."""
        return self._placement.blocks_of(self._server, optimizer)

    def table(self, number: int) -> Table:
        """A table by its number, which comes from a worker."""
        if not 0 <= number < len(self.tables):
            names = ", ".join(repr(table.name) for table in self.plan.tables) or "none"
            raise PlanError(
                f"a worker asked for table {number}, but this server has {len(self.tables)} "
                f"({names}); workers and servers must run the same script"
            )
        return self.tables[number]

    def gradients(self, message: Push, arrays: Sequence[Array], who: str) -> Gradients:
        """Unpack a push, after checking its options."""
        self._check_options(message.optimizer, message.options, who)
        last = len(arrays) - len(message.ahead)
        return self.unpacked(message, arrays[: max(0, last)], f"a push of {who}")

    def ahead_ids(self, message: Push | Apply, arrays: Sequence[Array], who: str) -> list[Array]:
        """Unpack the ids that a push or a release asks rows of: its last arrays."""
        if not message.ahead:
            return []
        unpacking = Unpacking(arrays[-len(message.ahead) :], f"a push of {who}")
        ids = [unpacking.ids(self.table(number).plan) for number in message.ahead]
        unpacking.end()
        return ids

    def unpacked(
        self, message: Push | StepApplied | StepHeld, arrays: Sequence[Array], operation: str
    ) -> Gradients:
        """Unpack gradients."""
        unpacking = Unpacking(arrays, operation, narrow=isinstance(message, Push))
        tables = {}
        for part in message.tables:
            plan = self.table(part.table).plan
            ids = unpacking.ids(plan)
            count = len(ids)
            tables[part.table] = TablePart(ids, unpacking.rows(plan, count))
            if part.counted:
                tables[part.table].shows = unpacking.counts(plan, count)
                tables[part.table].clicks = unpacking.counts(plan, count)
        blocks = self.blocks(message.optimizer)
        dense = unpacking.blocks(blocks) if message.dense else None
        unpacking.end()
        return Gradients(tables, dense, blocks, frozenset(message.absent))

    def step(self, optimizer: int, options: Options, step: int, gradients: Gradients) -> None:
        """Apply the gradients of one step."""
        for number, part in gradients.tables.items():
            table = self.table(number)
            group = options[table.plan.group]
            table.push(part.ids, part.rows, group, step, part.shows, part.clicks)
        if gradients.dense is None:
            return
        if self.plan.workers_step_dense:
            self.dense.add(gradients.dense, optimizer)
        else:
            self.dense.step(optimizer, options, gradients.absent, gradients.dense)

    def summed(self, gradients: Gradients) -> tuple[Gradients, float]:
        """Gradients with distinct ids, for a step to come, and the square of their norm."""
        total, tables = dense_square(gradients), {}
        for number, part in gradients.tables.items():
            distinct = dedup(part.ids)
            rows = sum_by(part.rows, distinct.inverse, len(distinct.ids))
            total += square([rows])
            counted = part.shows is not None
            tables[number] = part if counted else TablePart(distinct.ids, rows)
        return dataclasses.replace(gradients, tables=tables), total

    def pull(self, message: Pull, ids: Sequence[Array], output: Output = no_output) -> list[Array]:
        """The requested rows of each table, and dense values."""
        found: list[Array] = []
        for wanted, its in zip(message.tables, ids, strict=True):
            found += self.table(wanted.table).encoded(its, wanted.insert, message.step, output)
        return found + self.dense.values(output) if message.dense else found

    def pulled_ids(self, message: Pull, arrays: Sequence[Array], who: str) -> list[Array]:
        """Unpack the ids of a pull."""
        unpacking = Unpacking(arrays, f"a pull of {who}")
        ids = [unpacking.ids(self.table(wanted.table).plan) for wanted in message.tables]
        unpacking.end()
        return ids

    def differences(
        self, message: GeoExchange | DifferencesAdded, arrays: Sequence[Array], who: str
    ) -> Gradients:
        """Unpack the differences of an exchange."""
        unpacking = Unpacking(
            arrays, f"an exchange of {who}", narrow=isinstance(message, GeoExchange)
        )
        tables, dense = self._rows(message.tables, message.dense, unpacking)
        return Gradients(tables, dense, self.blocks())

    def exchange(
        self, differences: Gradients, wants: bool, step: int, output: Output = no_output
    ) -> list[Array]:
        """Add the differences of a worker's step; return the new values if `wants`."""
        found: list[Array] = []
        for number, part in differences.tables.items():
            found += self.table(number).exchange(part.ids, part.rows, wants, step, output)
        if differences.dense is None:
            return found
        with self.dense.lock:
            self.dense.add(differences.dense)
            return found + self.dense.values(output) if wants else found

    def reread(self, differences: Gradients, step: int, output: Output = no_output) -> list[Array]:
        """The reply to an exchange, without adding differences."""
        found: list[Array] = []
        for number, part in differences.tables.items():
            found += self.table(number).encoded(part.ids, False, step, output)
        return found if differences.dense is None else found + self.dense.values(output)

    def wants(self, message: Fill) -> bool:
        """False for repeated first values: the present values may be trained already."""
        return message.loaded or not self._has_values

    def fill(self, message: Fill, arrays: Sequence[Array]) -> None:
        """Set worker 0's first values, unless the server has values already."""
        unpacking = Unpacking(arrays, "the first values")
        tables, dense = self._rows(message.tables, message.dense, unpacking)
        with self._once:
            if not self.wants(message):
                return
            for number, part in tables.items():
                if message.reset:
                    self.table(number).reset()
                self.table(number).fill(part.ids, part.rows)
            if dense is not None:
                self.dense.fill(dense)
            self._has_values = True

    def shrink(self, message: Shrink) -> tuple[int, int]:
        """End a day of a table once; return how many rows were removed and how many are left."""
        table = self.table(message.table)
        with self._once:
            number, removed, left = self._shrunk.get(message.table, (0, 0, 0))
            if not message.number or message.number != number:
                removed, left = table.shrink(message.unseen_days, message.score, message.decay)
                self._shrunk[message.table] = message.number, removed, left
        return removed, left

    def shrunk(self) -> list[tuple[int, int, int, int]]:
        """The number and the result of the last `shrink` of each table."""
        with self._once:
            return [(table, *last) for table, last in sorted(self._shrunk.items())]

    def remember_shrunk(self, shrunk: Sequence[tuple[int, int, int, int]]) -> None:
        """Restore the result of `shrunk`."""
        self._shrunk = {table: (n, removed, left) for table, n, removed, left in shrunk}

    def cut(self, *, ordered: bool = True, base: str = "", delta: bool = False) -> StateSnapshot:
        """Cut tables and dense state; the caller ensures that no thread changes them.

        Rows that only this server reads need not be `ordered`. A save of all rows that may be a
        `base` has a name. A `delta` has what changed since a base that all tables know.
        """
        tables, rows = [], []
        for table in self.tables:
            with table.lock:
                tables.append(table.cut(ordered=ordered, base=base, delta=delta))
                rows.append(len(table))
        return StateSnapshot(tables, self.dense.state(), rows)

    def knows_since(self, base: str) -> bool:
        """Whether all changes since a base are known; ends one that was not saved."""
        known = [table.knows_since(base) for table in self.tables]
        return bool(known) and all(known)

    def sizes(self, cut: StateSnapshot) -> tuple[int, int]:
        """The bytes of all rows in files, and of those that a save of the cut writes."""
        whole = written = 0
        for number, (table, rows) in enumerate(zip(self.tables, cut.tables, strict=True)):
            row_bytes = 8 + 4 * table.row_floats
            whole += row_bytes * cut.rows[number]
            written += row_bytes * len(rows)
            written += 0 if rows.removed is None else rows.removed.nbytes
        return whole, written

    def save(self, cut: StateSnapshot, folder: Path, pause: Pause = no_pause) -> list[TableFile]:
        """Write the tables as they were at the cut."""
        files = []
        for number, (table, rows) in enumerate(zip(self.tables, cut.tables, strict=True)):
            name = name_of(number, self._server, part_of(rows.removed))
            try:
                if rows.removed is not None and len(rows.removed):
                    files.append(self._save_removed(number, rows.removed, folder))
                files.append(table.save(rows, number, folder, name, pause))
            except OSError as error:
                raise CheckpointError(
                    f"server {self._server} could not write table {table.plan.name!r} to "
                    f"{folder / name}: {error}"
                ) from error
        return files

    def _save_removed(self, number: int, ids: Ids, folder: Path) -> TableFile:
        name = name_of(number, self._server, REMOVED)
        write = functools.partial(write_table, folder / name)
        size, digest = write_ids(write, ids, self.tables[number].plan.name)
        return TableFile(number, name, len(ids), size, digest, part=REMOVED)

    def drop_cuts(self) -> None:
        """Drop cuts that will not be saved."""
        for table in self.tables:
            table.drop_cut()

    def check(self, message: Load, folder: Path, *, whole: bool = False) -> None:
        """Raise if files of a checkpoint are missing, are damaged or do not fit.

        `whole`: the files have exactly the rows of this server.
        """
        for number, paths in self._paths(message, folder).items():
            for path in paths:
                if not is_file(path):
                    raise CheckpointError(
                        f"server {self._server} does not see {path}; the folder of a checkpoint "
                        "must be the same for all processes, use a shared file system or "
                        'via="worker0"'
                    )
                reader = self.tables[number].reader(path)
                first, stop = reader.span(self._buckets(whole))
                if first < stop and path.name in message.sums:
                    with table_errors(self.tables[number].plan.name):
                        reader.compare(*message.sums[path.name])

    def load(self, message: Load, folder: Path, *, whole: bool = False) -> None:
        """Load this server's rows from the files of a checkpoint."""
        paths = self._paths(message, folder)
        for number, table in enumerate(self.tables):
            table.load(paths[number], self._buckets(whole))
        self._has_values = True

    def load_from(
        self, readers: Callable[[int], Iterable[TableReader]], rows: Mapping[int, int]
    ) -> None:
        """Load this server's rows from readers; `rows`: about how many each table gets."""
        for number, table in enumerate(self.tables):
            with table_errors(table.plan.name):
                table.load_from(readers(number), self._buckets(False), rows[number])
        self._has_values = True

    def _paths(self, message: Load, folder: Path) -> dict[int, list[Path]]:
        paths: dict[int, list[Path]] = {number: [] for number in range(len(self.tables))}
        base = set(message.base_files)
        for number, name in message.files:
            self.table(number)
            paths[number].append(Path(message.base if name in base else folder, name))
        return paths

    def _buckets(self, whole: bool) -> range | None:
        return None if whole else buckets_of(self._server, self.plan.server_num)

    def restore(self, state: DenseState, has_values: bool = True) -> None:
        """Restore dense values and state, from a checkpoint or the log."""
        self.dense.restore(state)
        self._has_values = has_values

    @property
    def has_values(self) -> bool:
        """True once the server has first values or a checkpoint's; it refuses others then."""
        return self._has_values

    def _rows(
        self, numbers: Sequence[int], dense: bool, unpacking: Unpacking
    ) -> tuple[dict[int, TablePart], list[Array] | None]:
        tables = {}
        for number in numbers:
            plan = self.table(number).plan
            ids = unpacking.ids(plan)
            tables[number] = TablePart(ids, unpacking.rows(plan, len(ids)))
        blocks = unpacking.blocks(self.blocks()) if dense else None
        unpacking.end()
        return tables, blocks

    def _check_options(self, optimizer: int, options: Options, who: str) -> None:
        if not 0 <= optimizer < len(self.plan.optimizers):
            raise ProtocolError(
                f"{who} pushed for optimizer {optimizer}, but the plan has "
                f"{len(self.plan.optimizers)}"
            )
        groups = self.plan.optimizers[optimizer].groups
        if len(options) != groups:
            raise PlanError(
                f"{who} pushed options of {len(options)} param groups of optimizer {optimizer}, "
                f"expected {groups}; do not add param groups during training"
            )
