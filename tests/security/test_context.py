# SPDX-License-Identifier: Apache-2.0
"""Both sides show a certificate, and use TLS 1.3 only."""

import ssl
from pathlib import Path

import pytest

from fleetlight.security.certificates import make
from fleetlight.security.context import client_context, server_context


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certs")
    make(folder)
    return folder


def handshake(client: ssl.SSLContext, server: ssl.SSLContext, host: str) -> ssl.SSLObject:
    """A handshake in memory; returns the server's end."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    client_end = client.wrap_bio(to_client, to_server, server_hostname=host)
    server_end = server.wrap_bio(to_server, to_client, server_side=True)
    unfinished = [client_end, server_end]
    for _ in range(10):
        for side in list(unfinished):
            try:
                side.do_handshake()
                unfinished.remove(side)
            except ssl.SSLWantReadError:
                pass
    assert not unfinished
    return server_end


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "::1"])
def test_both_sides_authenticate_each_other(certificates: Path, host: str) -> None:
    server_end = handshake(client_context(certificates), server_context(certificates), host)
    assert server_end.version() == "TLSv1.3"
    assert (server_end.getpeercert() or {})["subject"] == ((("commonName", "fleetlight client"),),)


def test_another_host_name_is_refused(certificates: Path) -> None:
    with pytest.raises(ssl.SSLCertVerificationError, match="Hostname mismatch"):
        handshake(client_context(certificates), server_context(certificates), "other.host")


@pytest.mark.parametrize("make_context", [client_context, server_context])
def test_both_sides_require_a_certificate(certificates: Path, make_context: object) -> None:
    context = make_context(certificates)  # type: ignore[operator]
    assert context.verify_mode == ssl.CERT_REQUIRED
    assert context.minimum_version == ssl.TLSVersion.TLSv1_3


def test_no_session_is_resumed(certificates: Path) -> None:
    assert server_context(certificates).num_tickets == 0
