# SPDX-License-Identifier: Apache-2.0
"""Slurm: one job with one step, whose tasks are the servers and workers.

`slurm/` writes one batch script with one step (`script.py`, pure), calls Slurm's commands
(`engine.py`), and finds by the output of the script where each process is (`layout.py`, pure).
"""

from __future__ import annotations

from fleetlight.launch.backends import on_engine
from fleetlight.launch.backends.slurm.engine import SlurmEngine

BACKEND = on_engine("slurm", SlurmEngine())
