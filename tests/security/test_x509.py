# SPDX-License-Identifier: Apache-2.0
"""The dates of a certificate, parsed without a library."""

import datetime
import ssl
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetlight.security.certificates import make
from fleetlight.security.x509 import validity

x509 = pytest.importorskip("cryptography.x509")


@pytest.mark.parametrize("days", [1, 365, 36_500], ids=["short", "usual", "four-digit years"])
def test_dates_equal_those_of_the_library(days: int, tmp_path: Path) -> None:
    make(tmp_path, days=days)
    for name in ("ca.pem", "server.pem"):
        text = (tmp_path / name).read_text()
        found = x509.load_pem_x509_certificate(text.encode())
        expected = (found.not_valid_before_utc, found.not_valid_after_utc)
        assert validity(ssl.PEM_cert_to_DER_cert(text)) == expected


@given(st.binary(max_size=300))
def test_any_bytes_are_parsed_or_refused(data: bytes) -> None:
    try:
        first, last = validity(data)
    except ValueError:
        return
    assert isinstance(first, datetime.datetime)
    assert isinstance(last, datetime.datetime)


def test_a_truncated_certificate_is_refused(tmp_path: Path) -> None:
    make(tmp_path)
    data = ssl.PEM_cert_to_DER_cert((tmp_path / "ca.pem").read_text())
    for length in range(0, len(data), 7):
        with pytest.raises(ValueError, match="its data is"):
            validity(data[:length])
