# SPDX-License-Identifier: Apache-2.0
"""`store_at`: the store of a URL or a folder."""

from __future__ import annotations

import os
from typing import Any

from fleetlight.store.protocol import ObjectStore
from fleetlight.store.retries import Limits
from fleetlight.store.urls import Location, checked, is_url, local_path

#: obstore serves these
_BUCKETS = ("s3", "s3a", "gs", "az", "azure", "abfs", "abfss", "adl")


def store_at(
    location: Location,
    *,
    deadline_s: float = Limits.deadline_s,
    request_s: float = Limits.request_s,
    **options: Any,
) -> ObjectStore:
    """The store of a URL, such as s3://bucket/run, or of a local folder.

    obstore serves s3, gs and az; fsspec all other schemes, such as hdfs. `options` are theirs,
    such as `endpoint` and `region`. obstore takes those that are not given from variables, such as
    AWS_REGION, AWS_ENDPOINT_URL, GOOGLE_APPLICATION_CREDENTIALS and AZURE_STORAGE_ACCOUNT_NAME.

    An operation is repeated until `deadline_s`, and one request takes at most `request_s`.
    """
    url = checked(os.fspath(location)) if is_url(location) else ""
    scheme = url.partition("://")[0].lower()
    limits = Limits(deadline_s, request_s)
    # the launcher reads URLs, and starts without the modules that open them
    if scheme in ("", "file"):
        from fleetlight.store.local import LocalStore

        return LocalStore(local_path(url) if url else location)
    if scheme in _BUCKETS:
        from fleetlight.store.buckets import BucketStore

        return BucketStore(url, limits, options)
    from fleetlight.store.filesystems import FilesystemStore

    return FilesystemStore(url, limits, options)
