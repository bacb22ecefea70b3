# SPDX-License-Identifier: Apache-2.0
"""Static programs: a training step captured once, rewritten by passes, run by name."""

from fleetlight.static.capture import capture
from fleetlight.static.executor import Executor
from fleetlight.static.program import Program
from fleetlight.static.writing import (
    accuracy,
    data,
    default_main_program,
    default_startup_program,
    minimize,
    program_guard,
)

__all__ = [
    "Executor",
    "Program",
    "accuracy",
    "capture",
    "data",
    "default_main_program",
    "default_startup_program",
    "minimize",
    "program_guard",
]
