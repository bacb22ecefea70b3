# SPDX-License-Identifier: Apache-2.0
"""`SaveOptions`: how a checkpoint is saved."""

from __future__ import annotations

import dataclasses
import os
from typing import TYPE_CHECKING

# not `from fleetlight import`, which imports the API and would be a circle
import fleetlight.checkpoint as checkpoint
from fleetlight.errors import ConfigError

if TYPE_CHECKING:
    from fleetlight.checkpoint import Bases

#: `via`: servers write their tables into the folder, or send them to worker 0
FOLDER, WORKER0 = "folder", "worker0"


def check_via(via: str) -> None:
    """ConfigError for an unknown `via`."""
    if via not in (FOLDER, WORKER0):
        raise ConfigError(
            f'got via={via!r}, expected via="{FOLDER}" (all processes see dirname) or '
            f'via="{WORKER0}" (only worker 0 does)'
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class SaveOptions:
    """The options of `save_persistables`, which automatic saves have as well."""

    background: bool = False
    via: str = FOLDER
    #: every so many saves, one has all rows of tables
    base_every: int = 1

    def check(self) -> None:
        """ConfigError for options that have no meaning."""
        check_via(self.via)
        if self.base_every < 1:
            raise ConfigError(
                f"got base_every={self.base_every}, expected at least 1: each save has all rows"
            )

    def bases(self, location: str | os.PathLike[str]) -> Bases | None:
        """For saves that may need an earlier one; None: each has all rows."""
        return checkpoint.Bases(location, self.base_every) if self.base_every > 1 else None
