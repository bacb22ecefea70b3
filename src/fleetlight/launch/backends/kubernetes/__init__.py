# SPDX-License-Identifier: Apache-2.0
"""Kubernetes: a job is a JobSet, whose pods are its processes."""

from __future__ import annotations

from fleetlight.launch.backends import on_engine
from fleetlight.launch.backends.kubernetes.engine import Kubernetes

BACKEND = on_engine("kubernetes", Kubernetes(), shares_files=False)
