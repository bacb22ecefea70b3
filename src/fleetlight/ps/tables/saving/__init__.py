# SPDX-License-Identifier: Apache-2.0
"""Which rows a save has that writes only what changed."""
