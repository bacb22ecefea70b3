# SPDX-License-Identifier: Apache-2.0
"""The public functions over one context: the only place that knows every part."""

from fleetlight.torch_compat.version import check_torch

check_torch()
