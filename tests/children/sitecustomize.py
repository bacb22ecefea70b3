# SPDX-License-Identifier: Apache-2.0
"""What Python does first in every process that a test starts: `tests/conftest.py` sees to it.

A third of what a process with torch costs is that Python looks for garbage, while torch is imported
and once more at the end, among half a million objects that live as long as the process.
"""

import atexit
import gc

gc.set_threshold(20_000, 50, 100)
# the last handler of all; who tests the end of a process takes it back
atexit.register(gc.freeze)
