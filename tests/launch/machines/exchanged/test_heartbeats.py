# SPDX-License-Identifier: Apache-2.0
"""Heartbeats of launchers."""

from tests.launch.machines.doubles import Store

from fleetlight.launch.machines.exchanged.heartbeats import BEAT_S, SILENT_S, Heartbeats


def test_launchers_with_heartbeats_are_reachable() -> None:
    store = Store()
    one, two = Heartbeats(store, "a", now=0), Heartbeats(store, "b", now=0)
    assert (one.number, two.number) == (1, 2)
    two.beat(0)
    one.beat(0)
    assert one.reachable_hosts(0) == ["a", "b"]


def test_silence_is_detected_with_the_local_clock_only() -> None:
    store = Store()
    one, two = Heartbeats(store, "a", now=0), Heartbeats(store, "b", now=1e6)
    two.beat(1e6)
    for second in range(20):
        one.beat(float(second))
        assert one.is_lost(two.number, float(second)) == (second > SILENT_S)
        assert not one.is_lost(one.number, float(second))
    assert one.reachable_hosts(19) == ["a"]
    two.beat(1e6 + 1)
    one.beat(20)
    assert not one.is_lost(two.number, 20)
    assert SILENT_S + BEAT_S < 10


def test_silent_launcher_is_lost_after_the_deadline() -> None:
    store = Store()
    one, two = Heartbeats(store, "a", 0, patience_s=60), Heartbeats(store, "b", 0)
    two.beat(0)
    for second in range(62):
        one.beat(float(second))
        assert one.is_silent(two.number, float(second)) == (second > SILENT_S)
        assert one.is_lost(two.number, float(second)) == (second > 60)
    assert one.silence_s(two.number, 61) == 61
    assert one.remaining(61) == {one.number}


def test_launcher_gets_its_full_deadline_after_an_outage() -> None:
    store = Store()
    one, two = Heartbeats(store, "a", 0, patience_s=60), Heartbeats(store, "b", 0)
    two.beat(0)
    for second in range(31):
        one.beat(float(second))
        # it could use none of its 5 s since it fell silent
        assert one.is_late(two.number, 0, second, 5) == (5 <= second <= SILENT_S)
    two.beat(1e6)
    one.beat(31)
    assert not one.is_late(two.number, 0, 35, 5)
    assert one.is_late(two.number, 0, 36, 5)
    one.beat(92)
    assert one.is_late(two.number, 90, 92, 5)


def test_beats_are_not_more_frequent_than_needed() -> None:
    store = Store()
    one = Heartbeats(store, "a", now=0)
    for tenth in range(11):
        one.beat(tenth / 10)
    assert store.add("beat/1", 0) == 2


def test_remaining_launchers_are_those_that_have_not_left() -> None:
    store = Store()
    one, two, three = (Heartbeats(store, host, now=0) for host in "abc")
    for launcher in (three, two, one):
        launcher.beat(0)
    assert one.remaining(0) == {1, 2, 3}
    two.leave()
    assert one.remaining(0) == {1, 3}
    one.beat(2 * SILENT_S)
    assert one.remaining(2 * SILENT_S) == {1}


def test_launcher_that_has_a_number_but_no_name_yet() -> None:
    store = Store()
    one = Heartbeats(store, "a", now=0)
    store.add("launchers", 1)
    one.beat(0)
    assert one.reachable_hosts(0) == ["a"]
    assert not one.is_lost(2, 100)
