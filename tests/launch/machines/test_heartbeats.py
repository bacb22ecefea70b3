# SPDX-License-Identifier: Apache-2.0
"""Signs of life."""

from __future__ import annotations

from tests.launch.machines.doubles import Store

from fleetlight.launch.machines.heartbeats import BEAT_S, LOST_S, Heartbeats


def test_everybody_who_beats_is_here() -> None:
    store = Store()
    one, two = Heartbeats(store, "a", now=0), Heartbeats(store, "b", now=0)
    assert (one.number, two.number) == (1, 2)
    two.beat(0)
    one.beat(0)
    assert one.here(0) == ["a", "b"]


def test_silence_is_noticed_in_time_and_an_own_clock_is_enough() -> None:
    store = Store()
    one, two = Heartbeats(store, "a", now=0), Heartbeats(store, "b", now=1e6)
    two.beat(1e6)
    for second in range(20):
        one.beat(float(second))
        assert one.is_lost(two.number, float(second)) == (second > LOST_S)
        assert not one.is_lost(one.number, float(second))
    assert one.here(19) == ["a"]
    two.beat(1e6 + 1)
    one.beat(20)
    assert not one.is_lost(two.number, 20)
    assert LOST_S + BEAT_S < 10


def test_beats_are_not_more_frequent_than_needed() -> None:
    store = Store()
    one = Heartbeats(store, "a", now=0)
    for tenth in range(11):
        one.beat(tenth / 10)
    assert store.add("beat/1", 0) == 2


def test_who_has_not_said_goodbye_stays() -> None:
    store = Store()
    one, two, three = (Heartbeats(store, host, now=0) for host in "abc")
    for launcher in (three, two, one):
        launcher.beat(0)
    assert one.staying(0) == {1, 2, 3}
    two.say_goodbye()
    assert one.staying(0) == {1, 3}
    one.beat(2 * LOST_S)
    assert one.staying(2 * LOST_S) == {1}


def test_a_launcher_that_counted_itself_but_has_no_name_yet() -> None:
    store = Store()
    one = Heartbeats(store, "a", now=0)
    store.add("launchers", 1)
    one.beat(0)
    assert one.here(0) == ["a"]
    assert not one.is_lost(2, 100)
