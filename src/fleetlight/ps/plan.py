# SPDX-License-Identifier: Apache-2.0
"""`Plan`: the tables, dense parameters and optimizers of a job. Pure data.

Servers and workers build it from the same script. When a worker joins, the server compares the
plans and names the first difference.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import msgspec

#: the modes of training with parameter servers
SYNC, ASYNC, GEO = "sync", "async", "geo"
#: the types of the weights of a table
DTYPES = FP32, BF16 = "fp32", "bf16"
#: which rows leave a table with a maximum of rows: unseen longest, fewest shows, lowest score
EVICT = "age", "count", "score"
#: the kinds of entries that another table admits by, and that count shows and clicks
SCORE, SHOW_CLICK = "score", "show_click"


class RulePlan(msgspec.Struct, frozen=True):
    """The rule that updates the rows of a table; each push carries learning rate and the like."""

    name: str
    options: dict[str, float]


class InitializerPlan(msgspec.Struct, frozen=True):
    """The first value of a row: `kind` and its two numbers."""

    kind: str
    a: float = 0.0
    b: float = 0.0


class EntryPlan(msgspec.Struct, frozen=True):
    """The admission rule of a table, and what it counts of each id."""

    kind: str
    value: float = 0.0
    #: of the kind `SCORE`: the table that counts shows and clicks of the ids
    table: str = ""


class TablePlan(msgspec.Struct, frozen=True):
    """A table: its name is the module path of the layer that owns it."""

    name: str
    dim: int
    rule: RulePlan
    initializer: InitializerPlan
    optimizer: int
    group: int
    entry: EntryPlan | None = None
    #: above 0: ids are 0..rows-1 and worker 0 brings their first values
    rows: int = 0
    #: the form of rows and gradients on the connection: fp32 | bf16 | fp16 | int8
    wire: str = "fp32"
    #: the type of the weights on the servers: fp32 | bf16
    dtype: str = "fp32"
    #: True when workers keep rows between lookups
    cached: bool = False
    #: the bytes of rows that a server has in memory, others are in a file; 0: all are in memory
    memory: int = 0
    #: the most rows of the table in the job, 0: any; and which leave it first, of `EVICT`
    max_rows: int = 0
    evict: str = ""

    @property
    def is_counted(self) -> bool:
        """True when the rows of the table have counts."""
        return self.max_rows > 0 or (self.entry is not None and self.entry.kind != SCORE)

    @property
    def counts_steps(self) -> bool:
        """True when its counts are of steps, because no entry defines them."""
        return self.max_rows > 0 and (self.entry is None or self.entry.kind == SCORE)

    @property
    def is_read_ahead(self) -> bool:
        """True when the rows of announced batches are read before their turn."""
        return self.entry is None and not self.max_rows and not self.cached


class DensePlan(msgspec.Struct, frozen=True):
    """A dense parameter of the model."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    optimizer: int
    group: int


class OptimizerPlan(msgspec.Struct, frozen=True):
    """An optimizer that steps dense parameters on the servers."""

    class_name: str
    groups: int
    #: True when its rule is elementwise, so that a parameter may be split
    elementwise: bool


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """Everything the processes of a job must agree on before the first step."""

    mode: str
    worker_num: int
    server_num: int
    seed: int
    tables: list[TablePlan]
    dense: list[DensePlan]
    optimizers: list[OptimizerPlan]
    k_steps: int = 0
    staleness: int | None = None
    #: False when the workers average dense parameters among themselves
    serves_dense: bool = True
    #: what a gradient with NaN or infinite values does: refuse | skip | apply
    on_nonfinite: str = "refuse"
    #: what a server restores after a restart: none | snapshot | log
    durability: str = "none"
    #: what the other workers do when a worker is lost: fail | go_on
    lost_worker: str = "fail"
    #: where servers have the files of rows that are not in memory; "": the durability folder of
    #: the server, or a temporary one
    table_folder: str = ""

    @property
    def steps_together(self) -> bool:
        """True when the gradients of all workers make one step."""
        return self.mode == SYNC

    @property
    def pushes_alone(self) -> bool:
        """True when each worker pushes its gradients without waiting for the other workers."""
        return self.mode == ASYNC

    @property
    def exchanges_differences(self) -> bool:
        """True when workers step all values and servers add the differences."""
        return self.mode == GEO

    @property
    def workers_step_dense(self) -> bool:
        """True when each worker steps dense parameters and the servers add the differences."""
        return self.serves_dense and self.mode != SYNC

    def without_places(self) -> Plan:
        """The plan without the settings that only choose between memory and files."""
        tables = [msgspec.structs.replace(table, memory=0) for table in self.tables]
        return msgspec.structs.replace(self, tables=tables, table_folder="")

    def digest(self) -> str:
        """A hash that is equal for equal plans."""
        return hashlib.sha256(msgspec.json.encode(self)).hexdigest()

    def table(self, name: str) -> int:
        """The number of the table of that name."""
        for number, table in enumerate(self.tables):
            if table.name == name:
                return number
        raise KeyError(name)


def first_difference(mine: Plan, theirs: Plan) -> str | None:
    """The first difference between two plans, with both values; None when they are equal."""
    for path, ours, others in _differences("plan", msgspec.to_builtins(mine), _plain(theirs)):
        return f"{path}: {ours!r} here, {others!r} there"
    return None


def _plain(plan: Plan) -> Any:
    return msgspec.to_builtins(plan)


def _differences(path: str, mine: Any, theirs: Any) -> Iterator[tuple[str, Any, Any]]:
    if isinstance(mine, dict) and isinstance(theirs, dict):
        for key in dict.fromkeys([*mine, *theirs]):
            yield from _differences(f"{path}.{key}", mine.get(key), theirs.get(key))
    elif isinstance(mine, list) and isinstance(theirs, list):
        yield from _list_differences(path, mine, theirs)
    elif mine != theirs:
        yield path, mine, theirs


def _list_differences(path: str, mine: list[Any], theirs: list[Any]) -> Iterator[Any]:
    """Compare named items by name, so that an additional table is one difference."""
    if all(isinstance(item, dict) and "name" in item for item in (*mine, *theirs)):
        ours, others = ({item["name"]: item for item in items} for items in (mine, theirs))
        for name in dict.fromkeys([*ours, *others]):
            if name not in ours or name not in others:
                yield f"{path}[{name}]", _presence(name in ours), _presence(name in others)
            else:
                yield from _differences(f"{path}[{name}]", ours[name], others[name])
    if len(mine) != len(theirs):
        yield f"{path}: number of entries", len(mine), len(theirs)
        return
    for number, (ours_, others_) in enumerate(zip(mine, theirs, strict=True)):
        yield from _differences(f"{path}[{number}]", ours_, others_)


def _presence(there: bool) -> str:
    return "present" if there else "absent"
