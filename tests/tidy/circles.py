# SPDX-License-Identifier: Apache-2.0
"""Circles among imports, wherever the statement stands: in a function, or for types alone."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

from tests.tidy.sources import PACKAGE, SOURCES, parsed

Graph = dict[str, set[str]]


def circles() -> list[list[str]]:
    """Groups of modules that import each other, directly or through others."""
    return strong_components(imports({module_name(path): parsed(path) for path in SOURCES}))


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(modules: Mapping[str, ast.Module]) -> Graph:
    """For each module the other modules that its import statements name."""
    return {
        name: {target for target in imported(tree, modules) if target != name}
        for name, tree in modules.items()
    }


def imported(tree: ast.Module, modules: Mapping[str, ast.Module]) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules)
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                target = name if name in modules else node.module
                if target in modules:
                    yield target


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
