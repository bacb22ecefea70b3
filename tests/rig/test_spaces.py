# SPDX-License-Identifier: Apache-2.0
"""When no rig is possible, the error names the reason."""

import os
import shutil

import pytest
from tests.rig.needed import NEEDED

from rig import spaces


def test_missing_tool_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda tool: None if tool == "tc" else tool)
    assert spaces.obstacle() == "tc not found: install iproute2 to make hosts on one machine"


def test_missing_root_rights_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", str)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert "got an ordinary user, expected root" in str(spaces.obstacle())


def test_refusal_by_the_kernel_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> None:
        raise spaces.RigError("Operation not permitted")

    monkeypatch.setattr(shutil, "which", str)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(spaces, "make", refuse)
    assert spaces.obstacle() == "no network namespaces here: Operation not permitted"


class TestSweep:
    pytestmark = NEEDED

    def test_reused_process_id_owns_nothing(self) -> None:
        name = f"{spaces.MARK}-{os.getpid()}-1-0-0"
        spaces.make(name)
        assert spaces.sweep() == [name]
        assert name not in spaces.command("ip", "netns", "list")

    def test_missing_namespace_cannot_be_entered(self) -> None:
        with pytest.raises(FileNotFoundError, match=spaces.MARK):
            spaces.enter(spaces.prefix())
