# SPDX-License-Identifier: Apache-2.0
"""The order of an epoch, and how workers share it. Pure."""
