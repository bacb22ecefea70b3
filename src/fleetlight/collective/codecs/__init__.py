# SPDX-License-Identifier: Apache-2.0
"""The form in which gradients cross between hosts; nothing is sent here."""
