# SPDX-License-Identifier: Apache-2.0
"""`store_at`: the store of a URL or a folder."""

from __future__ import annotations

import os
from typing import Any

from fleetlight.store.buckets import BucketStore
from fleetlight.store.filesystems import FilesystemStore
from fleetlight.store.local import LocalStore
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
    if not is_url(location):
        return LocalStore(location)
    url = checked(os.fspath(location))
    scheme = url.partition("://")[0].lower()
    if scheme == "file":
        return LocalStore(local_path(url))
    limits = Limits(deadline_s, request_s)
    return (BucketStore if scheme in _BUCKETS else FilesystemStore)(url, limits, options)
