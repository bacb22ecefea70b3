# SPDX-License-Identifier: Apache-2.0
"""Which tasks of an engine are servers, and which are workers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetlight.roles.placement import Distribution, ServerRule, TaskPlace, places_of
from fleetlight.roles.role import Kind


def short(place: TaskPlace) -> str:
    return f"{place.kind.value[0]}{place.index}@{place.node_rank}"


@pytest.mark.parametrize(
    ("tasks", "distribution", "servers", "rule", "expected"),
    [
        ([2, 2], "block", 2, "spread", "s0@0 w0@0 s1@1 w1@1"),
        ([2, 2], "cyclic", 2, "spread", "s0@0 s1@1 w0@0 w1@1"),
        ([2, 2], "block", 2, "pack", "s0@0 s1@0 w0@1 w1@1"),
        ([2, 2], "cyclic", 2, "pack", "s0@0 s1@1 w0@0 w1@1"),
        ([3, 1, 1, 1], "block", 2, "spread", "s0@0 w0@0 w1@0 s1@1 w2@2 w3@3"),
        # a node with more tasks gets what the others have no tasks for
        ([4, 1], "block", 3, "spread", "s0@0 s1@0 w0@0 w1@0 s2@1"),
        ([2, 2], "block", 0, "spread", "w0@0 w1@0 w2@1 w3@1"),
    ],
)
def test_examples(
    tasks: list[int], distribution: Distribution, servers: int, rule: ServerRule, expected: str
) -> None:
    assert " ".join(map(short, places_of(tasks, distribution, servers, rule))) == expected


@given(
    tasks=st.lists(st.integers(1, 6), min_size=1, max_size=8),
    distribution=st.sampled_from(["block", "cyclic"]),
    rule=st.sampled_from(["spread", "pack"]),
    data=st.data(),
)
def test_properties(
    tasks: list[int], distribution: Distribution, rule: ServerRule, data: st.DataObject
) -> None:
    servers = data.draw(st.integers(0, sum(tasks) - 1))
    places = places_of(tasks, distribution, servers, rule)
    for kind, count in ((Kind.SERVER, servers), (Kind.WORKER, sum(tasks) - servers)):
        assert [place.index for place in places if place.kind is kind] == list(range(count))
    if servers:
        assert places[0].kind is Kind.SERVER
        assert (places[0].index, places[0].node_rank) == (0, 0)
    for node, count in enumerate(tasks):
        here = [place for place in places if place.node_rank == node]
        assert [place.local_task for place in here] == list(range(count))
        for kind in Kind:
            ranks = [(one.local_rank, one.local_size) for one in here if one.kind is kind]
            assert ranks == [(n, len(ranks)) for n in range(len(ranks))]
        # servers are the first tasks of a node
        kinds = [place.kind is Kind.WORKER for place in here]
        assert kinds == sorted(kinds) or rule == "pack"
    assert {place.node_num for place in places} == {len(tasks)}


@given(st.lists(st.integers(1, 6), min_size=1, max_size=8), st.data())
def test_spread_servers_are_even(tasks: list[int], data: st.DataObject) -> None:
    places = places_of(tasks, "block", data.draw(st.integers(1, sum(tasks))), "spread")
    here = [
        sum(place.kind is Kind.SERVER and place.node_rank == node for place in places)
        for node in range(len(tasks))
    ]
    for node, count in enumerate(here):
        # no node has two more than another that has a task left
        assert all(count <= other + 1 or other == tasks[n] for n, other in enumerate(here)), node


def test_many_tasks_take_no_time() -> None:
    assert len(places_of([100] * 500, "cyclic", 5000, "spread")) == 50_000
