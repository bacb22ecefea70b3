# SPDX-License-Identifier: Apache-2.0
"""Kubernetes: a job is a JobSet, whose pods are its processes.

`backends/kubernetes/` describes a job as objects (`engine.py`, `pods.py`; pure but for the names
of certificates) and passes them to `kubectl.py`. It decides what each exit code means for a pod,
a Job and the JobSet. `states.py` (pure) reads the replies. `tests/engines/jobset.py` runs an
emitted JobSet with real processes.
"""

from __future__ import annotations

from fleetlight.launch.backends import on_engine
from fleetlight.launch.backends.kubernetes.engine import Kubernetes

BACKEND = on_engine("kubernetes", Kubernetes(), shares_files=False)
