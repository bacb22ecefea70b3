# SPDX-License-Identifier: Apache-2.0
"""`fleetrun`, traced without the processes that it starts."""

import sys

from tests.reading.paths import number
from tests.reading.recorder import window

with window(number("fleetrun_start"), everywhere=False):
    from fleetlight.cli.fleetrun import main

    code = main()
sys.exit(code)
