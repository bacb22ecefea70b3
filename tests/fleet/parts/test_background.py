# SPDX-License-Identifier: Apache-2.0
"""A write in the background: waited for, and never failed in silence."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from fleetlight.errors import CheckpointError
from fleetlight.fleet.parts import background
from fleetlight.fleet.parts.background import BackgroundSave


def test_nothing_to_finish() -> None:
    BackgroundSave().finish()


def test_the_caller_goes_on_and_finish_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    go, done = threading.Event(), threading.Event()
    said: list[str] = []

    def warn(text: str, *values: Any) -> None:
        said.append(text % values)
        go.set()

    monkeypatch.setattr(background, "_WARN_EVERY_S", 0.01)
    monkeypatch.setattr(background.logger, "warning", warn)

    def write() -> None:
        go.wait()
        done.set()

    save = BackgroundSave()
    save.start(write, "save into x")
    assert not done.is_set()
    save.finish()  # only this one's warning lets the write go on
    assert done.is_set()
    assert said[0].startswith("waiting for the save into x for ")


def fail() -> None:
    raise OSError("no space left")


def test_a_failure_is_logged_at_once_and_raised_once(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(
        background.logger, "error", lambda text, *values: said.append(text % values)
    )
    save = BackgroundSave()
    save.start(fail, "save into x at step 3")
    with pytest.raises(CheckpointError, match=r"save into x at step 3 failed .*: no space left"):
        save.finish()
    assert "save into x at step 3 failed" in said[0]
    save.finish()
    save.start(lambda: None, "next save")
    save.finish()
