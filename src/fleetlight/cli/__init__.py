# SPDX-License-Identifier: Apache-2.0
"""The commands `fleetrun` and `fleetlight`: arguments in, text and an exit code out."""
