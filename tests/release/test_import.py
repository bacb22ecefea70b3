# SPDX-License-Identifier: Apache-2.0
"""The first use of a public name loads what collective jobs need, and no more."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

SHOW = """
import gc, json, sys
import fleetlight
fleetlight.init
print(json.dumps([gc.isenabled(), sorted(sys.modules)]))
"""


@pytest.mark.slow
def test_first_name_loads_no_servers_and_no_readers() -> None:
    done = subprocess.run([sys.executable, "-c", SHOW], capture_output=True, text=True, check=True)
    collects, modules = json.loads(done.stdout)
    assert collects
    assert "fleetlight.fleet.lifecycle" in modules
    late = ("numba", "fleetlight.ps.server.server", "fleetlight.fleet.bootstrap")
    assert {name for name in late if name in modules} == set()
    assert "fleetlight.data.public" not in modules
