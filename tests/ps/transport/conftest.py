# SPDX-License-Identifier: Apache-2.0
"""Certificates, made once per test session because they are slow to make."""

from pathlib import Path

import pytest

from fleetlight.security.certificates import make


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certificates") / "ours"
    make(folder)
    return folder


@pytest.fixture(scope="session")
def other_certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certificates") / "theirs"
    make(folder)
    return folder
