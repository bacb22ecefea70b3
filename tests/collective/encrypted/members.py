# SPDX-License-Identifier: Apache-2.0
"""Members of an encrypted group in threads of one process, with real connections."""

import contextlib
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from fleetlight.collective.encrypted.links import Links
from fleetlight.security.context import client_context, server_context

T = TypeVar("T")
LIMIT_S = 20.0


@contextlib.contextmanager
def linked(folder: Path, count: int) -> Iterator[list[Links]]:
    """Yields `count` workers that know each other's endpoints."""
    tls: dict[str, Any] = {"as_server": server_context(folder), "as_client": client_context(folder)}
    links = [Links(i, socket.create_server(("127.0.0.1", 0)), **tls) for i in range(count)]
    for one in links:
        one.endpoints = {other.index: other.address for other in links}
    try:
        yield links
    finally:
        for one in links:
            one.close()


def each(functions: list[Callable[[], T]]) -> list[T]:
    """Calls all functions together, each in its own thread; returns their results."""
    with ThreadPoolExecutor(len(functions)) as pool:
        return [future.result(60) for future in [pool.submit(f) for f in functions]]
