# SPDX-License-Identifier: Apache-2.0
"""The public objects, and the page of the reference that describes each."""

from __future__ import annotations

import inspect
import types
from collections.abc import Iterator
from typing import Any, NamedTuple

import fleetlight as fleet
from fleetlight import serve, strategy


class Page(NamedTuple):
    """A page of the reference: objects by their dotted names."""

    slug: str
    title: str
    about: str
    names: tuple[str, ...]


def _names(prefix: str, *names: str) -> tuple[str, ...]:
    return tuple(f"{prefix}.{name}" for name in names)


def _all_of(prefix: str, module: types.ModuleType) -> tuple[str, ...]:
    return _names(prefix, *module.__all__)


_CONFIGS = tuple(sorted(name for name in strategy.__all__ if name.endswith("Configs")))

PAGES = (
    Page(
        "job",
        "Jobs and roles",
        "A script joins its job, asks for its role, and leaves.",
        _names(
            "fleet",
            *("init", "init_worker", "init_server", "run_server", "stop_worker", "reset"),
            *("is_worker", "is_server", "is_first_worker", "worker_index", "worker_num"),
            *("worker_endpoints", "server_index", "server_num", "server_endpoints"),
            *("local_rank", "node_num", "rank", "nranks", "world_size"),
            *("RoleMaker", "PaddleCloudRoleMaker", "UserDefinedRoleMaker", "Role"),
        ),
    ),
    Page(
        "training",
        "Training",
        "Model, optimizer and loader are registered; the loop stays that of one process.",
        _names(
            "fleet",
            *("distributed_model", "distributed_optimizer", "shard", "attach", "no_sync"),
            *("clip_grad_norm_", "run_steps", "progress", "barrier_worker", "all_reduce"),
            *("all_gather", "account", "collective_perf", "log", "figures"),
        )
        + _all_of("fleet.util", fleet.util),
    ),
    Page(
        "tables",
        "Tables and serving",
        "Layers whose rows are on parameter servers, what happens to their rows, and how other "
        "programs read them.",
        _all_of("fleet.nn", fleet.nn)
        + _names(
            "fleet",
            *("CountFilterEntry", "ProbabilityEntry", "ShowClickEntry", "ScoreEntry"),
            *("rows", "shrink", "publish"),
        )
        + _names("fleetlight.serve", *sorted(serve.__all__, reverse=True)),
    ),
    Page(
        "saving",
        "Saving and loading",
        "Checkpoints, whole states, and models for inference.",
        _names(
            "fleet",
            *("save_persistables", "load_persistables", "state_dict", "load_state_dict"),
            *("save_inference_model", "load_inference_model"),
        ),
    ),
    Page(
        "strategy",
        "The strategy's classes",
        "[All settings](settings.md) lists every field with its default and its effect.",
        (
            "fleet.DistributedStrategy",
            "fleetlight.strategy.JobFacts",
            *_names("fleetlight.strategy", *_CONFIGS),
        ),
    ),
    Page(
        "data",
        "fleet.data",
        "Readers of well-known data sets, generated ones, and files of columns, lines and samples.",
        _all_of("fleet.data", fleet.data),
    ),
    Page(
        "metrics",
        "fleet.metrics",
        "Each worker gives its part, and all get the same result.",
        _all_of("fleet.metrics", fleet.metrics),
    ),
    Page(
        "optim",
        "fleet.optim",
        "Optimizers that torch does not have. Tables have the same rules on servers.",
        _all_of("fleet.optim", fleet.optim),
    ),
    Page(
        "static",
        "fleet.static",
        "Programs: a training step captured once, rewritten by passes, run by name.",
        _all_of("fleet.static", fleet.static),
    ),
    Page(
        "errors",
        "Errors",
        "",
        _all_of("fleet.errors", fleet.errors),
    ),
)

#: methods that other parts of Fleetlight call, not scripts
_INTERNAL = frozenset(
    (
        *("check_host", "counted", "extra_repr", "first_state", "form", "layer"),
        *("mark_started", "must_resume", "names_of", "of", "of_table", "replace", "settings"),
        *("share", "will_read", "with_host_ranks", "writable_source", "group_rows", "fingerprint"),
        *("master_is_outside", "has_queue", "away_within", "ALIASES", "DOTTED_NAME"),
    )
)


def resolved(name: str) -> Any:
    """The object of a dotted name."""
    found: Any = fleet
    for part in name.split(".")[1:]:
        found = getattr(found, part)
    return found


def objects() -> Iterator[tuple[str, Any]]:
    """All public objects, with their dotted names."""
    for page in PAGES:
        for name in page.names:
            yield name, resolved(name)


def methods_of(kind: type) -> Iterator[tuple[str, Any]]:
    """The documented methods and properties that a class defines itself."""
    for name, value in vars(kind).items():
        is_method = inspect.isfunction(value) or isinstance(value, (classmethod, staticmethod))
        is_property = isinstance(value, property) or type(value).__name__ == "cached_property"
        is_public = not name.startswith("_") and name not in _INTERNAL
        # torch puts a wrapped `step` into the class of the first optimizer that is made
        is_own = getattr(value, "__qualname__", kind.__name__).startswith(kind.__name__)
        if is_public and is_own and (is_method or is_property) and inspect.getdoc(value):
            yield name, value
