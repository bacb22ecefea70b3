# SPDX-License-Identifier: Apache-2.0
"""The version of torch: too old a version is refused, an untested one gets a warning.

Why: a name that an old torch lacks would fail in the middle of a job. A newer torch mostly works.
"""

from __future__ import annotations

import re

import torch

from fleetlight.errors import TorchVersionError

#: the oldest supported version, and the newest that `make matrix` has run
OLDEST, NEWEST = (2, 9), (2, 15)


def check_torch(version: str = torch.__version__) -> None:
    """Raise an error for a torch that is too old."""
    if _numbers(version) < OLDEST:
        raise TorchVersionError(
            f"got torch {version}, expected {_text(OLDEST)} or newer; "
            f"pip install 'torch>={_text(OLDEST)}'"
        )


def untested_torch(version: str = torch.__version__) -> str | None:
    """The warning for a torch that is newer than the tested ones."""
    if _numbers(version) <= NEWEST:
        return None
    return (
        f"torch {version} is newer than {_text(NEWEST)}, the newest that Fleetlight was tested "
        "with; if something fails that worked before, try that one"
    )


def _numbers(version: str) -> tuple[int, int]:
    # a development build, "2.16.0a0+git1234", counts as its release
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else OLDEST


def _text(numbers: tuple[int, int]) -> str:
    return f"{numbers[0]}.{numbers[1]}"
