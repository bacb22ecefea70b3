# SPDX-License-Identifier: Apache-2.0
"""`python -m fleetlight` is `fleetlight`."""

from __future__ import annotations

import sys

from fleetlight.cli.fleetlight import main

if __name__ == "__main__":
    sys.exit(main())
