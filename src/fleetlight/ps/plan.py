# SPDX-License-Identifier: Apache-2.0
"""`Plan`: what is trained, as every process of the job must see it. Pure data.

Servers and workers build it from the same script. Their plans are compared when a worker joins, and
the first difference is named, so that nobody trains on somebody else's idea of a table.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import msgspec

#: the modes of training with parameter servers
SYNC, ASYNC, GEO = "sync", "async", "geo"


class RulePlan(msgspec.Struct, frozen=True):
    """How the rows of a table are updated; learning rate and the like come with each push."""

    name: str
    options: dict[str, float]


class InitializerPlan(msgspec.Struct, frozen=True):
    """What a row is when it is first seen: `kind` with its two numbers."""

    kind: str
    a: float = 0.0
    b: float = 0.0


class EntryPlan(msgspec.Struct, frozen=True):
    """Which ids get a row that is trained, and what is counted of them."""

    kind: str
    value: float = 0.0


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
    #: True when its rule is element by element, so that a parameter may be cut into pieces
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
    #: what of a server outlives it: none | snapshot | log
    durability: str = "none"
    #: what the others do when a worker is lost: fail | go_on
    lost_worker: str = "fail"

    @property
    def workers_step_dense(self) -> bool:
        """True where each worker steps dense parameters, and the servers add what it learns."""
        return self.serves_dense and self.mode != SYNC

    def digest(self) -> str:
        """Equal for equal plans, whoever built them."""
        return hashlib.sha256(msgspec.json.encode(self)).hexdigest()

    def table(self, name: str) -> int:
        """The number of a table; KeyError where there is none of that name."""
        for number, table in enumerate(self.tables):
            if table.name == name:
                return number
        raise KeyError(name)


def first_difference(mine: Plan, theirs: Plan) -> str | None:
    """Where two plans differ first, with both values; None when they are equal."""
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
    """Named things are compared by name, so that one more table is told as just that."""
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
