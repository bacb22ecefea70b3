# SPDX-License-Identifier: Apache-2.0
"""Profiles as files, and machines that differ."""

from __future__ import annotations

import json
import pathlib

import msgspec
import pytest
from tests.launch.capacity.workloads import HERE, profile

from fleetlight.errors import ConfigError
from fleetlight.launch.capacity.profile import load, save


def test_a_saved_profile_is_loaded_unchanged(tmp_path: pathlib.Path) -> None:
    save(profile(), tmp_path / "p.json")
    assert load(tmp_path / "p.json") == profile()


def test_a_missing_file_is_an_error(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read the profile .*no\.json.*measure it again"):
        load(tmp_path / "no.json")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda values: values["workload"].pop("worker_cpu_s"), "worker_cpu_s"),
        (lambda values: values["workload"].update(mode=3), r"workload\.mode"),
        (lambda values: values["machine"].update(colour="red"), "colour"),
        (lambda values: values.update(format=2), "format 2, expected 1"),
    ],
)
def test_a_profile_that_lacks_something_is_an_error(
    tmp_path: pathlib.Path, change: object, named: str
) -> None:
    path = tmp_path / "p.json"
    values = msgspec.to_builtins(profile())
    change(values)  # type: ignore[operator]
    path.write_text(json.dumps(values))
    with pytest.raises(ConfigError, match=named):
        load(path)


def test_text_that_is_no_profile_is_an_error(tmp_path: pathlib.Path) -> None:
    (tmp_path / "p.json").write_text("{")
    with pytest.raises(ConfigError, match="is no profile"):
        load(tmp_path / "p.json")


def test_the_differences_of_machines_are_named() -> None:
    other = msgspec.structs.replace(HERE, cores=8, cpu="there")
    assert HERE.differences(other) == ["cpu there (here here)", "cores 8 (here 2)"]
    assert HERE.differences(HERE) == []
