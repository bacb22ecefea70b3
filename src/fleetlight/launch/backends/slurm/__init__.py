# SPDX-License-Identifier: Apache-2.0
"""Slurm: one job with one step, whose tasks are the servers and workers."""

from __future__ import annotations

from fleetlight.launch.backends import on_engine
from fleetlight.launch.backends.slurm.engine import SlurmEngine

BACKEND = on_engine("slurm", SlurmEngine())
