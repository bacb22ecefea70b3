# SPDX-License-Identifier: Apache-2.0
"""The commands `fleetrun` and `fleetlight`."""
