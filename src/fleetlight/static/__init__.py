# SPDX-License-Identifier: Apache-2.0
"""Static programs: a training step captured once, rewritten by passes, run by name."""

from fleetlight.static.capture import capture
from fleetlight.static.executor import Executor
from fleetlight.static.program import Program

__all__ = ["Executor", "Program", "capture"]
