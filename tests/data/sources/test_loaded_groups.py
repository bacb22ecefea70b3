# SPDX-License-Identifier: Apache-2.0
"""Groups in memory: each is loaded once, and few stay."""

import weakref
from collections.abc import Iterator

import pytest
from tests.launch.workplace import wait_until

from fleetlight.data.sources.loaded_groups import _MAX_UNREAD, _PATIENCE, LoadedGroups


class Decoded:
    """What a group becomes."""

    def __init__(self, number: int) -> None:
        self.number = number


class Counted:
    """Loaded groups, and which loads were made."""

    def __init__(self) -> None:
        self.loads: list[int] = []
        self._made: list[weakref.ref[Decoded]] = []
        self.groups = LoadedGroups(self._load)

    def _load(self, number: int) -> Decoded:
        made = Decoded(number)
        self.loads.append(number)
        self._made.append(weakref.ref(made))
        return made

    def in_memory(self) -> list[int]:
        return sorted(one.number for made in self._made if (one := made()) is not None)

    def wait_for(self, groups: list[int]) -> None:
        wait_until(lambda: self.in_memory() == groups, f"only {groups} to stay")

    def announce(self, *groups: int) -> None:
        """Windows of one group."""
        for group in groups:
            self.groups.will_read([group])

    def take(self, *batch: int) -> list[int]:
        """A batch of these groups."""
        self.groups.start_batch(batch)
        return [self.groups.get(group).number for group in batch]

    def epoch(self, first: int, windows: int) -> Iterator[list[int]]:
        """Batches of windows of one group, also one with records of two."""
        for window in range(first, first + windows):
            self.announce(*range(window, min(window + 2, first + windows)))
            yield self.take(*range(max(first, window - 1), window + 1))
            for _ in range(_PATIENCE + 1):
                yield self.take(window)


@pytest.fixture
def counted() -> Counted:
    return Counted()


def test_a_group_is_loaded_once_and_released_after_its_window(counted: Counted) -> None:
    for number, batch in enumerate(counted.epoch(0, windows=8), 1):
        newest = max(batch)
        if number % (_PATIENCE + 2) == 0 and newest < 7:
            counted.wait_for([newest, newest + 1])
    assert counted.loads == list(range(8))


def test_loops_that_take_turns_load_each_group_once(counted: Counted) -> None:
    for _ in zip(counted.epoch(0, windows=6), counted.epoch(10, windows=6), strict=True):
        pass
    assert sorted(counted.loads) == [*range(6), *range(10, 16)]


def test_a_loop_continues_after_another_one(counted: Counted) -> None:
    counted.groups.will_read(range(5))
    counted.take(0, 1, 2, 3, 4)
    for _ in counted.epoch(10, windows=5):
        pass
    for _ in range(5):
        counted.take(4, 0, 2, 1, 3)
    assert sorted(counted.loads) == sorted([*range(5), *range(10, 15), *range(5)])


def test_single_records_of_a_few_groups_load_few_groups_again(counted: Counted) -> None:
    for number in [0, 1, 2] * 20:
        counted.take(number)
    assert len(counted.loads) <= 6
    for number in range(3, 30):
        counted.take(number)
    wait_until(lambda: len(counted.in_memory()) <= 4, "older ones to leave")


def test_a_batch_of_many_groups_has_few_in_memory(counted: Counted) -> None:
    counted.groups.start_batch(range(30))
    for number in range(30):
        counted.groups.get(number)
        wait_until(lambda: len(counted.in_memory()) <= 4, "groups to leave")


def test_announcements_without_batches_keep_few_in_memory(counted: Counted) -> None:
    counted.announce(*range(100))
    wait_until(lambda: 99 in counted.loads, "the last one")
    wait_until(lambda: len(counted.in_memory()) <= _MAX_UNREAD, "older ones to leave")


def test_windows_that_come_again_are_loaded_once_more_at_most(counted: Counted) -> None:
    for _ in range(4):
        for _ in counted.epoch(0, windows=2):
            pass
    # the first one had left when the second epoch began
    assert counted.loads == [0, 1, 0]


def test_windows_of_a_batch_stay_whatever_is_announced_between_them(counted: Counted) -> None:
    counted.announce(5, 0)
    counted.take(5)
    counted.announce(4, 1, 5, 2)
    counted.take(4, 5)
    counted.take(5)
    counted.take(1)
    counted.take(0, 2)
    assert counted.loads == [5, 0, 4, 1, 2]


def test_a_window_after_a_batch_of_many_stays(counted: Counted) -> None:
    for first in range(0, 30, 5):
        counted.announce(*range(first, first + 6))
        for _ in range(_PATIENCE + 2):
            counted.take(*range(first, first + 5))
    # the last one is only announced
    wait_until(lambda: 30 in counted.loads, "the last one")
    assert counted.loads == list(range(31))


def test_windows_of_an_abandoned_epoch_leave(counted: Counted) -> None:
    counted.announce(0, 1)
    counted.take(0)
    for _ in counted.epoch(10, windows=7):
        pass
    counted.wait_for([16])


def test_a_window_of_several_groups_stays_while_batches_take_some(counted: Counted) -> None:
    counted.groups.will_read([0, 1, 2])
    counted.groups.will_read([3, 4])
    for batch in ((0,), *[(2, 1)] * 20, (0,), (2, 4), *[(3,)] * 20, (4,)):
        counted.take(*batch)
    assert counted.loads == [0, 1, 2, 3, 4]
    counted.wait_for([3, 4])


def test_what_fails_is_loaded_again(counted: Counted) -> None:
    def fail_once(number: int) -> int:
        fails.append(number)
        if len(fails) == 1:
            raise OSError(5, "Input/output error")
        return number

    fails: list[int] = []
    groups = LoadedGroups(fail_once)
    with pytest.raises(OSError, match="Input/output error"):
        groups.get(4)
    assert groups.get(4) == 4
