# SPDX-License-Identifier: Apache-2.0
"""Runs first in every process of a traced job, and starts its recorder."""

import atexit
import gc
import importlib.util
import sys
from pathlib import Path

# a third of the time of a process with torch is the collection of modules, which are no garbage
gc.set_threshold(20_000, 50, 100)
atexit.register(gc.freeze)

NAME = "tests.reading.recorder"
_spec = importlib.util.spec_from_file_location(NAME, Path(__file__).parents[1] / "recorder.py")
assert _spec is not None
assert _spec.loader is not None
_recorder = importlib.util.module_from_spec(_spec)
sys.modules[NAME] = _recorder  # the module that scripts import
_spec.loader.exec_module(_recorder)
_recorder.start()
