# SPDX-License-Identifier: Apache-2.0
"""Which of the tasks of an engine are servers and which are workers. Pure."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import re
from collections.abc import Sequence
from typing import Literal

from fleetlight.roles.role import Kind

#: how an engine numbers tasks: node after node, or one task of each node in turn
Distribution = Literal["block", "cyclic"]
#: servers evenly over the nodes, or the first tasks
ServerRule = Literal["spread", "pack"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskPlace:
    """What one task of the job is, and where."""

    kind: Kind
    index: int
    #: among the tasks of the same kind on the node
    local_rank: int
    local_size: int
    node_rank: int
    node_num: int
    #: among all tasks on the node
    local_task: int


def places_of(
    tasks: Sequence[int], distribution: Distribution, servers: int, rule: ServerRule
) -> list[TaskPlace]:
    """The place of each task, by its number; `tasks` has the number of tasks of each node.

    Servers are the first tasks of a node, and task 0 is server 0.
    """
    nodes = _nodes(tasks, distribution)
    if rule == "pack":
        are_servers = [task < servers for task in range(len(nodes))]
    else:
        shares = _shares(tasks, servers)
        are_servers = [local < shares[node] for node, local in nodes]
    kinds = [Kind.SERVER if is_server else Kind.WORKER for is_server in are_servers]
    keys = [(kind, node) for kind, (node, _) in zip(kinds, nodes, strict=True)]
    sizes = collections.Counter(keys)
    places, before = [], collections.Counter[object]()
    for kind, key, (node, local_task) in zip(kinds, keys, nodes, strict=True):
        place = TaskPlace(
            kind=kind,
            index=before[kind],
            local_rank=before[key],
            local_size=sizes[key],
            node_rank=node,
            node_num=len(tasks),
            local_task=local_task,
        )
        places.append(place)
        before.update((kind, key))
    return places


def _nodes(tasks: Sequence[int], distribution: Distribution) -> list[tuple[int, int]]:
    """The node of each task, and its number there."""
    by_node = [[(node, local) for local in range(count)] for node, count in enumerate(tasks)]
    if distribution == "block":
        return list(itertools.chain.from_iterable(by_node))
    rounds = itertools.zip_longest(*by_node)
    return [found for row in rounds for found in row if found is not None]


def _shares(tasks: Sequence[int], servers: int) -> list[int]:
    """The number of servers of each node: one for each in turn, while it has tasks left."""
    shares = [0] * len(tasks)
    turns = _nodes(tasks, "cyclic")
    for node, _ in turns[:servers]:
        shares[node] += 1
    return shares


def runs(text: str) -> list[tuple[int, int]] | None:
    """(tasks of a node, number of such nodes), from a run-length list such as `2(x3),1`."""
    matches = [re.fullmatch(r"(\d{1,9})(?:\(x(\d{1,9})\))?", part) for part in text.split(",")]
    found = [(int(match[1]), int(match[2] or 1)) for match in matches if match is not None]
    return found if len(found) == len(matches) else None


def expanded(text: str, total: int | None = None) -> list[int] | None:
    """The tasks of each node from such a list; None if it is none, or has another `total`."""
    found = runs(text)
    if found is None or total not in (None, sum(count * nodes for count, nodes in found)):
        return None
    return [count for count, nodes in found for _ in range(nodes)]
