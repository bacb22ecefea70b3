# SPDX-License-Identifier: Apache-2.0
"""The public functions, and the jobs that implement them; it may import every other package."""

from fleetlight.torch_compat.version import check_torch

check_torch()
