# SPDX-License-Identifier: Apache-2.0
"""A process alone: what starts it, then its training."""

from tests.reading.paths import number
from tests.reading.recorder import window

with window(number("fleet_init")):
    import fleetlight as fleet

    fleet.init()

from tests.reading import script  # imports what fleet.init() must import itself

script.embedded()
