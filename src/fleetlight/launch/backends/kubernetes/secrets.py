# SPDX-License-Identifier: Apache-2.0
"""The secret of a job: its token, and its certificates. `--print` shows it without values."""

from __future__ import annotations

import base64
import secrets
from pathlib import Path
from typing import Any

from fleetlight.errors import ConfigError
from fleetlight.launch.job.spec import JobSpec

#: a text that no process accepts as a token
PLACEHOLDER = "REPLACE"
#: the key of the token
TOKEN_KEY = "token"


def certificate_files(folder: str) -> list[str]:
    """The names of the files in a folder of certificates that processes read."""
    return sorted(file.name for file in Path(folder).iterdir() if file.suffix in (".pem", ".key"))


def keys(job: JobSpec) -> list[str]:
    """The names of the values in the secret."""
    return [TOKEN_KEY, *([] if job.ssl is None else certificate_files(job.ssl.folder))]


def secret(job: JobSpec, name: str, owner: dict[str, Any] | None = None) -> dict[str, Any]:
    """The secret with its values; one with an owner ends with it."""
    # a collective job has none, and ignores this one
    token = job.token.reveal() if job.token else secrets.token_hex(32)
    values = {TOKEN_KEY: token.encode()}
    if job.ssl is not None:
        for file in certificate_files(job.ssl.folder):
            values[file] = _content(Path(job.ssl.folder, file))
    data = {key: base64.b64encode(value).decode() for key, value in values.items()}
    return {**_head(name, owner), "type": "Opaque", "data": data}


def placeholder(job: JobSpec, name: str, namespace: str) -> dict[str, Any]:
    """The secret without values."""
    data = dict.fromkeys(keys(job), PLACEHOLDER)
    head = _head(name, None)
    if namespace:
        head["metadata"]["namespace"] = namespace
    return {**head, "type": "Opaque", "stringData": data}


def copied(found: dict[str, Any], owner: dict[str, Any]) -> dict[str, Any]:
    """A secret of the cluster, for another owner."""
    return {**_head(found["metadata"]["name"], owner), "type": "Opaque", "data": found["data"]}


def _head(name: str, owner: dict[str, Any] | None) -> dict[str, Any]:
    labels = {"app.kubernetes.io/managed-by": "fleetlight"}
    owners = {} if owner is None else {"ownerReferences": [owner]}
    metadata = {"name": name, "labels": labels, **owners}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": metadata}


def _content(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise ConfigError(f"--ssl: {file} cannot be read: {error.strerror}") from None
