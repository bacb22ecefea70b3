# SPDX-License-Identifier: Apache-2.0
"""Two threads share what is much."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from fleetlight.kernels.halves import WORTH_SHARING, in_halves


@pytest.fixture
def helper() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as pool:
        yield pool


@pytest.mark.parametrize("count", [WORTH_SHARING, WORTH_SHARING + 1])
def test_each_thread_does_its_half_at_the_same_time(helper: ThreadPoolExecutor, count: int) -> None:
    both = threading.Barrier(2)

    def act(some: slice) -> tuple[list[int], str]:
        both.wait(30)
        return list(range(count))[some], threading.current_thread().name

    (first, here), (second, there) = in_halves(helper, count, act)
    assert first + second == list(range(count))
    assert len(second) - len(first) == count % 2
    assert here == threading.current_thread().name != there


def test_little_is_done_here(helper: ThreadPoolExecutor) -> None:
    def act(some: slice) -> tuple[int, threading.Thread]:
        return len(range(WORTH_SHARING)[some]), threading.current_thread()

    here = threading.current_thread()
    assert in_halves(helper, WORTH_SHARING - 1, act) == [(WORTH_SHARING - 1, here)]
    assert in_halves(None, WORTH_SHARING, act) == [(WORTH_SHARING, here)]


def test_nobody_is_at_work_any_more_when_a_half_has_failed(helper: ThreadPoolExecutor) -> None:
    done, fail = threading.Event(), threading.Event()

    def act(some: slice) -> None:
        if some.start is None:
            fail.set()
            raise ValueError("the first half")
        assert fail.wait(30)
        done.set()

    with pytest.raises(ValueError, match="the first half"):
        in_halves(helper, WORTH_SHARING, act)
    assert done.is_set()
