# SPDX-License-Identifier: Apache-2.0
"""Limits of open descriptors."""

import resource
import subprocess
import sys

import pytest

PROGRAM = """
import resource
from fleetlight.wire.descriptors import allow_descriptors
resource.setrlimit(resource.RLIMIT_NOFILE, (100, 200))
print(allow_descriptors(50), allow_descriptors(150), allow_descriptors(500))
print(resource.getrlimit(resource.RLIMIT_NOFILE))
"""


@pytest.mark.slow
def test_the_limit_rises_to_the_hard_one_at_most() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert done.stdout.splitlines() == ["50 150 200", "(200, 200)"], done.stderr
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 200
