# SPDX-License-Identifier: Apache-2.0
"""`split_ps`: splits a program with lookups into the ids program and the training graph.

Between them the worker pulls rows from the parameter servers, and after them it pushes gradients.
All lookups of a table share one pull and one push.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from fleetlight.errors import PlanError, counted
from fleetlight.static.graph.form import Form
from fleetlight.static.graph.lookups import (
    EACH_GRADIENT,
    LOOK_UP,
    ROWS,
    TABLE_GRADIENT,
    LookupPull,
    Split,
)
from fleetlight.static.graph.state import Slot
from fleetlight.static.ops.marks import GRADIENT
from fleetlight.static.ops.rows import GATHER_BAGS, GATHER_ROWS, SUM_BAGS, SUM_ROWS, WEIGH_BAGS
from fleetlight.static.rewriting.registry import PassRecord
from fleetlight.static.rewriting.table_ids import EACH, IDS, NUMBER, IdsProgram
from fleetlight.torch_compat.fakes import open_fake

_aten = torch.ops.aten
#: the operation that may be between the gradients of lookups and the optimizer
_ADD = _aten.add.Tensor
_PLACES = torch.int32
_ALIASES = (_aten.alias.default, _aten.detach.default)


@dataclasses.dataclass(frozen=True)
class SplitPS:
    """Makes rows inputs of the training graph, and their gradients outputs."""

    name: str = dataclasses.field(default="split_ps", init=False)

    def __call__(self, form: Form) -> Form:
        """The form with replaced lookups."""
        graph, _ = form.copied()
        if form.split is not None:
            return form.rewritten(graph, "is split already")
        _refuse_other_uses(form, graph)
        ids = IdsProgram(form, graph)
        writer, pushes = _Writer(form, graph), {}
        pulls = tuple(writer.take_rows(pull) for pull in ids.pulls())
        writer.replace_lookups()
        for pull in pulls:
            mark = writer.push(pull)
            if mark is not None:
                pushes[pull.table] = mark.name
        writer.drop_replaced()
        count = sum(len(pull.wanted) for pull in pulls)
        report = f"{counted(len(pulls), 'table')}, {counted(count, 'lookup')}"
        report += f"; pull {len(pulls)}, push {len(pushes)}"
        split = Split(ids.module, ids.needs, pulls, pushes)
        slots = [slot for pull in pulls for slot in pull.slots]
        return form.rewritten(graph, report, split=split, state=(*form.state, *slots))


class _Writer:
    """Rewrites the training graph."""

    def __init__(self, form: Form, graph: fx.Graph) -> None:
        self._graph = graph
        self._lookups = form.lookups
        #: the first node after the state
        self._after_state = list(graph.nodes)[len(form.state)]
        #: by number of the lookup: its rows, row indices, and bounds of bags
        self._inputs: dict[int, tuple[fx.Node, ...]] = {}
        #: by number of the lookup: the row index of each maximum
        self._chosen: dict[int, fx.Node] = {}

    def take_rows(self, pull: LookupPull) -> LookupPull:
        """Add the rows of a pull to the state; return the pull with its slots."""
        looked = {n.args[NUMBER]: n for n in self._graph.nodes if n.target is LOOK_UP}
        first = looked[pull.wanted[0].number].meta["val"]
        value = _open(first, (None, first.shape[-1]), torch.float32)
        rows, slot = self._input(f"rows of {pull.table}", value)
        slots = [slot]
        for number in (wanted.number for wanted in pull.wanted):
            ids = looked[number].args[IDS].meta["val"]
            # beside the rows, which may be on another device than the ids
            if self._lookups[number].mode == ROWS:
                with ids.fake_mode:
                    values = {"places": torch.empty(ids.shape, dtype=_PLACES, device=first.device)}
            else:
                values = {"places": _open(first, (None,), _PLACES)}
                values["bounds"] = _open(first, (None,), torch.int64)
            inputs = [self._input(f"{name} {number}", value) for name, value in values.items()]
            self._inputs[number] = rows, *(node for node, _ in inputs)
            slots += [slot for _, slot in inputs]
        return dataclasses.replace(pull, slots=tuple(slots))

    def _input(self, name: str, value: Tensor) -> tuple[fx.Node, Slot]:
        with self._graph.inserting_before(self._after_state):
            node = self._graph.placeholder("_".join(["p", *name.replace(".", " ").split()]))
        node.meta.update(val=value, part="forward", module="")
        empty = torch.empty([0] * value.dim(), dtype=value.dtype, device=value.device)
        return node, Slot("pulled", name, empty)

    def replace_lookups(self) -> None:
        """Compute lookups and gradients of per-sample weights from the rows."""
        for node in list(self._graph.nodes):
            if node.target is LOOK_UP:
                gathered = self._gathered(node)
                node.replace_all_uses_with(gathered)
                self._graph.erase_node(node)
                # fetches may use this name
                gathered.name = node.name
        for node in list(self._graph.nodes):
            if node.target is EACH_GRADIENT:
                gradient, each, number = node.args
                given = gradient, *self._inputs[number], each
                node.replace_all_uses_with(self._call(node, WEIGH_BAGS, given, node.meta["val"]))
                self._graph.erase_node(node)

    def _gathered(self, node: fx.Node) -> fx.Node:
        number: Any = node.args[NUMBER]
        value, mode, inputs = node.meta["val"], self._lookups[number].mode, self._inputs[number]
        if mode == ROWS:
            return self._call(node, GATHER_ROWS, (*inputs, value.dtype), value)
        given = *inputs, node.args[EACH], mode, value.dtype
        with value.fake_mode:
            shape = value.shape if mode == "max" else [0]
            choices = torch.empty(shape, dtype=_PLACES, device=value.device)
        both = self._call(node, GATHER_BAGS, given, (value, choices))
        chosen = self._call(node, operator.getitem, (both, 1), choices)
        self._chosen.setdefault(number, chosen)
        return self._call(node, operator.getitem, (both, 0), value)

    def push(self, pull: LookupPull) -> fx.Node | None:
        """Sum the gradients of a table; return their mark, or None if no row learns."""
        numbers = {wanted.number for wanted in pull.wanted}
        found = [
            node
            for node in self._graph.nodes
            if node.target is TABLE_GRADIENT and node.args[3] in numbers
        ]
        marks = sorted({mark for node in found for mark in _marks_of(node, pull.table)})
        if not marks:
            return None
        mark = marks[0]
        gradient = self._summed(mark, [node for node in found if _reaches(node, marks)])
        mark.args = gradient, mark.args[1]
        mark.meta["val"] = gradient.meta["val"]
        return mark

    def _summed(self, mark: fx.Node, found: Sequence[fx.Node]) -> fx.Node:
        """The gradient of the rows of a table, from those of its lookups."""
        rows = self._inputs[found[0].args[3]][0]  # type: ignore[index]
        sums = []
        plain = [n for n in found if self._lookups[n.args[3]].mode == ROWS]  # type: ignore[index]
        if plain:
            places = [self._inputs[n.args[3]][1] for n in plain]  # type: ignore[index]
            given = [n.args[0] for n in plain], places, rows
            sums.append(self._call(mark, SUM_ROWS, given, rows.meta["val"]))
        for node in (n for n in found if n not in plain):
            sums.append(self._summed_bags(mark, node))
        total = sums[0]
        for one in sums[1:]:
            total = self._call(mark, _ADD, (total, one), rows.meta["val"])
        return total

    def _summed_bags(self, mark: fx.Node, node: fx.Node) -> fx.Node:
        gradient, _, each, number = node.args
        assert isinstance(number, int)
        rows, mode = self._inputs[number][0], self._lookups[number].mode
        given = gradient, *self._inputs[number], each, mode, self._chosen[number]
        return self._call(mark, SUM_BAGS, given, rows.meta["val"])

    def drop_replaced(self) -> None:
        """Remove the gradients of lookups and their sums."""
        gradients = {node for node in self._graph.nodes if node.target is TABLE_GRADIENT}
        replaced = gradients | {user for node in gradients for user in _all_users(node)}
        for node in reversed(self._graph.nodes):
            if node in replaced and not node.users:
                self._graph.erase_node(node)

    def _call(self, node: fx.Node, target: Any, args: Any, value: Any) -> fx.Node:
        """Insert a call before a node, with its part and module."""
        with self._graph.inserting_before(node):
            made = self._graph.call_function(target, args)
        made.meta.update(part=node.meta.get("part"), module=node.meta.get("module"), val=value)
        return made


def _all_users(node: fx.Node) -> Iterator[fx.Node]:
    for user in node.users:
        yield user
        yield from _all_users(user)


def _marks_of(node: fx.Node, table: str) -> Iterator[fx.Node]:
    """The marks that the gradient of a lookup reaches, even through sums."""
    for user in node.users:
        if user.target is GRADIENT:
            yield user
        elif user.target is _ADD or user.target in _ALIASES:
            yield from _marks_of(user, table)
        else:
            raise PlanError(
                f"the gradient of the table {table} is used by {user.name}; the gradients of "
                "tables go to the parameter servers only, which have the rows"
            )


def _reaches(node: fx.Node, marks: Any) -> bool:
    return any(user in marks for user in _all_users(node))


def _refuse_other_uses(form: Form, graph: fx.Graph) -> None:
    """Refuse other uses of a table's weight, which has no elements once its rows are on servers."""
    numbers = {id(lookup.layer.weight): n for n, lookup in enumerate(form.lookups)}
    for slot, node in zip(form.state, graph.nodes, strict=False):
        number = numbers.get(id(slot.tensor))
        for user in node.users if number is not None else ():
            if user.target not in (LOOK_UP, TABLE_GRADIENT):
                raise PlanError(
                    f"{slot.name}: its rows are on the parameter servers, but {user.name} in "
                    f"{user.meta.get('module') or 'the program'} uses it too; build the layer with "
                    "sparse=False to keep it on the workers"
                )


def _open(like: Any, shape: Sequence[Any], dtype: torch.dtype) -> Tensor:
    """A fake tensor; sizes of None are dynamic."""
    example = torch.empty([size or 23 for size in shape], dtype=dtype, device=like.device)
    fake: Tensor = open_fake(like.fake_mode, example, [size is None for size in shape])
    return fake


PASS = PassRecord(
    SplitPS.name,
    lambda request: SplitPS() if request.with_servers else None,
    after=("gradient_merge",),
)
