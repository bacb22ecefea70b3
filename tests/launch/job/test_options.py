# SPDX-License-Identifier: Apache-2.0
"""LaunchOptions from the environment of a cloud launcher."""

import pytest

from fleetlight.errors import ConfigError
from fleetlight.launch.job.options import LaunchOptions, from_cloud

CLOUD = {
    "PADDLE_TRAINERS": "10.0.0.1,10.0.0.2",
    "POD_IP": "10.0.0.2",
    "PADDLE_TRAINER_ID": "1",
    "PADDLE_PORT": "6200",
}


def test_cloud_variables_give_the_machines() -> None:
    found = from_cloud(LaunchOptions(script="t.py", use_paddlecloud=True), CLOUD)
    assert found.ips == ("10.0.0.1", "10.0.0.2")
    assert (found.host, found.rank, found.start_port) == ("10.0.0.2", 1, 6200)


def test_flags_override_cloud_variables() -> None:
    options = LaunchOptions(
        script="t.py", use_paddlecloud=True, host="10.0.0.9", start_port=1, rank=0
    )
    found = from_cloud(options, CLOUD)
    assert (found.host, found.start_port, found.rank) == ("10.0.0.9", 1, 0)


def test_cloud_variables_need_the_flag() -> None:
    assert from_cloud(LaunchOptions(script="t.py"), CLOUD) == LaunchOptions(script="t.py")


def test_missing_variables_are_named() -> None:
    with pytest.raises(ConfigError, match="needs PADDLE_TRAINERS and POD_IP"):
        from_cloud(LaunchOptions(script="t.py", use_paddlecloud=True), {})


def test_port_that_is_no_number_is_refused() -> None:
    with pytest.raises(ConfigError, match="PADDLE_PORT: got 'x'"):
        from_cloud(
            LaunchOptions(script="t.py", use_paddlecloud=True), {**CLOUD, "PADDLE_PORT": "x"}
        )
