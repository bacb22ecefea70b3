# SPDX-License-Identifier: Apache-2.0
"""Writes in the background: `finish` waits for them and raises their errors."""

import threading
from typing import Any

import pytest

from fleetlight.errors import CheckpointError
from fleetlight.fleet.parts import background
from fleetlight.fleet.parts.background import BackgroundSave


def test_finish_without_a_write_returns_at_once() -> None:
    BackgroundSave().finish()


def test_caller_continues_and_finish_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    go, done = threading.Event(), threading.Event()
    messages: list[str] = []

    def warn(text: str, *values: Any) -> None:
        messages.append(text % values)
        go.set()

    monkeypatch.setattr(background, "_WARN_EVERY_S", 0.01)
    monkeypatch.setattr(background.logger, "warning", warn)

    def write() -> None:
        go.wait()
        done.set()

    save = BackgroundSave()
    save.start(write, "save into x")
    assert not done.is_set()
    save.finish()  # only the warning of this call lets the write continue
    assert done.is_set()
    assert messages[0].startswith("waiting for the save into x for ")


def fail() -> None:
    raise OSError("no space left")


def test_failure_is_logged_at_once_and_raised_once(monkeypatch: pytest.MonkeyPatch) -> None:
    messages: list[str] = []
    monkeypatch.setattr(
        background.logger, "error", lambda text, *values: messages.append(text % values)
    )
    save = BackgroundSave()
    save.start(fail, "save into x at step 3")
    with pytest.raises(CheckpointError, match=r"save into x at step 3 failed .*: no space left"):
        save.finish()
    assert "save into x at step 3 failed" in messages[0]
    save.finish()
    save.start(lambda: None, "next save")
    save.finish()
