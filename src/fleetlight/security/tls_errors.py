# SPDX-License-Identifier: Apache-2.0
"""Why a TLS connection did not come about, as a sentence. Pure."""

from __future__ import annotations

import ssl

#: what OpenSSL says of a certificate, by number
_EXPIRED, _NOT_YET = 10, 9
_OTHER_CA = (2, 18, 19, 20, 21)
_WRONG_PURPOSE = 26
_WRONG_HOST, _WRONG_ADDRESS = 62, 64
_REVOKED = 23
#: of the list of revoked certificates: there is none of this CA, a false one, one past its time
BAD_LIST = (3, 5, 8, 11, 12)

#: part of the reason of an alert -> why the other side refuses what this one has shown
_ALERTS = {
    "CERTIFICATE_REQUIRED": "it wants a certificate and got none",
    "UNKNOWN_CA": "another CA has signed it",
    "CERTIFICATE_EXPIRED": "it has expired",
    "CERTIFICATE_REVOKED": "it is revoked (crl.pem)",
    "UNSUPPORTED_CERTIFICATE": "it is not made for this side",
    "CERTIFICATE_UNKNOWN": "it is not acceptable there",
    "BAD_CERTIFICATE": "it is not acceptable there",
}

_ONE_FOLDER = "give every process of the job the same folder of certificates"


def explain(error: ssl.SSLError) -> str:
    """What went wrong between the two sides, and what to do."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return _distrust(error)
    reason = getattr(error, "reason", None) or str(error)
    if reason in ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "PACKET_LENGTH_TOO_LONG"):
        return "the other side does not speak TLS; give --ssl DIR (strategy.ssl) to both or neither"
    if reason in ("PEER_DID_NOT_RETURN_A_CERTIFICATE",):
        return f"the other side shows no certificate; {_ONE_FOLDER}"
    if reason in ("UNSUPPORTED_PROTOCOL", "TLSV1_ALERT_PROTOCOL_VERSION", "NO_PROTOCOLS_AVAILABLE"):
        return "the other side does not speak TLS 1.3"
    if reason in ("NO_SHARED_CIPHER", "NO_CIPHERS_AVAILABLE") or "HANDSHAKE_FAILURE" in reason:
        return (
            f"the two sides have no suite of TLS 1.3 in common ({reason}); give every process the "
            "same strategy.ssl_configs.ciphers (--ssl_ciphers, OPENSSL_CONF)"
        )
    if "ALERT" in reason:
        why = next((text for part, text in _ALERTS.items() if part in reason), reason)
        return f"the other side refuses the certificate of this one: {why}; {_ONE_FOLDER}"
    return f"TLS failed: {reason}"


def _distrust(error: ssl.SSLCertVerificationError) -> str:
    code, said = error.verify_code, error.verify_message
    if code in (_WRONG_HOST, _WRONG_ADDRESS):
        return (
            f"the certificate of the other side is for other hosts ({said}); make certificates "
            "that name it: fleetlight cert DIR --host NAME"
        )
    if code == _REVOKED:
        return (
            f"the certificate of the other side is revoked ({said}, by crl.pem); give that process "
            "one that is not"
        )
    if code in BAD_LIST:
        return (
            f"crl.pem of this side is not a valid list of the CA that has signed the certificate "
            f"of the other ({said}); let that CA make a new list"
        )
    if code in _OTHER_CA:
        return f"another CA has signed the certificate of the other side ({said}); {_ONE_FOLDER}"
    if code in (_EXPIRED, _NOT_YET):
        return (
            f"the certificate of the other side is not valid now ({said}); look at the clocks, or "
            "make new ones: fleetlight cert DIR --replace"
        )
    if code == _WRONG_PURPOSE:
        return f"the certificate of the other side is not made for that side ({said})"
    return f"the certificate of the other side is not valid: {said}"
