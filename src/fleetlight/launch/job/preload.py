# SPDX-License-Identifier: Apache-2.0
"""Which modules a template may load before it forks the processes of a job.

Only a script that loads torch before it can have set a variable or a path, in processes whose
variables differ in their role alone, behaves as if each process loaded torch itself.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator, Mapping, Sequence

from fleetlight.launch.job.environment import Run

#: variables that differ between the processes of a job; torch and numba read none when they load
_ROLE = re.compile(r"FLEET_\w+|RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|MASTER_ADDR|MASTER_PORT")
#: packages that a script may import before torch
_HARMLESS = sys.stdlib_module_names | {"numpy", "fleetlight"}
#: Preload these instead of `fleet.api`, which reads the role at import.
_FLEET = (
    "fleetlight.fleet.lifecycle",
    "fleetlight.fleet.bootstrap",
    "fleetlight.fleet.collective.job",
    "fleetlight.fleet.public.nn",
    "fleetlight.checkpoint.api",
    "fleetlight.data.public",
    "fleetlight.fleet.public.inference",
    "fleetlight.fleet.checkpoints.persistables",
)


def modules_to_preload(run: Run, environments: Sequence[Mapping[str, str]]) -> tuple[str, ...]:
    """The modules; none where a template could change how the script behaves, or saves nothing."""
    job = run.job
    if not job.preload or job.is_module or job.machine.rendezvous or job.machine.devices:
        return ()
    if len(environments) < 2 or not _differ_in_role(environments) or not _hook_runs():
        return ()
    try:
        with open(job.script, "rb") as file:
            text = file.read()
        source = ast.parse(text)
    except (OSError, SyntaxError, ValueError):
        return ()
    # numba reads its variables when it loads, which may be later in the script
    return _modules(source, uses_numba=bool(run.layout.servers) and b"NUMBA" not in text)


def _hook_runs() -> bool:
    flags = sys.flags
    return sys.platform == "linux" and not (flags.ignore_environment or flags.no_site)


def _differ_in_role(environments: Sequence[Mapping[str, str]]) -> bool:
    common = set.intersection(*(set(one.items()) for one in environments))
    different = {name for one in environments for name, _ in one.items() - common}
    return all(map(_ROLE.fullmatch, different))


def _modules(source: ast.Module, *, uses_numba: bool) -> tuple[str, ...]:
    """Those that the script imports: torch if it comes early enough, and fleetlight with it."""
    if "torch" not in _first_imports(source.body):
        return ()
    everywhere = {name for node in ast.walk(source) for name in _imported(node)}
    if "fleetlight" not in everywhere:
        return ("torch",)
    return ("torch", *_FLEET, *(("numba",) if uses_numba else ()))


def _first_imports(body: Sequence[ast.stmt]) -> Iterator[str]:
    """The packages imported by the first statements, while these can change nothing for torch."""
    for statement in body:
        names = _imported(statement)
        yield from names
        is_text = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
        if not is_text and not (names and names <= _HARMLESS):
            return


def _imported(node: ast.AST) -> set[str]:
    """The packages that a statement imports."""
    if isinstance(node, ast.Import):
        return {alias.name.partition(".")[0] for alias in node.names}
    if isinstance(node, ast.ImportFrom) and node.module and not node.level:
        return {node.module.partition(".")[0]}
    return set()
