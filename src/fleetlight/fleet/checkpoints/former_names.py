# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of static programs that older versions wrote under other names.

A program names modules by the object that owns them. Older versions named them by class and number,
such as `linear_2`.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

# not `from fleetlight import`, which imports the API and would be a circle
import fleetlight.checkpoint as checkpoint
from fleetlight.fleet.job import Job
from fleetlight.fleet.training.registering import registered_model
from fleetlight.observe.log import logger

if TYPE_CHECKING:
    from fleetlight.checkpoint import Checkpoint

#: a table's name is a part of the seed of first values
_LATER_IDS = "; ids that are not in it get other first values than in that job"


def read_named(job: Job, path: str | Path) -> Checkpoint:
    """Read a checkpoint; one that has only former names gets the current ones.

    That is so where no name of the model is in it, and all its names map one to one. Shapes are
    compared later, as in any checkpoint.
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
            "%s has names of an older version, such as %s for %s: they are mapped to the present "
            "names%s",
            saved.directory,
            old,
            new,
            _LATER_IDS if saved.manifest.tables else "",
        )
    return checkpoint.RenamedCheckpoint(saved, name)


def _former_names(job: Job) -> dict[str, str]:
    """The former names of all registered models; those of several have numbers as prefixes."""
    several = len(job.models) > 1
    prefixes = [f"{number}." if several else "" for number in range(len(job.models))]
    return {
        prefix + old: prefix + new
        for prefix, managed in zip(prefixes, job.models, strict=True)
        for old, new in managed.former_names.items()
    }


def _name(former: Mapping[str, str], name: str) -> str:
    """The present name: that of the longest known prefix, and the rest."""
    head = name
    while head and head not in former:
        head = head.rpartition(".")[0]
    return former[head] + name[len(head) :] if head else name
