# SPDX-License-Identifier: Apache-2.0
"""The ids program: the part of a graph that computes the ids of lookups."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import fx

from fleetlight.errors import PlanError
from fleetlight.static.graph.aliases import base_of, changed_by
from fleetlight.static.graph.feeds import Feed
from fleetlight.static.graph.form import Form
from fleetlight.static.graph.lookups import LOOK_UP, LookupInputs, LookupPull
from fleetlight.static.graph.state import Slot
from fleetlight.static.ops.marks import without_marks

#: arguments of a lookup: weight, ids, offsets, per-sample weights, shows, clicks, number
WEIGHT, IDS, OFFSETS, EACH, SHOW, CLICK, NUMBER = range(7)
_GIVEN = (IDS, OFFSETS, SHOW, CLICK)
#: kinds of state that are known before a run
_KNOWN = ("constant", "buffer")


class IdsProgram:
    """Cut from the graph of a form; refuses ids that depend on more than feeds."""

    def __init__(self, form: Form, graph: fx.Graph) -> None:
        self._form = form
        self._inputs = [node for node in graph.nodes if node.op == "placeholder"]
        self._lookups = [node for node in graph.nodes if node.target is LOOK_UP]
        self._changing = [node for node in graph.nodes if any(True for _ in changed_by(node))]
        self._needed: set[fx.Node] = set()
        for lookup in self._lookups:
            for value in _given(lookup):
                self._need(value, lookup)
            self._need_changes(lookup)
        found = self._cut(graph)
        given: list[Slot | Feed] = [*form.state, *form.feeds]
        inputs = zip(self._inputs, given, strict=True)
        #: its inputs
        self.needs = tuple(one for node, one in inputs if node in self._needed)
        self.module = fx.GraphModule(torch.nn.Module(), found)

    def _need(self, node: fx.Node, lookup: fx.Node) -> None:
        """Add a node and everything that it depends on."""
        stack = [node]
        while stack:
            node = stack.pop()
            if node not in self._needed:
                self._refuse(node, lookup)
                self._needed.add(node)
                stack += node.all_input_nodes

    def _need_changes(self, lookup: fx.Node) -> None:
        """Add the nodes before a lookup that change memory of needed nodes."""
        while True:
            bases = {base_of(node) for node in self._needed}
            more = [c for c in self._changing if c < lookup and c not in self._needed]
            more = [changing for changing in more if bases & _changed(changing)]
            for changing in more:
                self._need(changing, lookup)
            if not more:
                return

    def _refuse(self, node: fx.Node, lookup: fx.Node) -> None:
        reason = self._reason(node)
        if reason is not None:
            name = lookup.meta.get("module") or self._form.lookups[_number(lookup)].table
            raise PlanError(
                f"{name}: its ids are computed from {reason}; expected feeds alone, since the "
                "rows are pulled before anything else is computed. Feed the ids, or compute "
                "them from feeds"
            )

    def _reason(self, node: fx.Node) -> str | None:
        """Why a node is not known before a run, or None."""
        if node.target is LOOK_UP:
            return f"rows of the table {self._form.lookups[_number(node)].table}"
        if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            return f"random numbers ({node.name})"
        is_input = node.op == "placeholder"
        if is_input and any(node in _changed(changing) for changing in self._changing):
            return f"{node.name}, which the program changes"
        place = self._inputs.index(node) if is_input else len(self._form.state)
        if place < len(self._form.state) and self._form.state[place].kind not in _KNOWN:
            return f"the {self._form.state[place]}"
        return None

    def _cut(self, graph: fx.Graph) -> fx.Graph:
        """A graph of the needed nodes, with the inputs of each lookup as outputs."""
        cut = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        changes = any(node in self._needed for node in self._changing)
        found: list[fx.Node] = []
        self._wanted: dict[int, LookupInputs] = {}
        for node in graph.nodes:
            if node in self._needed:
                copies[node] = cut.node_copy(node, copies.__getitem__)
            elif node.target is LOOK_UP and _number(node) not in self._wanted:
                places = [self._place(cut, node.args[a], copies, changes, found) for a in _GIVEN]
                self._wanted[_number(node)] = self._as_wanted(node, places)
        cut.output(found)
        without_marks(cut)
        return cut

    def _place(
        self,
        cut: fx.Graph,
        value: object,
        copies: dict[fx.Node, fx.Node],
        changes: bool,
        found: list[fx.Node],
    ) -> int | None:
        """The index of an output; lookups with the same input share it."""
        if not isinstance(value, fx.Node):
            return None
        output = copies[value]
        if changes:
            # later operations may change it in place
            output = cut.call_function(torch.ops.aten.clone.default, (output,))
        if output not in found:
            found.append(output)
        return found.index(output)

    def _as_wanted(self, node: fx.Node, places: Sequence[int | None]) -> LookupInputs:
        ids, offsets, show, click = places
        assert ids is not None
        return LookupInputs(_number(node), ids, offsets, show, click, node.args[EACH] is not None)

    def pulls(self) -> Iterator[LookupPull]:
        """One pull for each table, in the order of first lookups."""
        tables: dict[str, list[LookupInputs]] = {}
        for number, wanted in self._wanted.items():
            tables.setdefault(self._form.lookups[number].table, []).append(wanted)
        for table, of_table in tables.items():
            yield LookupPull(table, tuple(of_table))


def _given(lookup: fx.Node) -> Iterator[fx.Node]:
    for place in _GIVEN:
        value = lookup.args[place]
        if isinstance(value, fx.Node):
            yield value


def _changed(node: fx.Node) -> set[fx.Node]:
    return {base_of(changed) for changed in changed_by(node)}


def _number(lookup: fx.Node) -> int:
    number = lookup.args[NUMBER]
    assert isinstance(number, int)
    return number
