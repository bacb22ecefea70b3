# SPDX-License-Identifier: Apache-2.0
"""Certificates, made once."""

from tests.ps.transport.conftest import certificates

__all__ = ["certificates"]
