# SPDX-License-Identifier: Apache-2.0
"""The public names, pinned: each addition or removal is deliberate."""

from __future__ import annotations

import inspect
import pydoc
import subprocess
import sys

import pytest

import fleetlight as fleet
from fleetlight.fleet import api

#: public names that are modules, each imported at its first use
MODULES = {"data", "metrics", "nn", "optim", "util"}
PUBLIC = [
    "CountFilterEntry",
    "DistributedStrategy",
    "PaddleCloudRoleMaker",
    "ProbabilityEntry",
    "Role",
    "RoleMaker",
    "ScoreEntry",
    "ShowClickEntry",
    "UserDefinedRoleMaker",
    "account",
    "all_gather",
    "all_reduce",
    "attach",
    "barrier_worker",
    "clip_grad_norm_",
    "collective_perf",
    "data",
    "distributed_model",
    "distributed_optimizer",
    "errors",
    "process_metrics",
    "init",
    "init_server",
    "init_worker",
    "is_first_worker",
    "is_server",
    "is_worker",
    "load_inference_model",
    "load_persistables",
    "load_state_dict",
    "local_rank",
    "log",
    "metrics",
    "nn",
    "no_sync",
    "node_num",
    "optim",
    "nranks",
    "progress",
    "publish",
    "rank",
    "reset",
    "rows",
    "run_server",
    "run_steps",
    "save_inference_model",
    "save_persistables",
    "server_endpoints",
    "server_index",
    "server_num",
    "shard",
    "shrink",
    "state_dict",
    "stop_worker",
    "util",
    "worker_endpoints",
    "worker_index",
    "worker_num",
    "world_size",
]


def test_public_names() -> None:
    assert sorted({*api.__all__, *MODULES}) == sorted(PUBLIC)
    assert set(PUBLIC) <= set(dir(fleet))


def test_public_names_of_layers() -> None:
    layers = ["EmbeddingCollection", "EmbeddingFeature", "SparseEmbedding", "SparseEmbeddingBag"]
    assert fleet.nn.__all__ == layers


def test_dir_shows_the_public_names_and_no_others() -> None:
    shown = {name for name in dir(fleet) if not name.startswith("__")}
    assert shown == {*PUBLIC, "static", "main_program"}
    assert {"__version__", "__doc__", "__path__"} <= set(dir(fleet))


@pytest.mark.parametrize("name", ["metrics", "util", "errors"])
def test_public_modules_show_only_public_names(name: str) -> None:
    module = getattr(fleet, name)
    assert set(module.__all__) <= set(dir(module))
    for shown in {shown for shown in dir(module) if not shown.startswith("__")}:
        assert shown in module.__all__, shown


def test_star_import_has_the_public_names() -> None:
    names: dict[str, object] = {}
    exec("from fleetlight import *", names)
    assert set(names) - {"__builtins__"} == {*PUBLIC, "static"}


def test_tools_may_inspect_every_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fleetlight.fleet.training.programs._main", None)
    assert not hasattr(fleet, "main_program")
    assert {"init", "static"} <= {name for name, _ in inspect.getmembers(fleet)}
    assert "stop_worker" in pydoc.render_doc(fleet)


def test_every_name_exists_and_is_documented() -> None:
    for name in PUBLIC:
        assert getattr(fleet, name).__doc__, name


def test_unknown_name_is_an_attribute_error() -> None:
    assert not hasattr(fleet, "no_such_name")
    with pytest.raises(AttributeError, match="did you mean 'distributed_model'"):
        _ = fleet.distribute_model


def test_import_is_light() -> None:
    code = (
        "import sys, fleetlight, fleetlight.cli.fleetrun;"
        "heavy = {'torch', 'numpy', 'numba', 'rich', 'sklearn'} & set(sys.modules);"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_version_equals_that_of_the_changelog() -> None:
    from pathlib import Path

    changelog = (Path(__file__).parent.parent / "CHANGELOG.md").read_text()
    assert f"## {fleet.__version__}" in changelog


METRICS = [
    "acc",
    "auc",
    "calibration",
    "gauc",
    "mae",
    "max",
    "min",
    "mse",
    "ndcg",
    "normalised_entropy",
    "rmse",
    "sum",
]


def test_names_of_metrics() -> None:
    assert sorted(fleet.metrics.__all__) == METRICS
    for name in METRICS:
        assert getattr(fleet.metrics, name).__doc__, name


STATIC = [
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


def test_names_of_static_programs() -> None:
    assert sorted(fleet.static.__all__) == STATIC
    for name in STATIC:
        assert getattr(fleet.static, name).__doc__, name
    assert {name for name in dir(fleet.static) if not name.startswith("__")} == set(STATIC)
    with pytest.raises(AttributeError, match="did you mean 'capture'"):
        _ = fleet.static.captur
    with pytest.raises(AttributeError, match=r"static.BuildStrategy .*compile='inductor'"):
        _ = fleet.static.BuildStrategy
