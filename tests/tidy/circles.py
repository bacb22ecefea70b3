# SPDX-License-Identifier: Apache-2.0
"""Circles among imports at run time: those inside functions count, those for types alone do not."""

from __future__ import annotations

import ast
from collections.abc import Container, Iterable, Iterator, Mapping
from pathlib import Path

from tests.tidy.sources import PACKAGE

Graph = dict[str, set[str]]


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(modules: Mapping[str, ast.Module]) -> Graph:
    """For each module the other modules that its import statements name."""
    return {
        name: {target for target in imported(at_run_time(tree), modules) if target != name}
        for name, tree in modules.items()
    }


def imported(nodes: Iterable[ast.AST], modules: Container[str]) -> Iterator[str]:
    """The modules that import statements among the nodes name."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules)
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                target = name if name in modules else node.module
                if target in modules:
                    yield target


def at_run_time(tree: ast.AST) -> Iterator[ast.AST]:
    """Each node that no `if TYPE_CHECKING` encloses."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            yield from (deep for other in node.orelse for deep in (other, *at_run_time(other)))
        else:
            yield node
            yield from at_run_time(node)


def strong_components(graph: Graph) -> list[list[str]]:
    """Groups of more than one node in which each reaches each (Kosaraju's algorithm)."""
    back: Graph = {node: set() for node in graph}
    for node, targets in graph.items():
        for target in targets:
            back[target].add(node)
    order = [node for group in forest(graph, sorted(graph)) for node in group]
    groups = forest(back, reversed(order))
    return sorted(sorted(group) for group in groups if len(group) > 1)


def forest(graph: Graph, roots: Iterator[str] | list[str]) -> Iterator[list[str]]:
    """Trees that cover the graph from the roots, each with its nodes in postorder."""
    seen: set[str] = set()
    for root in roots:
        if root not in seen:
            yield postorder(graph, root, seen)


def postorder(graph: Graph, root: str, seen: set[str]) -> list[str]:
    seen.add(root)
    done, path = [], [(root, iter(sorted(graph[root])))]
    while path:
        node, targets = path[-1]
        target = next((each for each in targets if each not in seen), None)
        if target is None:
            done.append(node)
            path.pop()
        else:
            seen.add(target)
            path.append((target, iter(sorted(graph[target]))))
    return done
