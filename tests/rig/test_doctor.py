# SPDX-License-Identifier: Apache-2.0
"""`fleetlight doctor` measures a link of known rate."""

import re
import subprocess
import sys

from rig.hosts import hosts
from tests.rig.needed import NEEDED

pytestmark = NEEDED


def test_link_rate_is_measured_and_its_consequence_reported() -> None:
    with hosts(2, rate="100mbit") as rig:
        options = ["--ips", rig.ips, "--seconds", "0.5"]
        command = [sys.executable, "-m", "fleetlight.cli.fleetlight", "doctor", *options]
        running = [host.start(command, stdout=subprocess.PIPE) for host in rig.hosts]
        texts = [process.communicate(timeout=60)[0] for process in running]
        assert [process.returncode for process in running] == [0, 0]
    for text in texts:
        rates = [float(rate) for rate in re.findall(r" ms +(\S+) Mbit/s +open", text)]
        assert len(rates) == 2
        # of 100: minus the overhead of TCP and Ethernet, plus a first burst
        assert all(80 < rate < 130 for rate in rates)
        assert "cable0" in text
        assert "MB of gradients take" in text
        assert "compression='int8'" in text
