# SPDX-License-Identifier: Apache-2.0
"""Room: a full disk is waited for, and nothing else is."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from fleetlight.errors import CheckpointError, JournalError
from fleetlight.ps.journal.disk_full_retry import once_there_is_room, written

HERE = Path("/kept/file")


class Refusing:
    """So many times there is no room."""

    def __init__(self, times: int, *, code: int = errno.ENOSPC, told: bool = False) -> None:
        self.left, self.code, self.told = times, code, told

    def __call__(self) -> str:
        self.left -= 1
        if self.left < 0:
            return "done"
        error = OSError(self.code, "No room")
        if self.told:
            raise CheckpointError("rows cannot be written") from error
        raise error


def never(_: float) -> bool:
    raise AssertionError("waited")


@pytest.mark.parametrize("told", [False, True])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_waited_for(code: int, told: bool) -> None:
    said: list[str] = []
    waited: list[float] = []
    refusing = Refusing(3, code=code, told=told)
    assert once_there_is_room(HERE, refusing, 60.0, said.append, waited.append) == "done"  # type: ignore[arg-type]
    assert len(waited) == 3
    assert said == [
        "cannot write to /kept/file: No room; trying again for 60 s, training waits",
        "/kept/file: there is room again",
    ]


def test_only_that_is_waited_for() -> None:
    with pytest.raises(OSError, match="No room"):
        once_there_is_room(HERE, Refusing(1, code=errno.EIO), 60.0, wait=never)
    assert once_there_is_room(HERE, Refusing(0), 60.0, wait=never) == "done"


@pytest.mark.parametrize("patience_s", [0.0, 60.0])
def test_a_disk_that_stays_full_is_told(patience_s: float) -> None:
    tried = Refusing(99)
    with pytest.raises(OSError, match="No room"):
        # there is no more time behind the first wait
        once_there_is_room(HERE, tried, patience_s, wait=lambda _: True)
    assert tried.left == (98 if not patience_s else 97)


def test_what_cannot_be_written_is_told_with_what_to_do() -> None:
    text = r"durability: /kept/file cannot be written: No room; make room or .* name another folder"
    with pytest.raises(JournalError, match=text):
        written(HERE, Refusing(99), 0.0)
