# SPDX-License-Identifier: Apache-2.0
"""Explain TLS errors in sentences. Pure."""

from __future__ import annotations

import ssl

#: OpenSSL's verification errors
_EXPIRED, _NOT_YET = 10, 9
_OTHER_CA = (2, 18, 19, 20, 21)
_WRONG_PURPOSE = 26
_WRONG_HOST, _WRONG_ADDRESS = 62, 64
_REVOKED = 23
#: errors of the revocation list: none of this CA, invalid, or expired
BAD_LIST = (3, 5, 8, 11, 12)

#: {part of an alert's reason: why the other side refuses this side's certificate}
_ALERTS = {
    "CERTIFICATE_REQUIRED": "it requires a certificate and got none",
    "UNKNOWN_CA": "another CA signed it",
    "CERTIFICATE_EXPIRED": "it has expired",
    "CERTIFICATE_REVOKED": "it is revoked (crl.pem)",
    "UNSUPPORTED_CERTIFICATE": "it is made for the other role (server or client)",
    "CERTIFICATE_UNKNOWN": "it is not acceptable",
    "BAD_CERTIFICATE": "it is not acceptable",
}

_ONE_FOLDER = "give every process of the job the same folder of certificates"


def explain(error: ssl.SSLError) -> str:
    """A sentence about the error, with what to do."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return _distrust(error)
    reason = getattr(error, "reason", None) or str(error)
    if reason in ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "PACKET_LENGTH_TOO_LONG"):
        return "the other side does not use TLS; give --ssl DIR (strategy.ssl) to both or neither"
    if reason in ("PEER_DID_NOT_RETURN_A_CERTIFICATE",):
        return f"the other side shows no certificate; {_ONE_FOLDER}"
    if reason in ("UNSUPPORTED_PROTOCOL", "TLSV1_ALERT_PROTOCOL_VERSION", "NO_PROTOCOLS_AVAILABLE"):
        return "the other side does not support TLS 1.3"
    if reason in ("NO_SHARED_CIPHER", "NO_CIPHERS_AVAILABLE") or "HANDSHAKE_FAILURE" in reason:
        return (
            f"the two sides share no TLS 1.3 cipher suite ({reason}); configure OpenSSL alike for "
            "every process (OPENSSL_CONF)"
        )
    if "ALERT" in reason:
        why = next((text for part, text in _ALERTS.items() if part in reason), reason)
        return f"the other side refuses this side's certificate: {why}; {_ONE_FOLDER}"
    return f"TLS failed: {reason}"


def _distrust(error: ssl.SSLCertVerificationError) -> str:
    code, reason = error.verify_code, error.verify_message
    if code in (_WRONG_HOST, _WRONG_ADDRESS):
        return (
            f"the certificate of the other side names other hosts ({reason}); make certificates "
            "that name this one: fleetlight cert DIR --host NAME"
        )
    if code == _REVOKED:
        return (
            f"the certificate of the other side is revoked ({reason}, by crl.pem); give that "
            "process another certificate"
        )
    if code in BAD_LIST:
        return (
            f"crl.pem of this side is no valid revocation list of the CA that signed the other "
            f"side's certificate ({reason}); let that CA make a new list"
        )
    if code in _OTHER_CA:
        return f"another CA signed the certificate of the other side ({reason}); {_ONE_FOLDER}"
    if code in (_EXPIRED, _NOT_YET):
        return (
            f"the certificate of the other side is not valid now ({reason}); check the clocks, or "
            "make new ones: fleetlight cert DIR --replace"
        )
    if code == _WRONG_PURPOSE:
        return f"the certificate of the other side is made for another purpose ({reason})"
    return f"the certificate of the other side is not valid: {reason}"
