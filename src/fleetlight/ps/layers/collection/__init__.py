# SPDX-License-Identifier: Apache-2.0
"""Many features in one layer: the forms of their ids, and one lookup for all."""
