# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of static programs that older versions wrote under other names.

A program calls modules one by one. It names them by the object that owns them; before, it named
them by class and number, such as `linear_2`.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path

# not `from fleetlight import`, which asks for the API, and that may be being imported
import fleetlight.checkpoint as checkpoint
from fleetlight.checkpoint import Checkpoint
from fleetlight.fleet.job import Job
from fleetlight.fleet.training.registering import registered_model
from fleetlight.observe.log import logger

#: a table's name is part of what first values are drawn from
_LATER_IDS = "; ids that it does not know begin with other first values than they would have then"


def read_named(job: Job, path: Path) -> Checkpoint:
    """The checkpoint there, by the names of today where it has only those of before.

    That is, where no name of the model is in it, and all its names map one to one. What has another
    shape is refused behind, as in any checkpoint.
    """
    saved, former = checkpoint.read(path), _former_names(job)
    if not former:
        return saved
    name = functools.partial(_name, former)
    here = registered_model(job).state_dict(keep_vars=True).keys()
    there = saved.model().state_dict().keys()
    if here & there or sorted(map(name, there)) != sorted(here):
        return saved
    if job.group.index == 0:
        old, new = next(iter(former.items()))
        logger.info(
            "%s names the parts of a program as older versions did, %s for %s: its names are "
            "taken for those of today%s",
            saved.directory,
            old,
            new,
            _LATER_IDS if saved.manifest.tables else "",
        )
    return checkpoint.RenamedCheckpoint(saved, name)


def _former_names(job: Job) -> dict[str, str]:
    """Of all registered models; several become one, their names starting with their number."""
    several = len(job.models) > 1
    prefixes = [f"{number}." if several else "" for number in range(len(job.models))]
    return {
        prefix + old: prefix + new
        for prefix, plan in zip(prefixes, job.models, strict=True)
        for old, new in plan.former_names.items()
    }


def _name(former: Mapping[str, str], name: str) -> str:
    """The name of today: that of the part, and what is behind it."""
    head = name
    while head and head not in former:
        head = head.rpartition(".")[0]
    return former[head] + name[len(head) :] if head else name
