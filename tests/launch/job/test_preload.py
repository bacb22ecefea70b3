# SPDX-License-Identifier: Apache-2.0
"""Which scripts and jobs may start from a template."""

import dataclasses
import os
import pathlib
import subprocess
import sys
from typing import Any

import pytest

from fleetlight.launch.job.environment import Run
from fleetlight.launch.job.layout import JobLayout, Node
from fleetlight.launch.job.preload import modules_to_preload
from fleetlight.launch.job.spec import JobSpec, MachineSpec, RendezvousSpec

HERE = "127.0.0.1"
ROLES: tuple[dict[str, str], ...] = ({"A": "1", "RANK": "0"}, {"A": "1", "FLEET_INDEX": "1"})


def modules(
    folder: pathlib.Path, script: str, *, environments: Any = ROLES, servers: int = 0, **job: Any
) -> tuple[str, ...]:
    file = folder / "train.py"
    file.write_text(script)
    node = Node(host=HERE, workers=((HERE, 1),) * 2, servers=((HERE, 3),) * servers)
    spec = dataclasses.replace(JobSpec(script=str(file)), **job)
    run = Run(job=spec, layout=JobLayout(nodes=(node,)), log_dir="", error_dir="")
    return modules_to_preload(run, environments)


@pytest.mark.parametrize(
    "script",
    [
        "import torch",
        "import torch.nn as nn",
        "from torch import nn",
        "'''Text.'''\nfrom __future__ import annotations\nimport os\nimport torch\nimport other",
        "import numpy as np\nimport torch",
    ],
)
def test_script_that_loads_torch_first(tmp_path: pathlib.Path, script: str) -> None:
    assert modules(tmp_path, script) == ("torch",)


@pytest.mark.parametrize(
    "script",
    [
        "",
        "print(1)",
        "import os\nos.environ['TORCH_LOGS'] = 'all'\nimport torch",
        "import sys\nsys.path.insert(0, 'here')\nimport torch",
        "import mine\nimport torch",
        "from . import mine\nimport torch",
        "try:\n    import torch\nexcept ImportError:\n    pass",
        "def main():\n    import torch",
        "if True:\n    import torch",
        "import torch if",
        "import torchvision",
        "\0",
    ],
)
def test_script_that_may_do_something_before(tmp_path: pathlib.Path, script: str) -> None:
    assert modules(tmp_path, script) == ()


@pytest.mark.parametrize("use", ["import fleetlight as fleet", "def f():\n    import fleetlight"])
def test_script_that_uses_fleetlight(tmp_path: pathlib.Path, use: str) -> None:
    script = f"import torch\nx = 1\n{use}\n"
    assert modules(tmp_path, script)[:2] == ("torch", "fleetlight.fleet.lifecycle")
    assert "numba" not in modules(tmp_path, script)
    assert "numba" in modules(tmp_path, script, servers=1)


def test_script_that_sets_variables_of_numba_loads_it_itself(tmp_path: pathlib.Path) -> None:
    script = "import torch, os\nos.environ['NUMBA_NUM_THREADS'] = '1'\nimport fleetlight\n"
    assert "numba" not in modules(tmp_path, script, servers=1)


@pytest.mark.parametrize(
    "job",
    [
        {"preload": False},
        {"is_module": True},
        {"machine": MachineSpec(devices=(0, 1))},
        {
            "machine": MachineSpec(
                rendezvous=RendezvousSpec(master=(HERE, 1), min_nodes=2, max_nodes=2)
            )
        },
    ],
)
def test_job_that_starts_each_process_by_itself(tmp_path: pathlib.Path, job: Any) -> None:
    assert modules(tmp_path, "import torch")
    assert modules(tmp_path, "import torch", **job) == ()


@pytest.mark.parametrize(
    "environments",
    [
        [{"RANK": "0"}],
        [{"OMP_NUM_THREADS": "1"}, {"OMP_NUM_THREADS": "2"}],
        [{"RANK": "0"}, {"RANK": "1", "TORCH_LOGS": "all"}],
    ],
)
def test_processes_that_differ_in_more_than_their_role(
    tmp_path: pathlib.Path, environments: list[dict[str, str]]
) -> None:
    assert modules(tmp_path, "import torch", environments=environments) == ()


@pytest.mark.slow
def test_preloaded_modules_do_not_read_the_role(tmp_path: pathlib.Path) -> None:
    """`api` registers a hook for the role of its process, so each process loads it itself."""
    load = "import importlib, sys\nfor name in sys.argv[1:]: importlib.import_module(name)\n"
    names = modules(tmp_path, "import torch, fleetlight", servers=1)
    show = "print('fleetlight.fleet.api' in sys.modules, sys.excepthook is sys.__excepthook__)"
    environment = {**os.environ, "FLEET_ERROR_FILE": str(tmp_path / "error")}
    command = [sys.executable, "-c", load + show, *names]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert found.stdout == "False True\n"
