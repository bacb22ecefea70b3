# SPDX-License-Identifier: Apache-2.0
"""Runs first in every process that a test starts; `tests/conftest.py` arranges it.

A third of the cost of a process with torch is garbage collection: during the import of torch, and
once more at exit, over half a million objects that exist as long as the process. And no test pulls
the plug: what a killed process has written survives without fsync.
"""

import atexit
import gc
import os

gc.set_threshold(20_000, 50, 100)
# registered first, so it runs last; a test of process exit unregisters it
atexit.register(gc.freeze)
os.fsync = os.fdatasync = lambda fd: None
