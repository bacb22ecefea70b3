# SPDX-License-Identifier: Apache-2.0
"""torch's store, with a deadline for every wait."""

import contextlib
import dataclasses
import functools
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fleetlight.errors import LaunchError
from fleetlight.launch.job.spec import RendezvousSpec
from fleetlight.launch.machines import store, store_connection
from fleetlight.launch.machines.store import Store
from fleetlight.launch.processes.ports import Reservation
from fleetlight.security.certificates import make
from fleetlight.strategy.features.ssl import Encryption

HOST = "127.0.0.1"


def free_endpoint() -> RendezvousSpec:
    with contextlib.closing(Reservation(HOST)) as held:
        return RendezvousSpec(master=(HOST, held.port), min_nodes=2, max_nodes=2)


def test_store_is_served_and_reached_by_clients() -> None:
    spec = free_endpoint()
    assert not store.is_served(spec)
    served = store.serve(spec)
    assert served is not None
    assert store.is_served(spec)
    assert store.serve(spec) is None  # the port is taken now
    found: Store = store.connect(spec)
    served.set("key", "value")
    assert not found.check(["key", "other"])
    assert found.get("key") == b"value"
    assert (found.add("count", 2), served.add("count", 1)) == (2, 3)


def test_prefixes_of_a_store_have_separate_keys() -> None:
    served = store.serve(free_endpoint())
    assert served is not None
    one, two = served.prefixed("round.1"), served.prefixed("round.2")
    one.set("key", "value")
    assert one.check(["key"])
    assert not two.check(["key"])
    assert served.get("round.1/key") == b"value"


class RetryForever:
    """Retries until the call succeeds."""

    def __init__(self) -> None:
        self.failed: list[RuntimeError] = []

    def outlast(self, attempt: Callable[[], Any]) -> Any:
        while True:
            try:
                return attempt()
            except store_connection.StoreGoneError:
                raise
            except RuntimeError as error:
                self.failed.append(error)


@pytest.mark.parametrize("is_inside", [False, True])
def test_broken_connection_is_replaced(tmp_path: Path, is_inside: bool) -> None:
    spec = free_endpoint()
    if is_inside:
        make(tmp_path)
        spec = dataclasses.replace(spec, ssl=Encryption(str(tmp_path)))
    served, retry = store.serve(spec), RetryForever()
    assert served is not None
    found = store.connect(spec, retry=retry)
    assert found.add("count", 1) == 1

    def fail(*arguments: object) -> None:
        raise RuntimeError("connection reset by peer")

    class Cut:
        add = check = fail

    found._link._raw = Cut()
    assert found.add("count", 1) == 2
    assert [str(error) for error in retry.failed] == ["connection reset by peer"]


def test_closed_store_is_not_retried() -> None:
    spec = free_endpoint()
    served = store.serve(spec)
    assert served is not None
    found = store.connect(spec, retry=RetryForever())
    found._link._raw = None
    served.set("store", "of another job")
    with pytest.raises(store_connection.StoreGoneError, match="another store has taken its place"):
        found.check(["key"])
    away = free_endpoint()
    renew = functools.partial(store._reconnect, away, away.master, b"")
    with pytest.raises(store_connection.StoreGoneError, match="no process listens"):
        Store(store_connection.StoreConnection(None, renew, RetryForever())).check(["key"])


@pytest.mark.slow
def test_store_over_tls(tmp_path: Path) -> None:
    make(tmp_path / "ours")
    make(tmp_path / "theirs")
    spec = dataclasses.replace(free_endpoint(), ssl=Encryption(str(tmp_path / "ours")))
    served = store.serve(spec)
    assert served is not None
    found = store.connect(spec)
    served.set("key", "value")
    assert found.get("key") == b"value"
    for other in (None, Encryption(str(tmp_path / "theirs"))):
        with pytest.raises((LaunchError, store_connection.StoreLostError)):
            store.connect(dataclasses.replace(spec, ssl=other), left_s=1.0)


@pytest.fixture
def _silent(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """torch's client waits forever for a greeting."""
    release = threading.Event()
    monkeypatch.setattr(store, "_MIN_REPLY_S", 0.01)
    monkeypatch.setattr(store, "_client", lambda host, port, deadline_s: release.wait())
    yield
    release.set()


@pytest.mark.usefixtures("_silent")
def test_another_program_at_the_port_is_named_by_the_deadline() -> None:
    with socket.create_server((HOST, 0)) as other:
        spec = RendezvousSpec(master=other.getsockname(), min_nodes=2, max_nodes=2)
        who = f" but process {os.getpid()} " if sys.platform == "linux" else ""
        with pytest.raises(LaunchError, match=rf"is not a fleetrun{who}.* not reply within 0.02 s"):
            store.connect(spec, left_s=0.02)


@pytest.mark.usefixtures("_silent")
def test_owner_of_a_remote_port_is_not_looked_up_locally() -> None:
    with socket.create_server((HOST, 0)) as other:
        away = ("203.0.113.1", other.getsockname()[1])
        spec = RendezvousSpec(master=away, min_nodes=2, max_nodes=2)
        with pytest.raises(LaunchError, match=r"is not a fleetrun: the store did not reply"):
            store.connect(spec, left_s=0)


# -- A connection to the store that may hang or fail


def test_hanging_call_is_abandoned() -> None:
    release = threading.Event()
    with pytest.raises(store_connection.StoreLostError, match=r"did not reply within 0.01 s"):
        store_connection.bounded(release.wait, deadline_s=0.01)
    release.set()


def test_values_and_errors_pass_through() -> None:
    assert store_connection.bounded(lambda: 3) == 3
    with pytest.raises(KeyError):
        store_connection.bounded(lambda: {}["x"])


def fail(raw: object) -> None:
    raise RuntimeError(f"{raw} failed")


def test_failed_connection_is_not_reused() -> None:
    link = store_connection.StoreConnection("first", lambda: "second")
    assert link.call(str.upper) == "FIRST"
    with pytest.raises(RuntimeError, match="first failed"):
        link.call(fail)
    assert link.call(str.upper) == "SECOND"


def test_connection_within_this_process_is_never_replaced() -> None:
    link = store_connection.StoreConnection("own")
    with pytest.raises(RuntimeError, match="own failed"):
        link.call(fail)
    assert link.raw == "own"
