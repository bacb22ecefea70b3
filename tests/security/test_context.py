# SPDX-License-Identifier: Apache-2.0
"""Both sides show a certificate, over TLS 1.3 and nothing older."""

from __future__ import annotations

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
    """A handshake in memory; the server's end of it."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    calling = client.wrap_bio(to_client, to_server, server_hostname=host)
    called = server.wrap_bio(to_server, to_client, server_side=True)
    waiting = [calling, called]
    for _ in range(10):
        for side in list(waiting):
            try:
                side.do_handshake()
                waiting.remove(side)
            except ssl.SSLWantReadError:
                pass
    assert not waiting
    return called


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "::1"])
def test_both_know_each_other(certificates: Path, host: str) -> None:
    called = handshake(client_context(certificates), server_context(certificates), host)
    assert called.version() == "TLSv1.3"
    subject = (called.getpeercert() or {})["subject"]
    assert subject == ((("commonName", "fleetlight client"),),)


def test_another_host_is_not_the_one_called(certificates: Path) -> None:
    with pytest.raises(ssl.SSLCertVerificationError, match="Hostname mismatch"):
        handshake(client_context(certificates), server_context(certificates), "other.host")


@pytest.mark.parametrize("make_context", [client_context, server_context])
def test_neither_side_does_without_a_certificate(certificates: Path, make_context: object) -> None:
    context = make_context(certificates)  # type: ignore[operator]
    assert context.verify_mode == ssl.CERT_REQUIRED
    assert context.minimum_version == ssl.TLSVersion.TLSv1_3


def test_no_session_is_resumed(certificates: Path) -> None:
    assert server_context(certificates).num_tickets == 0
