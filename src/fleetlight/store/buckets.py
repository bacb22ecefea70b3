# SPDX-License-Identifier: Apache-2.0
"""`BucketStore`: a bucket, by obstore."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

from fleetlight.errors import ConfigError, MissingObjectError, StoreRefusedError
from fleetlight.store.failures import explained
from fleetlight.store.protocol import Data, Entry, Object, Span
from fleetlight.store.retries import Limits, Passing, retried
from fleetlight.store.urls import joined

_T = TypeVar("_T")

#: bytes of one request; objects of more are sent and read in parallel
CHUNK = 8 << 20
#: requests of one object at a time
_PARALLEL = 8
#: a bucket accepts so many parts
_PARTS = 9_000
#: requests that obstore repeats itself, such as one part of many
_REPEATS = 4


class BucketStore:
    """Objects under a URL of a bucket, such as s3://bucket/run."""

    is_exact = True

    def __init__(self, url: str, limits: Limits, options: dict[str, Any]) -> None:
        """`options`: those of obstore, in place of variables such as AWS_REGION."""
        self._url, self._limits, self._pid = url, limits, os.getpid()
        self._obstore = _obstore(url)
        # `create` and `swap` look at the object before they try again
        self._once = self._opened(0, options)
        self._store = self._opened(_REPEATS, options)
        self._threads = ThreadPoolExecutor(_PARALLEL, thread_name_prefix="fleet-store")

    @property
    def url(self) -> str:
        """See `ObjectStore`."""
        return self._url

    def head(self, name: str) -> Entry | None:
        """See `ObjectStore`."""

        def act(_: int) -> Entry | None:
            try:
                return _entry(name, self._obstore.head(self._store, name))
            except FileNotFoundError:
                return None

        return self._retried("look for", name, act)

    def get(self, name: str) -> Object:
        """See `ObjectStore`."""
        return self._retried("read", name, lambda _: self._get(name))

    def get_ranges(self, name: str, spans: Sequence[Span]) -> list[Data]:
        """See `ObjectStore`."""

        def one(span: Span) -> Data:
            start, stop = span
            if start == stop:
                return b""
            options = {"range": (start, stop)}
            return self._retried("read", name, lambda _: self._body(name, options, stop - start)[1])

        return list(self._threads.map(one, spans))

    def put(self, name: str, data: Data | Path) -> str:
        """See `ObjectStore`."""

        def act(_: int) -> str:
            size = data.stat().st_size if isinstance(data, Path) else memoryview(data).nbytes
            chunk = max(CHUNK, -(-size // _PARTS))
            return _version(
                self._obstore.put(
                    self._store,
                    name,
                    data if isinstance(data, Path) else memoryview(data),
                    use_multipart=size > chunk,
                    chunk_size=chunk,
                    max_concurrency=_PARALLEL,
                )
            )

        return self._retried("write", name, act)

    def create(self, name: str, data: Data) -> str | None:
        """See `ObjectStore`."""
        return self._conditional("create", name, data, "create")

    def swap(self, name: str, data: Data, version: str) -> str | None:
        """See `ObjectStore`."""
        etag, _, number = version.partition(" ")
        condition = {"e_tag": etag, **({"version": number} if number else {})}
        return self._conditional("replace", name, data, condition)

    def list(self, prefix: str = "") -> list[Entry]:
        """See `ObjectStore`."""
        # obstore lists whole folders
        folder, _, _ = prefix.rpartition("/")

        def act(_: int) -> list[Entry]:
            pages = self._obstore.list(self._store, prefix=folder or None)
            metas = itertools.chain.from_iterable(pages)
            return [_entry(meta["path"], meta) for meta in metas if meta["path"].startswith(prefix)]

        found = self._retried("list", prefix, act)
        return sorted(found, key=lambda entry: entry.name)

    def delete(self, names: Iterable[str]) -> None:
        """See `ObjectStore`."""
        listed = [*names]

        def act(_: int) -> None:
            try:
                self._obstore.delete(self._store, listed)
            except FileNotFoundError:
                self._delete_each(listed)

        if listed:
            self._retried("delete", f"{listed[0]} and {len(listed) - 1} more", act)

    def _delete_each(self, names: Sequence[str]) -> None:
        """Some buckets refuse a name without an object."""
        for name in names:
            try:
                self._obstore.delete(self._store, name)
            except FileNotFoundError:
                continue

    def _get(self, name: str) -> Object:
        head, first = self._body(name, {"range": (0, CHUNK)})
        entry = _entry(name, head)
        if entry.size <= CHUNK:
            return Object(name, entry.size, entry.version, first)
        whole = bytearray(entry.size)
        whole[:CHUNK] = first

        def read(start: int) -> None:
            stop = min(start + CHUNK, entry.size)
            options = {"range": (start, stop), "if_match": head["e_tag"]}
            whole[start:stop] = self._body(name, options, stop - start)[1]

        list(self._threads.map(read, range(CHUNK, entry.size, CHUNK)))
        return Object(name, entry.size, entry.version, whole)

    def _body(
        self, name: str, options: dict[str, Any], size: int | None = None
    ) -> tuple[Any, Data]:
        """The description and the bytes of a range, `size` or as many as there are."""
        try:
            result = self._obstore.get(self._store, name, options=options)
        except self._obstore.exceptions.PreconditionError:
            raise Passing("the object was replaced while it was read") from None
        except self._obstore.exceptions.GenericError as error:
            if "416 Range" in str(error) and size is None:
                # the object is empty
                return self._obstore.head(self._store, name), b""
            raise
        data = memoryview(result.bytes())
        expected = min(CHUNK, result.meta["size"]) if size is None else size
        if data.nbytes != expected:
            raise Passing(f"got {data.nbytes} bytes, expected {expected}")
        return result.meta, data

    def _conditional(self, operation: str, name: str, data: Data, mode: Any) -> str | None:
        refusals = (
            self._obstore.exceptions.AlreadyExistsError,
            self._obstore.exceptions.PreconditionError,
        )
        content = bytes(data)

        def act(attempt: int) -> str | None:
            try:
                return _version(self._obstore.put(self._once, name, content, mode=mode))
            except refusals as error:
                if "status code: 409" in str(error):
                    # two requests at the same moment: neither has won
                    raise Passing("another request changes the object") from None
                return self._written_before(name, content) if attempt else None

        return self._retried(operation, name, act)

    def _written_before(self, name: str, content: bytes) -> str | None:
        """The version, if an earlier attempt wrote the object and its reply was lost."""
        try:
            there = self._get(name)
        except FileNotFoundError:
            return None
        return there.version if there.data == content else None

    def _retried(self, operation: str, name: str, act: Callable[[int], _T]) -> _T:
        where = joined(self._url, name) if name else self._url
        if os.getpid() != self._pid:
            raise StoreRefusedError(
                f"{where}: could not {operation}: obstore does not work in a forked process; open "
                "the store in this process, and start the process with spawn"
            )

        def found(attempt: int) -> _T:
            try:
                return act(attempt)
            except FileNotFoundError as error:
                if "NoSuchBucket" in str(error) or "ContainerNotFound" in str(error):
                    raise StoreRefusedError(
                        f"{where}: could not {operation}: {explained(error).reason}"
                    ) from None
                raise MissingObjectError(
                    f"{where}: could not {operation}: there is no such object"
                ) from None

        return retried(where, operation, self._limits, found, explained)

    def _opened(self, repeats: int, options: dict[str, Any]) -> Any:
        limits = self._limits
        client = {
            "timeout": timedelta(seconds=limits.request_s),
            "connect_timeout": timedelta(seconds=min(10.0, limits.request_s)),
            # who names an endpoint at http://, means it
            "allow_http": True,
        }
        retries = {
            "max_retries": repeats,
            "retry_timeout": timedelta(seconds=limits.deadline_s),
            "backoff": {"init_backoff": timedelta(seconds=limits.first_pause_s)},
        }
        try:
            return self._obstore.store.from_url(
                self._url, client_options=client, retry_config=retries, **options
            )
        except Exception as error:
            raise ConfigError(f"{self._url}: {explained(error).reason}; correct the URL") from None


def _obstore(url: str) -> Any:
    try:
        import obstore
        import obstore.exceptions
        import obstore.store
    except ImportError as error:
        raise ConfigError(
            f"{url}: this needs obstore, which is not installed; pip install 'fleetlight[storage]'"
        ) from error
    return obstore


def _version(result: Any) -> str:
    etag, number = result["e_tag"], result["version"]
    if etag is None:
        raise StoreRefusedError("the bucket gives no etags, so writers cannot notice each other")
    return f"{etag} {number}" if number not in (None, "null") else str(etag)


def _entry(name: str, meta: Any) -> Entry:
    return Entry(name, meta["size"], _version(meta))
