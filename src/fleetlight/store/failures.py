# SPDX-License-Identifier: Apache-2.0
"""What an error of a bucket means: whether a retry may help, and what the user can do.

Bodies of replies never reach a message: that of a wrong signature has the key's name in it.
"""

from __future__ import annotations

import dataclasses
import re

from fleetlight.store.urls import shown

_CODE = re.compile(r"<Code>(\w+)</Code>")
_STATUS = re.compile(r"status code: (\d{3})[^:\n]*")
#: where machines of a cloud ask for their credentials
_METADATA = (
    "169.254.169.254",
    "169.254.170.2",
    "/latest/api/token",
    "/latest/meta-data",
    "/computeMetadata/",
    "/metadata/identity",
)

_CREDENTIALS = (
    "there are no credentials; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (s3), "
    "GOOGLE_APPLICATION_CREDENTIALS (gs) or AZURE_STORAGE_ACCOUNT_NAME and "
    "AZURE_STORAGE_ACCOUNT_KEY (az) in every process, or give the machine a role"
)
_CLOCK = "the clock of this machine is wrong; set it, for example with chronyc makestep"
_DENIED = (
    "access is denied; the credentials need permission to list, read, write and delete under this "
    "URL"
)
_WRONG_KEY = "the credentials are not valid; check the key, its secret and the session token"
_EXPIRED = "the credentials have expired; renew them"
_BUCKET = "the bucket does not exist; create it, or correct the URL, the endpoint or the region"
_REGION = "the bucket is in another region; set AWS_REGION"

_LASTING = {
    "NoSuchBucket": _BUCKET,
    "ContainerNotFound": _BUCKET,
    "InvalidBucketName": _BUCKET,
    "RequestTimeTooSkewed": _CLOCK,
    "RequestExpired": _CLOCK,
    "ExpiredToken": _EXPIRED,
    "InvalidAccessKeyId": _WRONG_KEY,
    "SignatureDoesNotMatch": _WRONG_KEY,
    "InvalidToken": _WRONG_KEY,
    "AuthenticationFailed": _WRONG_KEY,
    "AccessDenied": _DENIED,
    "AuthorizationFailure": _DENIED,
    "PermanentRedirect": _REGION,
    "AuthorizationHeaderMalformed": _REGION,
}
_PASSING = {
    "SlowDown": "the bucket asks for fewer requests",
    "ConditionalRequestConflict": "another request changed the object at the same time",
    "OperationAborted": "another request changed the object at the same time",
    "RequestTimeout": "the bucket did not receive the whole request in time",
    "IncompleteBody": "the bucket did not receive the whole request",
    "BadDigest": "the bytes changed on their way",
    "XAmzContentSHA256Mismatch": "the bytes changed on their way",
}


@dataclasses.dataclass(frozen=True)
class Explanation:
    """The meaning of an error."""

    reason: str
    #: a retry may help
    passes: bool


def explained(error: BaseException) -> Explanation:
    """The meaning of an error of obstore, by its text: its classes tell too little apart."""
    text = str(error)
    found, status = _CODE.search(text), _STATUS.search(text)
    code = found[1] if found else ""
    if code in _LASTING:
        return Explanation(_LASTING[code], passes=False)
    if code in _PASSING:
        return Explanation(f"{_PASSING[code]} ({code})", passes=True)
    if any(address in text for address in _METADATA) or "MissingCredential" in text:
        return Explanation(_CREDENTIALS, passes=False)
    if "redirect without LOCATION" in text:
        return Explanation(_REGION, passes=False)
    return _by_status(int(status[1]), code) if status else _without_status(text)


def _by_status(status: int, code: str) -> Explanation:
    which = f"HTTP {status} {code}".strip()
    if status == 403:
        return Explanation(f"{_DENIED} ({which})", passes=False)
    if status == 401:
        return Explanation(f"{_WRONG_KEY} ({which})", passes=False)
    if status in (408, 409, 429) or status >= 500:
        return Explanation(f"the bucket answers {which}", passes=True)
    return Explanation(f"the bucket refuses the request: {which}", passes=False)


def _without_status(text: str) -> Explanation:
    first = shown(text.partition("\n")[0])[:200]
    if any(word in text for word in ("kind: Connect", "kind: Timeout", "kind: Request")):
        return Explanation(f"the endpoint cannot be reached: {first}", passes=True)
    if any(word in text for word in ("HTTP error", "decod", "body", "connection", "timed out")):
        return Explanation(f"the connection was cut: {first}", passes=True)
    return Explanation(first, passes=False)
