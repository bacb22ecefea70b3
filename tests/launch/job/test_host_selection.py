# SPDX-License-Identifier: Apache-2.0
"""Selection of this machine's address, and of the rendezvous endpoint."""

from typing import Any

import pytest

from fleetlight.errors import ConfigError
from fleetlight.launch.inventory import Machine
from fleetlight.launch.job.host_selection import HostSelection, select_hosts
from fleetlight.launch.job.options import LaunchOptions

SECOND = Machine(
    addresses=(("lo", "127.0.0.1"), ("eth0", "10.0.0.2")),
    resolve=lambda host: {"first": "10.0.0.1", "second": "10.0.0.2"}.get(host, host),
    route=lambda host: "10.0.0.2",
)


def place(notes: list[str] | None = None, **flags: Any) -> HostSelection:
    return select_hosts(
        LaunchOptions(script="t.py", **flags), SECOND, [] if notes is None else notes
    )


def test_single_machine_needs_no_rendezvous() -> None:
    assert place() == HostSelection(host="127.0.0.1", rendezvous=None)


def test_single_machine_may_use_an_external_address() -> None:
    assert place(host="10.0.0.2").host == "10.0.0.2"
    assert place(ips=("10.0.0.2",)) == HostSelection(host="10.0.0.2")


def test_master_without_effect_is_reported() -> None:
    notes: list[str] = []
    assert place(notes, nnodes=(1, 1), master=("first", 1)).rendezvous is None
    assert "--master has no effect" in notes[0]


def test_own_position_in_a_list() -> None:
    notes: list[str] = []
    found = place(notes, ips=("10.0.0.1", "10.0.0.2"))
    assert found.host == "10.0.0.2"
    assert found.rendezvous is not None
    assert found.rendezvous.master == ("10.0.0.1", 6170)
    assert (found.rendezvous.rank, found.rendezvous.is_master) == (1, False)
    assert "this machine's address: 10.0.0.2" in notes[0]


def test_first_of_a_list_is_the_master() -> None:
    spec = place(ips=("second", "first"), start_port=7000).rendezvous
    assert spec is not None
    assert spec.is_master
    assert spec.master == ("10.0.0.2", 7000)
    assert spec.hosts == ("10.0.0.2", "10.0.0.1")


def test_own_address_is_that_of_the_route() -> None:
    notes: list[str] = []
    found = place(notes, nnodes=(2, 3), master=("first", 6170))
    assert found.host == "10.0.0.2"
    assert found.rendezvous is not None
    assert not found.rendezvous.is_master
    assert (found.rendezvous.min_nodes, found.rendezvous.max_nodes) == (2, 3)
    assert "from the route to the master" in notes[0]


def test_machine_with_the_master_address_serves_it() -> None:
    spec = place(nnodes=(2, 2), master=("second", 6170)).rendezvous
    assert spec is not None
    assert spec.is_master
    spec = place(nnodes=(2, 2), master=("second", 6170), rank=1).rendezvous
    assert spec is not None
    assert not spec.is_master


def test_only_listed_processes_of_this_machine_start() -> None:
    found = place(servers=("10.0.0.1:5000",), workers=("10.0.0.1:5001", "10.0.0.2:5001"))
    assert found.servers == ()
    assert found.workers == (("10.0.0.2", 5001),)
    assert found.rendezvous is not None
    # a port of the first machine that no process uses
    assert found.rendezvous.master == ("10.0.0.1", 5002)


def test_addresses_are_compared_as_a_whole() -> None:
    own = Machine(addresses=(("eth0", "10.0.0.1"),))
    options = LaunchOptions(script="t.py", servers=("10.0.0.1:1",), workers=("10.0.0.10:1",))
    assert select_hosts(options, own, []).workers == ()


def test_lists_that_name_only_this_machine() -> None:
    found = place(servers=("127.0.0.1:1",), workers=("127.0.0.1:2", "127.0.0.1:3"))
    assert found.rendezvous is None
    assert len(found.workers) == 2


def test_list_in_mixed_order_is_reported() -> None:
    notes: list[str] = []
    place(notes, servers=("10.0.0.1:1",), workers=("10.0.0.1:2", "10.0.0.2:2", "10.0.0.1:3"))
    assert any("workers are numbered machine by machine" in note for note in notes)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            {"ips": ("10.0.0.1", "10.0.0.3")},
            "none of .* is an address of this machine, which has 10.0",
        ),
        ({"ips": ("127.0.0.1", "127.0.0.2")}, "all addresses of this machine; pass --host"),
        ({"ips": ("10.0.0.2", "second")}, "lists 10.0.0.2 twice"),
        ({"ips": ("10.0.0.1", "10.0.0.2"), "host": "127.0.0.1"}, "is not among the machines"),
        ({"ips": ("10.0.0.1", "10.0.0.2"), "rank": 0}, "10.0.0.2 has rank 1"),
        ({"ips": ("10.0.0.1", "10.0.0.2"), "nnodes": (3, 3)}, "--ips lists 2 machines"),
        ({"ips": ("10.0.0.1", "10.0.0.2"), "master": ("a", 1)}, "omit --master"),
        ({"host": "10.0.0.9"}, "--host 10.0.0.9: not an address of this machine"),
        ({"nnodes": (2, 2)}, "--nnodes 2 needs --master"),
        ({"master": ("first", 1)}, "--master needs --nnodes"),
        ({"rank": 1}, "--rank needs"),
        ({"nnodes": (2, 2), "master": ("first", 1), "rank": 2}, "outside 0..1"),
        ({"servers": ("10.0.0.2:1",)}, "--servers needs --workers too"),
        ({"workers": ("10.0.0.2:1",)}, "--workers needs --servers too"),
        ({"servers": ("second:1",), "workers": ("second:2", "second:2")}, "10.0.0.2:2 twice"),
        ({"servers": ("a:1",), "workers": ("a:2",), "worker_num": 1}, "omit --worker_num"),
        ({"servers": ("a:1",), "workers": ("a:2",), "nnodes": (2, 2), "master": ("a", 1)}, "omit"),
        ({"servers": ("second",), "workers": ("second:1",)}, "expected host:port"),
    ],
)
def test_contradicting_flags_are_refused(flags: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        place(**flags)
