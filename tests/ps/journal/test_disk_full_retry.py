# SPDX-License-Identifier: Apache-2.0
"""disk_full_retry: a write waits for space on a full disk, and for no other error."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from fleetlight.errors import CheckpointError, JournalError
from fleetlight.ps.journal.disk_full_retry import once_there_is_room, written

PATH = Path("/kept/file")


class FailingWrite:
    """An operation that fails a number of times."""

    def __init__(self, times: int, *, code: int = errno.ENOSPC, wrapped: bool = False) -> None:
        self.left, self.code, self.wrapped = times, code, wrapped

    def __call__(self) -> str:
        self.left -= 1
        if self.left < 0:
            return "done"
        error = OSError(self.code, "No room")
        if self.wrapped:
            raise CheckpointError("rows cannot be written") from error
        raise error


def never(_: float) -> bool:
    raise AssertionError("waited")


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_write_waits_for_disk_space(code: int, wrapped: bool) -> None:
    messages: list[str] = []
    waited: list[float] = []
    failing = FailingWrite(3, code=code, wrapped=wrapped)
    assert once_there_is_room(PATH, failing, 60.0, messages.append, waited.append) == "done"  # type: ignore[arg-type]
    assert len(waited) == 3
    assert messages == [
        "cannot write to /kept/file: No room; trying again for 60 s, training waits",
        "/kept/file: there is room again",
    ]


def test_other_errors_are_not_retried() -> None:
    with pytest.raises(OSError, match="No room"):
        once_there_is_room(PATH, FailingWrite(1, code=errno.EIO), 60.0, wait=never)
    assert once_there_is_room(PATH, FailingWrite(0), 60.0, wait=never) == "done"


@pytest.mark.parametrize("patience_s", [0.0, 60.0])
def test_a_disk_that_stays_full_is_an_error(patience_s: float) -> None:
    failing = FailingWrite(99)
    with pytest.raises(OSError, match="No room"):
        # the first wait exhausts the patience
        once_there_is_room(PATH, failing, patience_s, wait=lambda _: True)
    assert failing.left == (98 if not patience_s else 97)


def test_the_error_of_a_failed_write_says_what_to_do() -> None:
    text = r"durability: /kept/file cannot be written: No room; make room or .* name another folder"
    with pytest.raises(JournalError, match=text):
        written(PATH, FailingWrite(99), 0.0)
