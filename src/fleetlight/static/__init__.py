# SPDX-License-Identifier: Apache-2.0
"""Static programs: a training step captured once, rewritten by passes, run by name.

Modules load when one of their names is first used, since eager training needs none.

`static` has training steps as programs: one graph for forward, backward and the optimizer's step,
with the state that it changes in place. Users call `program.py`, `definition.py` (`data`,
`program_guard`, `minimize`), `capturing.py`, `executor.py`, `loaders.py` and `inference.py`.
Rooms: `writing/` makes graphs, `passes/` rewrites them, `coding/` and `running/` make steps of
them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fleetlight.static.capturing import capture
    from fleetlight.static.definition import (
        accuracy,
        data,
        default_main_program,
        default_startup_program,
        minimize,
        program_guard,
    )
    from fleetlight.static.executor import Executor
    from fleetlight.static.inference import inference_module
    from fleetlight.static.loaders import EndOfData, bind
    from fleetlight.static.program import Program, load_program
    from fleetlight.strategy import ExecutionStrategy

#: names that only Fleet has, and what to write instead
_ABSENT = {
    "BuildStrategy": "its switches fuse operators: static.Executor(compile='inductor') does that; "
    "leave strategy.build_strategy out",
    "CompiledProgram": "a program runs as it is: executor.run(program)",
    "global_scope": "values are in the model and the optimizer: model.state_dict()",
    "nn": "every module and function of torch builds a program: torch.nn.Linear(784, 128)(x)",
    "cpu_places": "leave it out: the device of a program is that of its model",
    "cuda_places": "leave it out: the device of a program is that of its model",
}

#: the module of each public name
_PLACES = {
    "EndOfData": "loaders",
    "ExecutionStrategy": "fleetlight.strategy",
    "Executor": "executor",
    "Program": "program",
    "accuracy": "definition",
    "bind": "loaders",
    "capture": "capturing",
    "data": "definition",
    "default_main_program": "definition",
    "default_startup_program": "definition",
    "inference_module": "inference",
    "load_program": "program",
    "minimize": "definition",
    "program_guard": "definition",
}

__all__ = [
    "EndOfData",
    "ExecutionStrategy",
    "Executor",
    "Program",
    "accuracy",
    "bind",
    "capture",
    "data",
    "default_main_program",
    "default_startup_program",
    "inference_module",
    "load_program",
    "minimize",
    "program_guard",
]


if not TYPE_CHECKING:  # mypy must know the names above, and no others

    def __getattr__(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"module 'fleetlight.static' has no attribute {name!r}")
        from fleetlight.errors import did_you_mean

        if name in _ABSENT:
            raise AttributeError(f"static.{name} is not part of Fleetlight: {_ABSENT[name]}")
        if name not in _PLACES:
            near = did_you_mean(name, __all__)
            raise AttributeError(f"module 'fleetlight.static' has no attribute {name!r}; {near}")
        place = _PLACES[name]
        module = importlib.import_module(place if "." in place else f"fleetlight.static.{place}")
        value = globals()[name] = getattr(module, name)
        return value


def __dir__() -> list[str]:
    own = {name for name in globals() if name.startswith("__")}
    return sorted({*own, *__all__})
