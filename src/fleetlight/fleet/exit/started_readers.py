# SPDX-License-Identifier: Apache-2.0
"""Processes that a worker has started, and that read its script once more.

So multiprocessing starts loading processes by spawn or forkserver: each runs all that stands at the
top of the script, with the environment of the worker, whose place in the job it would take.
"""

from __future__ import annotations

import multiprocessing

from fleetlight.errors import ConfigError


def is_started_reader() -> bool:
    """True in a process that only reads the script, to find what it was started for."""
    # as multiprocessing asks itself whether a script lacks its guard
    return bool(vars(multiprocessing.current_process()).get("_inheriting", False))


def refuse_started_reader() -> None:
    """ConfigError in a process that only reads the script."""
    if is_started_reader():
        raise ConfigError(
            "fleet.init was called in a process that a worker has started by spawn or forkserver: "
            "such a process, as of a DataLoader with num_workers, runs the script again up to its "
            "guard; expected fleet.init in the worker alone; put fleet.init and all that follows "
            'it behind if __name__ == "__main__":, or give the DataLoader '
            'multiprocessing_context="fork"'
        )
