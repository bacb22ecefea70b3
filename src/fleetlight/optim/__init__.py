# SPDX-License-Identifier: Apache-2.0
"""`fleet.optim`: optimizers for large batches and for tables that torch does not have."""

from fleetlight.optim.ftrl import Ftrl
from fleetlight.optim.lamb import Lamb
from fleetlight.optim.lars import Lars
from fleetlight.optim.rowwise_adagrad import RowwiseAdagrad
from fleetlight.optim.rowwise_adam import RowwiseAdam

__all__ = ["Ftrl", "Lamb", "Lars", "RowwiseAdagrad", "RowwiseAdam"]
