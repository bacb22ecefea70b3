# SPDX-License-Identifier: Apache-2.0
"""`fleet.util`: Fleet's name for helpers of input pipelines."""

from __future__ import annotations

from collections.abc import Sequence

from fleetlight.errors import ConfigError
from fleetlight.fleet.context import current
from fleetlight.observe.log import logger


def get_file_shard(files: Sequence[str]) -> list[str]:
    """This worker's files: neighbours stay together, and sizes differ by one at most."""
    if isinstance(files, str):
        raise ConfigError(f"get_file_shard: got the string {files!r}, expected a list of names")
    group = current().group
    share, extra = divmod(len(files), group.size)
    start = group.index * share + min(group.index, extra)
    mine = list(files[start : start + share + (group.index < extra)])
    if not mine:
        logger.warning(
            "worker %d of %d gets no file: there are only %d", group.index, group.size, len(files)
        )
    return mine
