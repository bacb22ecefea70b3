# SPDX-License-Identifier: Apache-2.0
"""The workplace of the launcher's tests, to start jobs in."""

from tests.launch.conftest import place

__all__ = ["place"]
