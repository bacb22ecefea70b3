# SPDX-License-Identifier: Apache-2.0
"""Certificates for encrypted groups."""

from pathlib import Path

import pytest

from fleetlight.security.certificates import make


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("encrypted")
    make(folder)
    return folder
