# SPDX-License-Identifier: Apache-2.0
"""From options of the command line to the result of an examination."""

from typing import Any

import pytest
from tests.launch.doctor.doctors import free_ports

from fleetlight.errors import ConfigError
from fleetlight.launch.doctor.examination import DoctorOptions, examine
from fleetlight.launch.inventory import Machine

NAMES = {"here": "127.0.1.1", "there": "192.0.2.7"}
MACHINE = Machine(
    cores=4,
    addresses=(("lo", "127.0.0.1"), ("eth0", "192.0.2.1")),
    resolve=lambda host: NAMES.get(host, host),
)


def refuse_output(text: str) -> None:
    raise AssertionError(text)


def test_examination_of_this_machine() -> None:
    result = examine(DoctorOptions(port=6170, workers=2), MACHINE, {}, refuse_output)
    assert result.is_fit
    assert "cores            4" in result.text
    assert "192.0.2.1 (eth0" in result.text


def test_list_with_one_machine() -> None:
    lines: list[str] = []
    options = DoctorOptions(ips=("127.0.0.1",), port=free_ports(3))
    result = examine(options, MACHINE, {}, lines.append)
    assert result.is_fit
    assert result.text.splitlines()[1].startswith("127.0.0.1  ")


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        pytest.param({"workers": -1}, "--nproc -1: expected 1 to 1024", id="workers"),
        pytest.param({"workers": 0}, "--nproc 0: expected 1 to 1024", id="no workers"),
        pytest.param({"port": 0}, "--port 0: expected 1 to 65533", id="no port"),
        pytest.param({"port": 65535}, "--port 65535", id="last port"),
        pytest.param({"seconds": 0.0}, "--seconds 0: expected more than 0", id="no time"),
        pytest.param({"seconds": float("nan")}, "--seconds nan", id="nan"),
        pytest.param({"deadline_s": -1.0}, "--deadline_s -1", id="past"),
        pytest.param({"ips": ("a",) * 65}, "lists 65 machines, expected at most 64", id="many"),
        pytest.param({"ips": ("here", "there")}, r"here resolves to 127\.0\.1\.1", id="loopback"),
        pytest.param(
            {"ips": ("192.0.2.7", "192.0.2.8")},
            "none of .* is an address of this machine",
            id="other",
        ),
        pytest.param({"ips": ("127.0.0.1", "127.0.0.2")}, "pass --host", id="unclear"),
    ],
)
def test_invalid_options_are_refused(options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        examine(DoctorOptions(**{"port": 6170, **options}), MACHINE, {}, refuse_output)
