# SPDX-License-Identifier: Apache-2.0
"""One command on each of several hosts."""

import pytest
from rig.__main__ import main
from tests.rig.needed import NEEDED

pytestmark = NEEDED


def test_each_host_runs_the_command_with_its_own_arguments(
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert main(["--hosts", "2", "--", "echo", "{i} of", "{ips} is {ip}, {}"]) == 0
    output = capfd.readouterr().out
    assert "[host 0] 0 of 10.213.7.1,10.213.7.2 is 10.213.7.1, {}\n" in output
    assert "[host 1] 1 of 10.213.7.1,10.213.7.2 is 10.213.7.2, {}\n" in output
    assert "host 1 (10.213.7.2): exit code 0, sent 0.0 MB, received 0.0 MB\n" in output


def test_first_failure_is_the_exit_code(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["--rate", "1gbit", "--", "sh", "-c", "exit {i}"]) == 1
    assert "host 0 (10.213.7.1): exit code 0" in capfd.readouterr().out


def test_error_is_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["--rate", "fast", "--", "true"]) == 2
    error = capfd.readouterr().err
    assert error.startswith("rig: `tc ")
    assert error.count("\n") == 1
