# SPDX-License-Identifier: Apache-2.0
"""The reason of a failure where engines look for it."""

import json
import pathlib
import traceback
from typing import Any

import msgspec
import pytest

from fleetlight.launch.failure_reason import (
    FailureReason,
    termination_message,
    torchelastic_text,
    write_for_engines,
)

CAUSE = FailureReason(role="worker", index=1, code=78, error="PlanError: no", permanent=True)
EFFECT = FailureReason(role="worker", index=0, code=69, error="PeerError: no", caused_by_peer=True)
AS_JSON = {
    "role": "worker",
    "index": 1,
    "code": 78,
    "error": "PlanError: no",
    "caused_by_peer": False,
    "permanent": True,
}


def test_error_file_is_that_of_torchelastic(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch.distributed.elastic.multiprocessing.errors import error_handler

    def without_time(text: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(text)
        assert int(found["message"]["extraInfo"].pop("timestamp")) > 0
        return found

    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "torch.json"))
    try:
        raise KeyError("x")
    except KeyError as error:
        error_handler.ErrorHandler().record_exception(error)
        reason = FailureReason(code=1, error=f"KeyError: {error}")
        ours = torchelastic_text(reason, traceback.format_exc(), 5.9)
    assert without_time(ours) == without_time((tmp_path / "torch.json").read_text())


@pytest.mark.parametrize("text", ["x", "\n", "\x01", "é", "…"])
def test_termination_message_fits(text: str) -> None:
    message = termination_message(msgspec.structs.replace(CAUSE, error=text * 5000))
    assert 4000 < len(message) <= 4096
    found = json.loads(message)
    assert found.pop("error").rstrip(".") in text * 5000
    assert {**found, "error": "PlanError: no"} == AS_JSON


def test_reason_goes_where_the_engine_asks(tmp_path: pathlib.Path) -> None:
    error_file, log, default = (tmp_path / name for name in ("error", "log", "default"))
    absent = str(tmp_path / "absent")
    env = {"TORCHELASTIC_ERROR_FILE": str(error_file), "FLEET_TERMINATION_LOG": str(log)}
    write_for_engines(CAUSE, "stack", env, absent)
    assert json.loads(log.read_text()) == AS_JSON
    assert json.loads(error_file.read_text())["message"]["extraInfo"]["py_callstack"] == "stack"
    default.touch()
    write_for_engines(CAUSE, env={}, default_log=str(default))
    assert json.loads(default.read_text()) == AS_JSON
    write_for_engines(CAUSE, env={}, default_log=absent)
    assert {path.name for path in tmp_path.iterdir()} == {"error", "log", "default"}


def test_consequence_does_not_replace_the_cause(tmp_path: pathlib.Path) -> None:
    log = tmp_path / "log"
    env = {"FLEET_TERMINATION_LOG": str(log)}
    codes = []
    for reason in (EFFECT, CAUSE, EFFECT):
        write_for_engines(reason, env=env)
        codes.append(json.loads(log.read_text())["code"])
    assert codes == [69, 78, 78]
