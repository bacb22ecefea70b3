# SPDX-License-Identifier: Apache-2.0
"""Slurm: one job with one step, whose tasks are the servers and workers.

`slurm/` writes one batch script with one step (`script.py`, pure), calls Slurm's commands
(`engine.py`), and finds by the output of the script where each process is (`layout.py`, pure).
Each of the four rooms below uses only those before it. `backends/ray.py` submits a Ray job, whose
driver is `fleetlight/ray.py`: it keeps the rendezvous and starts an actor for each process.
"""

from __future__ import annotations

from fleetlight.launch.backends import on_engine
from fleetlight.launch.backends.slurm.engine import SlurmEngine

BACKEND = on_engine("slurm", SlurmEngine())
