# SPDX-License-Identifier: Apache-2.0
"""A rendezvous listens at one address, and at all only if no other choice is known."""

import logging

import pytest

from fleetlight.wire import listening

OUTSIDE = "127.0.0.3"
#: addresses of names; 127.0.0.3 stands for an address that other hosts know
NAMES = {"debian": "127.0.1.1", "plain": OUTSIDE, "gateway": "203.0.113.1"}


@pytest.fixture
def outside(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The addresses of this machine that other hosts may know."""
    known = [OUTSIDE]
    real = listening.is_loopback
    monkeypatch.setattr(listening, "resolve", lambda host: NAMES.get(host, host))
    monkeypatch.setattr(listening, "is_loopback", lambda a: a not in known and real(a))
    monkeypatch.setattr(
        listening, "own_addresses", lambda: (("lo", "127.0.0.1"), *(("eth", a) for a in known))
    )
    return known


def listens_at(host: str) -> tuple[str, str]:
    """The address at which a master of this name listens, and the address to reach it locally."""
    listener, reached_at = listening.listen_at((host, 0))
    with listener:
        return listener.getsockname()[0], reached_at


@pytest.mark.usefixtures("outside")
@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "plain"])
def test_the_store_listens_at_the_given_address(
    host: str, caplog: pytest.LogCaptureFixture
) -> None:
    expected = NAMES.get(host, host)
    assert listens_at(host) == (expected, expected)
    assert not caplog.records


@pytest.mark.usefixtures("outside")
def test_a_loopback_name_means_the_only_outside_address(caplog: pytest.LogCaptureFixture) -> None:
    assert listens_at("debian") == (OUTSIDE, OUTSIDE)
    assert not caplog.records


def test_without_a_network_a_loopback_name_is_the_loopback(outside: list[str]) -> None:
    outside.clear()
    assert listens_at("debian") == ("127.0.1.1", "127.0.1.1")


def test_an_ambiguous_name_listens_everywhere_with_a_warning(
    outside: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    outside.append("127.0.0.4")
    with caplog.at_level(logging.WARNING, "fleetlight"):
        assert listens_at("debian")[0] == listens_at("gateway")[0] == "0.0.0.0"
    first, second = (record.getMessage() for record in caplog.records)
    assert "listening on all interfaces" in first
    assert "others may connect to any of 127.0.0.3, 127.0.0.4; give the master's address" in first
    assert "gateway is not an address of this machine" in second


@pytest.mark.usefixtures("outside")
def test_address_0_0_0_0_listens_everywhere(caplog: pytest.LogCaptureFixture) -> None:
    assert listens_at("0.0.0.0")[0] == "0.0.0.0"
    assert not caplog.records
