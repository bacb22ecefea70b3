# SPDX-License-Identifier: Apache-2.0
"""Fixtures of tests that need a bucket, wherever they are."""

from collections.abc import Iterator

import pytest
from tests.store.s3 import VARIABLES, FaultProxy, S3Server, running_server


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    pytest.importorskip("moto")
    pytest.importorskip("obstore")
    with running_server() as server:
        yield server


@pytest.fixture
def s3(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultProxy]:
    """A proxy before the server; the variables of this process lead to it."""
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)
    proxy = FaultProxy(s3_server.port)
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
    yield proxy
    proxy.close()


@pytest.fixture
def bucket(s3: FaultProxy, s3_server: S3Server) -> str:
    """The URL of an empty folder in a new bucket."""
    return f"s3://{s3_server.new_bucket()}/run"
