# SPDX-License-Identifier: Apache-2.0
"""A place to start jobs in, as tests of the launcher have it."""

from tests.launch.conftest import place

__all__ = ["place"]
