# SPDX-License-Identifier: Apache-2.0
"""What a program is made of before any pass: the recorder's graph, put in order."""

from __future__ import annotations

from torch import fx

from fleetlight.static.graph.form import Form
from fleetlight.static.graph.state import KINDS, Slot
from fleetlight.static.writing import tables
from fleetlight.static.writing.calls import Modules
from fleetlight.static.writing.open_sizes import from_feeds
from fleetlight.static.writing.recorder import Recorder
from fleetlight.torch_compat.tracing import rename


class Source:
    """A program while it is written."""

    def __init__(self) -> None:
        self.recorder = Recorder()
        self.modules = Modules(self.recorder)

    @property
    def version(self) -> object:
        """Something else after something has been written, or a size was looked at."""
        return self.recorder.version, len(self.recorder.shapes.found)

    def form(self) -> Form:
        """The graph with its inputs first: the state by kinds, then the feeds."""
        recorder = self.recorder
        entries = sorted(recorder.entries.values(), key=lambda e: KINDS.index(e.slot.kind))
        self.modules.name_state(self.modules.root)
        graph, nodes = fx.Graph(), {}
        for node in [e.node for e in entries] + [node for *_, node in recorder.feeds.values()]:
            nodes[node] = graph.node_copy(node)
        for entry in entries:
            _rename(nodes[entry.node], entry.slot)
        for node in recorder.graph.nodes:
            if node.op != "placeholder":
                nodes[node] = graph.node_copy(node, lambda n: nodes[n])
        from_feeds(graph, [nodes[node] for *_, node in recorder.feeds.values()])
        names = {name: nodes[node].name for name, node in recorder.names.items()}
        state = tuple(entry.slot for entry in entries)
        lookups = tables.named(recorder.lookups, self.modules.root)
        return Form(graph, state, tuple(recorder.taken()), names, lookups=lookups)


def _rename(node: fx.Node, slot: Slot) -> None:
    """A name that says what the input is."""
    plain = f"{slot.name}_{slot.kind}" if slot.kind in ("rate", "weight") else slot.name
    rename(node, "".join(c if c.isalnum() else "_" for c in f"p_{plain}"))
