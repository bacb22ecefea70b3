# SPDX-License-Identifier: Apache-2.0
"""Errors of OpenSSL become sentences with a remedy; the tests of TLS have real refusals."""

import ssl

import pytest

from fleetlight.security.tls_errors import explain


def error(reason: str) -> ssl.SSLError:
    found = ssl.SSLError(1, f"[SSL: {reason}] (_ssl.c:1)")
    found.reason = reason
    return found


def verification_error(code: int, message: str) -> ssl.SSLCertVerificationError:
    found = ssl.SSLCertVerificationError(1, "certificate verify failed")
    found.verify_code, found.verify_message = code, message
    return found


@pytest.mark.parametrize(
    ("reason", "sentence"),
    [
        ("WRONG_VERSION_NUMBER", "does not use TLS; give --ssl DIR"),
        ("PEER_DID_NOT_RETURN_A_CERTIFICATE", "shows no certificate; give every process"),
        ("TLSV13_ALERT_CERTIFICATE_REQUIRED", "it requires a certificate and got none"),
        ("TLSV1_ALERT_UNKNOWN_CA", "another CA signed it"),
        ("SSLV3_ALERT_CERTIFICATE_EXPIRED", "it has expired"),
        ("TLSV1_ALERT_INTERNAL_ERROR", "this side's certificate: TLSV1_ALERT_INTERNAL_ERROR"),
        ("UNSUPPORTED_PROTOCOL", "does not support TLS 1.3"),
        ("SOMETHING_NEW", "TLS failed: SOMETHING_NEW"),
    ],
)
def test_reasons_are_explained(reason: str, sentence: str) -> None:
    assert sentence in explain(error(reason))


@pytest.mark.parametrize(
    ("code", "sentence"),
    [
        (62, "names other hosts (said); make certificates that name this one: fleetlight cert"),
        (64, "names other hosts"),
        (18, "another CA signed the certificate of the other side (said)"),
        (10, "is not valid now (said); check the clocks"),
        (26, "is made for another purpose (said)"),
        (99, "is not valid: said"),
    ],
)
def test_verification_errors_are_explained(code: int, sentence: str) -> None:
    assert sentence in explain(verification_error(code, "said"))


def test_an_error_without_a_reason_keeps_its_text() -> None:
    assert "odd" in explain(ssl.SSLError("odd"))
