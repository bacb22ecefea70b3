# SPDX-License-Identifier: Apache-2.0
"""`fleet.optim`: optimizers for large batches that torch does not have."""

from fleetlight.optim.lamb import Lamb
from fleetlight.optim.lars import Lars

__all__ = ["Lamb", "Lars"]
