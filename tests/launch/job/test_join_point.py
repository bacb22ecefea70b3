# SPDX-License-Identifier: Apache-2.0
"""JoinPoint: `--join` takes an address, or the log folder of a job on this machine."""

from pathlib import Path

import pytest

from fleetlight.errors import ConfigError
from fleetlight.launch.job.join_point import NAME, JoinPoint, join_point, remove
from fleetlight.roles.secret import Secret

TOKEN = Secret("0123456789abcdef")


def test_a_log_folder_has_the_address_and_the_token(tmp_path: Path) -> None:
    JoinPoint("10.0.0.1:6170", TOKEN).write(tmp_path)
    assert join_point(str(tmp_path), None) == JoinPoint("10.0.0.1:6170", TOKEN)
    assert (tmp_path / NAME).stat().st_mode & 0o777 == 0o600
    other = Secret("another token 01")
    assert join_point(str(tmp_path), other).token == other


def test_the_last_job_of_a_folder_counts(tmp_path: Path) -> None:
    JoinPoint("10.0.0.1:6170").write(tmp_path)
    JoinPoint("10.0.0.1:6171").write(tmp_path)
    assert join_point(str(tmp_path), None) == JoinPoint("10.0.0.1:6171")
    remove(tmp_path)
    remove(tmp_path)
    with pytest.raises(ConfigError, match="no job that workers may join runs with this log folder"):
        join_point(str(tmp_path), None)


def test_an_address_needs_no_folder() -> None:
    assert join_point("[::1]:6170", TOKEN) == JoinPoint("[::1]:6170", TOKEN)


def test_an_empty_text_is_no_folder() -> None:
    with pytest.raises(ConfigError, match="got an empty text, expected HOST:PORT of server 0"):
        join_point("", None)


@pytest.mark.parametrize("text", ["nowhere", "10.0.0.1", "10.0.0.1:0"])
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="or the log folder of a job on this machine"):
        join_point(text, None)


@pytest.mark.parametrize("data", ["", "[]", "{}", '{"server": "a:1"}'])
def test_a_damaged_file_is_named(tmp_path: Path, data: str) -> None:
    (tmp_path / NAME).write_text(data)
    with pytest.raises(ConfigError, match=f"{NAME} cannot be read"):
        join_point(str(tmp_path), None)
