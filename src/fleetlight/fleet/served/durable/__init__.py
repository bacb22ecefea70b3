# SPDX-License-Identifier: Apache-2.0
"""How a worker and its servers outlive their processes."""
