# SPDX-License-Identifier: Apache-2.0
"""Members get their indices when the last one has arrived; a later process replaces one."""

from __future__ import annotations

import pytest
from tests.ps.rendezvous.members import hello

from fleetlight.errors import MembershipError
from fleetlight.ps.rendezvous.enrolment import Enrolment, SurplusError


def complete(*addresses: str) -> Enrolment:
    enrolment = Enrolment("worker", len(addresses))
    for number, address in enumerate(addresses):
        enrolment.arrive(f"process {number}", hello(address=address))
    return enrolment


def test_indices_and_places_follow_the_hosts() -> None:
    enrolment = complete("10.0.0.1", "10.0.0.2", "10.0.0.1")
    assert enrolment.is_complete
    # members of one host get consecutive indices
    answers = [enrolment.answer(f"process {number}") for number in range(3)]
    assert [answer.index for answer in answers] == [0, 2, 1]
    places = [
        (a.place.local_rank, a.place.local_size, a.place.node_rank, a.place.node_num)
        for a in answers
    ]
    assert places == [(0, 2, 0, 2), (0, 1, 1, 2), (1, 2, 0, 2)]


def test_members_keep_the_indices_that_they_bring() -> None:
    enrolment = Enrolment("server", 2)
    enrolment.arrive("a", hello("server", index=1))
    assert not enrolment.is_complete
    enrolment.arrive("a", hello("server", index=1))
    enrolment.arrive("b", hello("server", node_id="0"))
    assert (enrolment.answer("a").index, enrolment.answer("b").index) == (1, 0)


def test_two_processes_with_one_index_are_refused() -> None:
    enrolment = Enrolment("worker", 2)
    enrolment.arrive("a", hello(index=0))
    with pytest.raises(MembershipError, match="two workers say they are worker 0"):
        enrolment.arrive("b", hello(index=0))
    enrolment.arrive("c", hello(index=1))
    assert enrolment.is_complete


def test_a_process_that_ends_early_makes_room() -> None:
    enrolment = Enrolment("worker", 2)
    enrolment.arrive("a", hello(index=0))
    enrolment.arrive("b", hello())
    assert enrolment.is_complete
    other = Enrolment("worker", 2)
    for process, who in (("a", hello(index=0)), ("b", hello())):
        other.arrive(process, who)
        other.lose(process)
        if process == "a":
            # its successor brings the same index
            other.arrive("a2", hello(index=0))
            other.lose("a2")
    assert other.answer("a2").index == 0


def test_a_process_without_an_index_is_forgotten_when_it_ends() -> None:
    enrolment = Enrolment("worker", 2)
    enrolment.arrive("a", hello())
    enrolment.lose("a")
    enrolment.arrive("b", hello())
    assert enrolment.progress() == "1 of 2 workers joined"


def test_a_restarted_process_takes_the_index_of_its_predecessor() -> None:
    enrolment = complete("10.0.0.1", "10.0.0.2")
    enrolment.arrive("new", hello(index=1, address="10.0.0.1"))
    assert enrolment.answer("new").index == 1
    assert enrolment.answer("new").place.local_rank == 1
    with pytest.raises(MembershipError, match="another process has replaced this worker"):
        enrolment.answer("process 1")


def test_a_process_without_an_index_takes_a_vacant_one() -> None:
    enrolment = complete("10.0.0.1", "10.0.0.2")
    with pytest.raises(SurplusError):
        enrolment.arrive("new", hello())
    enrolment.arrive("new", hello(), vacant=[1])
    assert enrolment.answer("new").index == 1
    with pytest.raises(SurplusError):
        enrolment.arrive("other", hello(index=2))
    assert enrolment.surplus_text().startswith("the job already has its 2 workers; end this")


def test_missing_members_are_named() -> None:
    enrolment = Enrolment("server", 2)
    enrolment.arrive("a", hello("server"))
    text = enrolment.missing_text(3.0)
    assert text.startswith(
        "1 of 2 servers joined within 3 s, 1 missing. Here: pid 7 on h (10.0.0.1)"
    )
