# SPDX-License-Identifier: Apache-2.0
"""`Lease`: one publisher at a target; no clock is compared."""

from __future__ import annotations

from pathlib import Path

import pytest

from fleetlight.errors import PublicationError, StoreError
from fleetlight.publication.lease import LEASE, Lease
from fleetlight.store.local import LocalStore
from fleetlight.store.protocol import Data


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path)


class Clock:
    """Pauses take no time; `then` runs in the first."""

    def __init__(self, then: object = None) -> None:
        self.passed, self._then = 0.0, then

    def __call__(self, seconds: float) -> None:
        self.passed += seconds
        then, self._then = self._then, None
        if callable(then):
            then()


def test_a_second_publisher_is_refused_once_the_first_renews(store: LocalStore) -> None:
    first = Lease.acquire(store, "")
    clock = Clock(first.renew)
    with pytest.raises(PublicationError, match=r"process \d+ on .* publishes here already"):
        Lease.acquire(store, "", pause=clock)
    assert clock.passed == 1.0
    first.renew()


def test_a_silent_publisher_is_replaced_and_learns_it(store: LocalStore) -> None:
    first = Lease.acquire(store, "")
    clock = Clock()
    second = Lease.acquire(store, "", pause=clock)
    assert clock.passed == pytest.approx(20.0)
    with pytest.raises(PublicationError, match="publishes here now, in place of this job"):
        first.renew()
    second.renew()


def test_two_that_wait_for_a_silent_one(store: LocalStore) -> None:
    Lease.acquire(store, "")
    winner: list[Lease] = []

    def other() -> None:
        winner.append(Lease.acquire(store, "", pause=Clock()))

    # the other takes over first, and renews while this one looks again
    class Two(Clock):
        def __call__(self, seconds: float) -> None:
            super().__call__(seconds)
            if winner:
                winner[0].renew()

    with pytest.raises(PublicationError, match="publishes here already"):
        Lease.acquire(store, "", pause=Two(other))


def test_after_a_release_the_next_begins_at_once(store: LocalStore) -> None:
    Lease.acquire(store, "").release()
    clock = Clock()
    Lease.acquire(store, "", pause=clock)
    assert not clock.passed


def test_a_restarted_worker_takes_over_the_lease_of_its_job(store: LocalStore) -> None:
    first = Lease.acquire(store, "job")
    clock = Clock()
    Lease.acquire(store, "job", pause=clock)
    assert not clock.passed
    with pytest.raises(PublicationError, match="publishes here now"):
        first.release()


class LosesReplies(LocalStore):
    """A store whose next write arrives, and then fails."""

    loses = False

    def swap(self, name: str, data: Data, version: str) -> str | None:
        made = super().swap(name, data, version)
        if self.loses:
            self.loses = False
            raise StoreError("the reply was lost")
        return made


def test_a_renewal_whose_reply_was_lost_does_not_end_the_lease(tmp_path: Path) -> None:
    store = LosesReplies(tmp_path)
    lease = Lease.acquire(store, "")
    store.loses = True
    with pytest.raises(StoreError):
        lease.renew()
    lease.renew()
    Lease.acquire(store, "", pause=Clock())
    with pytest.raises(PublicationError, match="publishes here now"):
        lease.renew()


def test_another_file_of_this_name_is_refused(store: LocalStore) -> None:
    store.put(LEASE, b"hello")
    with pytest.raises(PublicationError, match="is not the lease of a publisher"):
        Lease.acquire(store, "")
