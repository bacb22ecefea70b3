# SPDX-License-Identifier: Apache-2.0
"""The version of Fleetlight, for every package of it."""

VERSION = "0.1.0"
