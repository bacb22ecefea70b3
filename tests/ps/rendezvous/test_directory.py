# SPDX-License-Identifier: Apache-2.0
"""The directory knows the newest process of each server, and refuses older ones."""

from __future__ import annotations

import pytest

from fleetlight.errors import MembershipError
from fleetlight.ps.messages import Announce, ServerEntry
from fleetlight.ps.rendezvous.directory import SILENCE_S, Directory, OccupiedError


def known(incarnation: int, process: str, server: int = 0) -> list[ServerEntry]:
    """What a worker reports."""
    return [ServerEntry(server, incarnation, process, "10.0.0.1", 9)]


def said(server: int = 0, incarnation: int = 0, port: int = 7000) -> Announce:
    return Announce(server, incarnation, "10.0.0.1", port)


def test_servers_are_listed_in_the_order_of_their_indices() -> None:
    directory = Directory(2)
    assert directory.missing() == [0, 1]
    directory.announce("b", said(1, port=7001), 0.0)
    assert directory.missing() == [0]
    directory.announce("a", said(0), 0.0)
    assert directory.entries() == [
        ServerEntry(0, 1, "a", "10.0.0.1", 7000),
        ServerEntry(1, 1, "b", "10.0.0.1", 7001),
    ]


def test_the_same_process_keeps_its_incarnation() -> None:
    directory = Directory(1)
    # a reply was lost, so the process still says 0
    assert [directory.announce("a", said(), now) for now in (0.0, 1.0)] == [1, 1]
    assert directory.announce("a", said(incarnation=1), 2.0) == 1


def test_a_process_replaces_one_whose_connection_has_ended() -> None:
    directory = Directory(1)
    directory.announce("a", said(), 0.0)
    directory.lose("a")
    assert directory.announce("b", said(port=8000), 0.1) == 2
    assert directory.entries() == [ServerEntry(0, 2, "b", "10.0.0.1", 8000)]


def test_a_process_waits_while_another_one_may_run() -> None:
    directory = Directory(1)
    directory.announce("a", said(), 0.0)
    with pytest.raises(OccupiedError):
        directory.announce("b", said(port=8000), SILENCE_S)
    text = directory.occupied_text(said(port=8000), 3.0)
    assert "two servers 0: one listens at 10.0.0.1:7000 and announced itself 3.0 s ago" in text
    assert directory.announce("b", said(port=8000), SILENCE_S + 0.1) == 2


def test_a_process_that_wakes_up_after_its_successor_is_refused() -> None:
    directory = Directory(1)
    directory.announce("a", said(), 0.0)
    directory.announce("b", said(port=8000), SILENCE_S + 1)
    with pytest.raises(MembershipError, match=r"incarnation 1, is older than incarnation 2, which"):
        directory.announce("a", said(incarnation=1), SILENCE_S + 2)


def test_two_processes_with_one_incarnation_are_refused() -> None:
    directory = Directory(1)
    directory.announce("a", said(incarnation=3), 0.0)
    with pytest.raises(MembershipError, match="has the same number as incarnation 3"):
        directory.announce("b", said(incarnation=3), SILENCE_S + 1)


def test_an_index_beyond_the_job_is_refused() -> None:
    with pytest.raises(MembershipError, match="announces index 2, expected 0 to 1"):
        Directory(2).announce("a", said(2), 0.0)


def test_servers_teach_a_directory_without_memory() -> None:
    directory = Directory(1)
    # the older one comes first
    assert directory.announce("a", said(incarnation=1), 0.0) == 1
    assert directory.announce("b", said(incarnation=2), 0.0) == 2
    with pytest.raises(MembershipError):
        directory.announce("a", said(incarnation=1), 0.0)


def test_workers_teach_a_directory_without_memory() -> None:
    newcomer = Directory(1)
    # workers know incarnation 3, so a process that was started after it gets a higher number
    assert newcomer.announce("d", said(), 0.0) == 1
    newcomer.learn(known(3, "c"))
    assert newcomer.announce("d", said(incarnation=1), 1.0) == 4
    survivor = Directory(1)
    survivor.learn(known(3, "c"))
    assert survivor.announce("c", said(incarnation=3), 0.0) == 3
    stale = Directory(1)
    stale.announce("a", said(incarnation=2), 0.0)
    stale.learn(known(3, "c") + known(1, "x", server=9))
    assert stale.missing() == [0]
    with pytest.raises(MembershipError, match="is older than incarnation 3; end this process"):
        stale.announce("a", said(incarnation=2), 0.0)


def test_the_job_is_over_when_all_servers_have_left() -> None:
    directory = Directory(2)
    directory.depart(0)
    assert not directory.is_over
    directory.depart(1)
    assert directory.is_over


def test_a_number_that_a_predecessor_had_is_given_once() -> None:
    directory = Directory(1)
    assert directory.announce("b", said(), 0.0) == 1
    # before the directory lost its memory, another process had this number
    directory.learn(known(1, "a"))
    assert directory.entries()[0].incarnation == 2
    directory.learn(known(2, "b"))
    assert directory.entries()[0].incarnation == 2


def test_an_owner_of_buckets_has_an_incarnation() -> None:
    directory = Directory(2)
    directory.announce("a", Announce(0, 0, "h", 1, [(0, 10)]), 0.0)
    directory.announce("b", Announce(1, 0, "h", 2, [(10, 16)]), 0.0)
    directory.lose("b")
    directory.announce("c", Announce(1, 0, "h", 3, [(10, 16)]), 1.0)
    owners = [(one.buckets, one.server, one.incarnation) for one in directory.entries()]
    assert owners == [([(0, 10)], 0, 1), ([(10, 16)], 1, 2)]


def test_no_two_servers_own_a_bucket() -> None:
    directory = Directory(2)
    directory.announce("a", Announce(0, 0, "h", 1, [(0, 10)]), 0.0)
    text = "announces buckets 8 to 15, but server 0 stores 0 to 9"
    with pytest.raises(MembershipError, match=text):
        directory.announce("b", Announce(1, 0, "h", 2, [(8, 16)]), 0.0)
