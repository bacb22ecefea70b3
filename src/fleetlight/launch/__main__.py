# SPDX-License-Identifier: Apache-2.0
"""`python -m fleetlight.launch` is `fleetrun`."""

from __future__ import annotations

import importlib
import sys

if __name__ == "__main__":
    # By name, because the command sits one layer above this package.
    sys.exit(importlib.import_module("fleetlight.cli.fleetrun").main())
