# SPDX-License-Identifier: Apache-2.0
"""What comes into a program from outside: feeds, and rows of tables."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

from torch import fx

from fleetlight.static.drawing.levels import plain_name
from fleetlight.static.drawing.words import counted
from fleetlight.static.graph.feeds import Feed
from fleetlight.static.graph.form import Form
from fleetlight.static.graph.sizes import Sizes, plain

#: more than these are drawn together with those like them
_MOST = 6


@dataclasses.dataclass(frozen=True)
class Wire:
    """A value that goes from one place to another, by their numbers from the top down."""

    source: int
    target: int
    label: str = ""
    full: str = ""


@dataclasses.dataclass(frozen=True)
class Entry:
    """A feed, or the rows of a table, or several alike."""

    title: str
    label: str
    full: str
    is_table: bool = False


@dataclasses.dataclass(frozen=True)
class _Source:
    """An entry, and who looks at it: nodes of the graph, or names of feeds that it looks at."""

    entry: Entry
    users: tuple[fx.Node, ...]
    feeds: frozenset[str]


def entries_of(
    form: Form, place: Mapping[fx.Node, int], sizes: Sizes
) -> tuple[tuple[Entry, ...], tuple[Wire, ...]]:
    """Feeds, then tables, each with wires to what reads it; stages are counted behind them."""
    inputs = [node for node in form.graph.nodes if node.op == "placeholder"]
    feeds = list(_feeds(form, inputs[len(form.state) :], sizes))
    # the one that the first stage takes comes last, so that it stands right above
    feeds.sort(key=lambda source: 0 in _read(source, place))
    sources = [*feeds, *_tables(form, inputs)]
    wires = []
    for number, source in enumerate(sources):
        stages = sorted(_read(source, place))
        wires += [Wire(number, len(sources) + stage, full=source.entry.full) for stage in stages]
        asked = [n for n, s in enumerate(sources) if s.entry.is_table and s.feeds & source.feeds]
        wires += [] if source.entry.is_table else [Wire(number, target) for target in asked]
    return tuple(source.entry for source in sources), tuple(wires)


def _read(source: _Source, place: Mapping[fx.Node, int]) -> set[int]:
    return {
        place[user] for user in source.users if user in place and plain_name(user) != "sym_size"
    }


def _feeds(form: Form, nodes: Sequence[fx.Node], sizes: Sizes) -> Iterator[_Source]:
    groups: dict[object, list[tuple[Feed, fx.Node]]] = {}
    for feed, node in zip(form.feeds, nodes, strict=True):
        alike = (feed.shape, feed.dtype) if len(nodes) > _MOST else feed.name
        groups.setdefault(alike, []).append((feed, node))
    for group in groups.values():
        (feed, first), *others = group
        title = f"{feed.name} and {len(others)} more" if others else feed.name
        label = f"{plain(feed.dtype)}  {shape_of(first, sizes)}"
        users = tuple(user for _, node in group for user in node.users)
        entry = Entry(title, label, "\n".join(str(feed) for feed, _ in group))
        yield _Source(entry, users, frozenset(feed.name for feed, _ in group))


def _tables(form: Form, inputs: Sequence[fx.Node]) -> Iterator[_Source]:
    """Rows that are pulled from parameter servers, by the ids in some feeds."""
    if form.split is None or not form.split.pulls:
        return
    needs = frozenset(need.name for need in form.split.needs if isinstance(need, Feed))
    node_of = dict(zip((id(slot) for slot in form.state), inputs, strict=False))
    pulls = form.split.pulls
    groups = [[pull] for pull in pulls] if len(pulls) <= _MOST else [list(pulls)]
    for group in groups:
        lookups = counted(sum(len(pull.wanted) for pull in group), "lookup")
        title = f"pull {group[0].table}" if len(group) == 1 else f"pull {len(group)} tables"
        slots = [slot for pull in group for slot in pull.slots]
        users = [user for slot in slots for user in node_of[id(slot)].users]
        full = "\n".join(["rows from the parameter servers", *(pull.table for pull in group)])
        yield _Source(Entry(title, lookups, full, is_table=True), tuple(users), needs)


def shape_of(node: fx.Node, sizes: Sizes) -> str:
    """`batch × 64 × 8 × 8`."""
    return " × ".join(map(sizes.text, node.meta["val"].shape)) or "one number"
