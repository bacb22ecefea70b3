# SPDX-License-Identifier: Apache-2.0
"""Where the meeting point listens: at one address, and at all only where no other way is known."""

from __future__ import annotations

import logging
import socket

import pytest

from fleetlight.collective.membership import rendezvous
from fleetlight.collective.membership.rendezvous import RendezvousDeadline, join, serve

OUTSIDE = "127.0.0.3"
#: what a name stands for; 127.0.0.3 plays an address that others know
NAMES = {"debian": "127.0.1.1", "plain": OUTSIDE, "gateway": "203.0.113.1"}


@pytest.fixture
def outside(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The addresses of this machine that others may know."""
    known = [OUTSIDE]
    real = rendezvous.is_loopback
    monkeypatch.setattr(rendezvous, "resolve", lambda host: NAMES.get(host, host))
    monkeypatch.setattr(rendezvous, "is_loopback", lambda a: a not in known and real(a))
    monkeypatch.setattr(
        rendezvous, "own_addresses", lambda: (("lo", "127.0.0.1"), *(("eth", a) for a in known))
    )
    return known


def listens_at(host: str) -> tuple[str, str]:
    """Where the socket of a master by that name listens, and how it is reached from here."""
    listener, way = rendezvous._listen((host, 0))
    with listener:
        return listener.getsockname()[0], way


@pytest.mark.usefixtures("outside")
@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "plain"])
def test_at_the_address_that_was_given(host: str, caplog: pytest.LogCaptureFixture) -> None:
    expected = NAMES.get(host, host)
    assert listens_at(host) == (expected, expected)
    assert not caplog.records


@pytest.mark.usefixtures("outside")
def test_a_name_of_the_loopback_stands_for_the_one_address_others_know(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert listens_at("debian") == (OUTSIDE, OUTSIDE)
    assert not caplog.records


def test_without_a_network_a_name_of_the_loopback_is_just_that(outside: list[str]) -> None:
    outside.clear()
    assert listens_at("debian") == ("127.0.1.1", "127.0.1.1")


def test_at_all_where_nobody_knows_which_and_never_in_silence(
    outside: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    outside.append("127.0.0.4")
    with caplog.at_level(logging.WARNING, "fleetlight"):
        assert listens_at("debian")[0] == listens_at("gateway")[0] == "0.0.0.0"
    first, second = (record.getMessage() for record in caplog.records)
    assert "listening on all interfaces" in first
    assert "others may come by any of 127.0.0.3, 127.0.0.4; give the master's address" in first
    assert "gateway is no address of this machine" in second


@pytest.mark.usefixtures("outside")
def test_at_all_when_told(caplog: pytest.LogCaptureFixture) -> None:
    assert listens_at("0.0.0.0")[0] == "0.0.0.0"
    assert not caplog.records


@pytest.mark.usefixtures("outside")
@pytest.mark.parametrize("host", ["debian", "127.0.0.1"])
def test_members_on_the_same_machine_find_it_by_its_name(
    host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def looked_up(endpoint: tuple[str, int], timeout: float) -> socket.socket:
        name, port = endpoint
        return real((NAMES.get(name, name), port), timeout=timeout)

    real = socket.create_connection
    monkeypatch.setattr(socket, "create_connection", looked_up)
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
    served = serve((host, port), RendezvousDeadline(20.0))
    served.set("key", "value")
    assert join((host, port), RendezvousDeadline(20.0), "worker 0").get("key") == b"value"
