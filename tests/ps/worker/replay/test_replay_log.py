# SPDX-License-Identifier: Apache-2.0
"""Answers: a later life is answered what the one before it was answered."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from fleetlight.errors import ConfigError
from fleetlight.ps.worker.replay.replay_log import LoggedReply, ReplayLog, may_be_made_again


class Told:
    """What calls are written down as, and a later life that knows it."""

    def __init__(self) -> None:
        self.written: list[tuple[LoggedReply, Sequence[bytes]]] = []

    def life(self) -> ReplayLog:
        answers = ReplayLog(lambda one, answer: self.written.append((one, answer)))
        for one, answer in list(self.written):
            answers.remember(one, answer)
        return answers


def meet(answers: ReplayLog, name: str, answer: bytes) -> Sequence[bytes]:
    def act() -> list[bytes]:
        answers.meetings += 1
        return [answer]

    return answers.once(name, act)


def test_answers_come_again_until_new_calls_are_made() -> None:
    told = Told()
    first = told.life()
    assert [meet(first, "a", b"1"), meet(first, "b", b"2")] == [[b"1"], [b"2"]]
    second = told.life()
    assert second.is_known
    assert [meet(second, "a", b"x"), meet(second, "b", b"x")] == [[b"1"], [b"2"]]
    assert second.meetings == 2
    assert not second.is_known
    assert meet(second, "c", b"3") == [b"3"]
    third = told.life()
    assert [meet(third, name, b"x") for name in "abc"] == [[b"1"], [b"2"], [b"3"]]


def test_calls_within_a_call_are_a_part_of_it() -> None:
    told = Told()
    first = told.life()

    def load() -> list[bytes]:
        meet(first, "look", b"1")
        meet(first, "load", b"2")
        return [b"all"]

    first.once("load_persistables", load)
    meet(first, "b", b"3")
    second = told.life()
    assert second.once("load_persistables", lambda: pytest.fail("again")) == [b"all"]
    assert second.meetings == 2
    assert meet(second, "b", b"x") == [b"3"]


def test_where_the_script_is_further_its_calls_begin_there() -> None:
    told = Told()
    first = told.life()
    for name in "abcde":
        meet(first, name, name.encode())
    second = told.life()
    meet(second, "a", b"x")
    second.go_on(3, 3)
    assert [meet(second, "d", b"x"), meet(second, "e", b"x")] == [[b"d"], [b"e"]]
    assert [n for n in range(6) if may_be_made_again(n, prelude=1, since=3)] == [0, 3, 4, 5]


def test_another_script_is_told() -> None:
    told = Told()
    meet(told.life(), "barrier_worker", b"")
    with pytest.raises(ConfigError, match="called 'all_gather' where it called 'barrier_w"):
        meet(told.life(), "all_gather", b"")
