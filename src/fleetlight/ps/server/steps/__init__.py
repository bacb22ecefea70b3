# SPDX-License-Identifier: Apache-2.0
"""Groups pushes into steps, applies each push once, and counts them."""
