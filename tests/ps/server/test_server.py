# SPDX-License-Identifier: Apache-2.0
"""Server: who is served, what all modes have in common, what is said of who is missing."""

from __future__ import annotations

from functools import partial
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from tests.ps.serving import (
    OPTIONS,
    Worker,
    closed_server,
    hello,
    ids_of,
    open_up,
    opened,
    plan,
    rows_of,
    team,
    together,
)

from fleetlight.errors import (
    DeadlineError,
    MembershipError,
    PeerLostError,
    PlanError,
    ProtocolError,
)
from fleetlight.ps import messages as m
from fleetlight.ps.dtypes import as_tensor, flat_array
from fleetlight.ps.plan import DensePlan
from fleetlight.ps.server import server as server_module
from fleetlight.ps.server.server import Server
from fleetlight.ps.transport import Connection, Listener, SocketChannel


def test_workers_meet_before_the_plan_is_known() -> None:
    first, second = team(closed_server())
    answers = together(lambda: first.meet(0, "init", 3), lambda: second.meet(0, "init", 4))
    assert [[list(array) for array in answer] for answer in answers] == [[[3], [4]]] * 2


def test_join_waits_for_the_plan_and_compares_it() -> None:
    server = closed_server(1)
    worker = Worker(server, 0, 1)
    the_plan = plan(workers=1)
    joined, _ = together(lambda: worker.say(m.Join(the_plan)), lambda: open_up(server, the_plan))
    assert joined == (m.Welcome(0, 0), [])


def test_another_plan_is_refused_with_the_first_difference() -> None:
    server = opened(plan(workers=1))
    wider = msgspec.structs.replace(plan(workers=1).tables[1], dim=16)
    other = msgspec.structs.replace(plan(workers=1), tables=[plan().tables[0], wider])
    with pytest.raises(PlanError, match=r"server 0 .*worker 0 .*items\]\.dim: 2 here, 16 there"):
        Worker(server, 0, 1).say(m.Join(other))


def test_join_does_not_wait_for_ever() -> None:
    worker = Worker(closed_server(1, deadline_s=0.05), 0, 1)
    with pytest.raises(DeadlineError, match=r"joining waited 0\.05 s for server 0, .*init_server"):
        worker.say(m.Join(plan(workers=1)))


def test_strangers_and_the_hasty_are_refused() -> None:
    server = closed_server(1)
    with pytest.raises(ProtocolError, match="a stranger began with Beat, expected Hello"):
        server(Connection("a stranger"), m.Beat(0), [])
    server.gone(Connection("a stranger"), None)
    worker = Worker(server, 0, 1)
    with pytest.raises(PlanError, match="Join comes before"):
        worker.pull(0, [1])
    with pytest.raises(ProtocolError, match="sent Done, which servers only answer"):
        worker.say(m.Done())


def test_rows_and_dense_values_come_together() -> None:
    worker = Worker(opened(plan(workers=1)), 0, 1)
    message = m.Pull([m.TablePull(1, True), m.TablePull(0, True)], dense=True)
    answer, (items, users, bias) = worker.say(message, ids_of([-5, 7]), ids_of([]), lane="pull")
    assert isinstance(answer, m.Pulled)
    assert (items.shape, users.shape, list(bias)) == ((2, 2), (0, 2), [1, 1, 1])


def test_a_pull_without_insert_leaves_no_row() -> None:
    server = opened(plan(workers=1))
    worker = Worker(server, 0, 1)
    assert worker.pull(0, [1, 2, 3], insert=False) == [0, 0, 0]
    assert server.counted().rows == {"users": 0, "items": 0}
    worker.pull(0, [1, 2, 1])
    assert server.counted().rows == {"users": 2, "items": 0}


@pytest.mark.parametrize(
    ("message", "arrays", "text"),
    [
        (m.Pull([m.TablePull(2, True)], False), [ids_of([1])], r"table 2.*'users', 'items'"),
        (m.Pull([m.TablePull(-1, True)], False), [ids_of([1])], "table -1"),
        (m.Pull([m.TablePull(0, True)], False), [], "came with 0 arrays, the ids of table 'users'"),
        (m.Pull([], False), [ids_of([1])], "came with 1 arrays, expected 0"),
        (
            m.Pull([m.TablePull(0, True)], False),
            [np.zeros(3, np.int32)],
            r"ids of table 'users' are int32\[3\], expected int64\[n\]",
        ),
        (
            m.Fill([0], False),
            [ids_of([1, 2]), np.zeros((2, 5), np.float32)],
            r"rows of table 'users' are float32\[2, 5\], expected float32\[2, 2\]",
        ),
    ],
)
def test_what_does_not_fit_the_plan_is_refused(
    message: m.Message, arrays: list[np.ndarray], text: str
) -> None:
    worker = Worker(opened(plan(workers=1)), 0, 1)
    with pytest.raises((PlanError, ProtocolError), match=text):
        worker.say(message, *arrays)


def test_first_values_are_those_of_worker_0() -> None:
    server = opened(plan())
    first, second = team(server)
    arrays = [ids_of([1, 9]), rows_of([5, 6]), np.array([7, 8, 9], np.float32)]
    first.say(m.Fill([0], True), *arrays)
    assert second.pull(0, [9, 1, 2]) == [6, 5, 0]
    assert second.dense() == [7, 8, 9]
    with pytest.raises(ProtocolError, match="worker 1 brought first values"):
        second.say(m.Fill([0], True), *arrays)


# -- waiting for others ----------------------------------------------------------------------


def test_a_worker_that_does_not_come_is_named() -> None:
    first = Worker(opened(plan(), deadline_s=0.05), 0)
    with pytest.raises(DeadlineError, match=r"barrier waited 0\.03 s for worker 1 \(it never came"):
        first.meet(0, "barrier", deadline_s=0.03)


def test_a_worker_that_is_elsewhere_is_named_with_its_place() -> None:
    server = opened(plan("async"), deadline_s=0.3)
    first, second = team(server)
    second.say(m.Beat(41))
    first.push(0)
    answers = together(
        lambda: first.pull(0, [1], at_least=1), lambda: second.meet(0, "auc", deadline_s=0.5)
    )
    assert isinstance(answers[0], DeadlineError)
    assert "every worker waited 0.3 s for worker 1 (it is in auc)" in str(answers[0])
    with pytest.raises(DeadlineError, match=r"worker 1 \(silent for 0 s, last at step 41\)"):
        first.pull(0, [1], at_least=1)


@pytest.mark.parametrize("held", [False, True])
def test_a_meeting_that_waits_for_a_step_that_waits_for_the_meeting(held: bool) -> None:
    server = opened(plan(workers=3))
    workers = team(server, 3)
    begin, *_ = together(*[lambda w=w: w.push(0, hold=held) for w in workers])
    assert isinstance(begin, tuple)
    met, stepped, left = together(
        lambda: workers[0].meet(0, "metrics.sum"),
        lambda: workers[1].apply(0, 1.0) if held else workers[1].push(1),
        lambda: left_with_error(server, workers[0]),
    )
    assert isinstance(met, MembershipError)
    assert "metrics.sum of worker 0 would wait for worker 1" in str(met)
    assert "fleet.barrier_worker() first" in str(met)
    assert "worker 0 failed: uneven" in str(stepped)
    # who comes to the meeting later is told, too
    with pytest.raises(PeerLostError):
        workers[2].meet(0, "metrics.sum")
    assert left is None


def left_with_error(server: Server, worker: Worker) -> None:
    """What a worker does when a meeting of its has failed."""
    with server._news:
        assert server._news.wait_for(lambda: server._meetings._broken is not None, 20)
    worker.say(m.Leave("uneven"), lane="pull")


def test_a_meeting_may_wait_for_a_step_of_those_that_go_on() -> None:
    workers = team(opened(plan(workers=3)), 3)
    workers[0].say(m.EndPhase(0))

    def last(worker: Worker) -> Any:
        worker.push(0)
        worker.say(m.EndPhase(0))
        return worker.meet(0, "barrier", worker.index)

    met = together(
        lambda: workers[0].meet(0, "barrier"), lambda: last(workers[1]), lambda: last(workers[2])
    )
    assert [[int(array[0]) for array in each] for each in met] == [[0, 1, 2]] * 3


@pytest.mark.parametrize("operation", ["push", "meet", "pull"])
def test_a_lost_worker_is_told_to_whoever_waits(operation: str) -> None:
    server = opened(plan("sync" if operation == "push" else "async"))
    first, second = team(server)
    waits = {
        "push": lambda: first.push(0),
        "meet": lambda: first.meet(0, "barrier"),
        "pull": lambda: first.pull(0, [1], at_least=1),
    }
    lost, _ = together(waits[operation], second.hang_up)
    assert isinstance(lost, PeerLostError)
    assert "worker 1 went away without goodbye" in str(lost)
    # and to whoever calls later
    for call in (*waits.values(), lambda: first.say(m.Beat(0))):
        with pytest.raises(PeerLostError, match="worker 1 went away"):
            call()
    first.say(m.Leave())


def test_a_worker_that_failed_is_told_with_its_error() -> None:
    server = opened(plan())
    first, second = team(server)
    lost, _ = together(lambda: first.push(0), lambda: second.say(m.Leave("ValueError: boom")))
    assert isinstance(lost, PeerLostError)
    assert "worker 1 failed: ValueError: boom" in str(lost)
    second.hang_up()
    first.say(m.Leave())
    with pytest.raises(PeerLostError, match="worker 1 failed: ValueError: boom"):
        server.wait()


def test_who_comes_after_a_failure_is_told_by_the_first_answer() -> None:
    server = opened(plan())
    Worker(server, 1).hang_up()
    late = Worker(server, 0)
    with pytest.raises(PeerLostError, match="worker 1 went away"):
        late.say(m.Join(plan()))


def test_over_sockets_a_worker_that_hangs_up_is_lost() -> None:
    server = opened(plan())
    listener = Listener(("127.0.0.1", 0), server)
    try:
        first, second = (
            SocketChannel.connect(
                listener.address, "server 0", deadline_s=20, greeting=partial(hello, n, "control")
            )
            for n in range(2)
        )
        first.send(m.Meet(0, "barrier", 20.0))
        second.close()
        with pytest.raises(PeerLostError, match=r"server 0 .*worker 1 went away without goodbye"):
            first.receive()
        first.call(m.Leave())
        with pytest.raises(PeerLostError, match="worker 1 went away"):
            server.wait()
        first.close()
    finally:
        listener.stop()


def test_bfloat16_travels_over_sockets() -> None:
    the_plan = plan("async", 1, dense=[DensePlan("bias", (3,), "bfloat16", 0, 0)])
    server = closed_server(1)
    weight = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    server.open(the_plan, [torch.optim.SGD([weight], lr=1.0)], [weight])
    listener = Listener(("127.0.0.1", 0), server)
    greeting = partial(hello, 0, "control", 1)
    channel = SocketChannel.connect(listener.address, "server 0", deadline_s=20, greeting=greeting)
    try:
        push = m.Push(0, 0, 0, 0, 0, OPTIONS, [], dense=True)
        gradient = flat_array(torch.tensor([1.0, 0.5, -2.0], dtype=torch.bfloat16))
        [array] = channel.call(push, [gradient]).arrays
        assert as_tensor(array, torch.bfloat16).tolist() == [0.0, 0.5, 3.0]
        fetched = channel.call(m.Fetch())
        assert isinstance(fetched.message, m.Fetched)
        restore = m.Restore(fetched.message.state, fetched.message.scalars)
        assert channel.call(restore, fetched.arrays).message == m.Done()
    finally:
        channel.close()
        listener.stop()


def test_only_the_control_connection_is_the_worker() -> None:
    server = opened(plan("async"))
    first, second = team(server)
    second.hang_up("push")
    second.hang_up("pull")
    assert first.pull(0, [1]) == [0]
    # the worker calls again before the server has noticed the end of the old connection
    old, new = second.lanes["control"], Connection("again")
    second.lanes["control"] = new
    second.greet("control")
    server.gone(old, None)
    assert first.pull(0, [1]) == [0]


def test_a_meeting_that_nobody_can_complete_ends_at_once() -> None:
    first, second = team(opened(plan()))
    second.say(m.Leave())
    with pytest.raises(MembershipError, match="barrier would wait for worker 1, which has left"):
        first.meet(0, "barrier")


def test_who_comes_late_to_a_meeting_is_told() -> None:
    first, second = team(opened(plan()))
    with pytest.raises(DeadlineError):
        first.meet(0, "save", deadline_s=0.02)
    with pytest.raises(DeadlineError, match=r"save waited 0\.02 s for worker 1"):
        second.meet(0, "save")


def test_the_server_ends_when_all_have_left() -> None:
    server = opened(plan())
    first, second = team(server)
    ended, *_ = together(server.wait, lambda: first.say(m.Leave()), lambda: second.say(m.Leave()))
    assert ended is None
    with pytest.raises(MembershipError, match="came back after it had left"):
        Worker(server, 0)


def test_the_server_names_who_never_came() -> None:
    server = closed_server(deadline_s=0.05)
    Worker(server, 0)
    with pytest.raises(DeadlineError, match=r"the server waited 0\.05 s for worker 1 \(it never"):
        server.wait()


def test_the_server_notices_silence() -> None:
    server = closed_server(1, deadline_s=0.05)
    Worker(server, 0, 1)
    with pytest.raises(PeerLostError, match="worker 0 went away without goodbye: it has been sil"):
        server.wait()


def test_a_server_that_closes_tells_whoever_waits() -> None:
    server = opened(plan())
    first, _ = team(server)
    closed, _ = together(lambda: first.push(0), lambda: server.close("out of memory"))
    assert isinstance(closed, PeerLostError)
    assert "server 0 has closed: out of memory" in str(closed)
    assert server.closed
    server.wait()


def test_tables_shrink() -> None:
    worker = Worker(opened(plan(workers=1)), 0, 1)
    with pytest.raises(PlanError, match="users"):
        worker.say(m.Shrink(0, 3, 0.0, 1.0))


def test_whoever_joins_while_a_checkpoint_is_read_is_told_to_ask_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Reading may take longer than any deadline, so no answer may wait for its end."""
    monkeypatch.setattr(server_module, "_LOADING_S", 0.01)
    server, the_plan = closed_server(1), plan(workers=1)
    worker = Worker(server, 0, 1)
    answers = []

    def values() -> Any:
        answers.append(worker.say(m.Join(the_plan))[0])
        yield m.Fill([0], False, loaded=True), [ids_of([1]), rows_of([5])]

    weight = torch.nn.Parameter(torch.ones(3))
    server.open(the_plan, [torch.optim.SGD([weight], lr=1.0)], [weight], values())
    answers.append(worker.say(m.Join(the_plan))[0])
    assert answers == [m.Done(), m.Welcome(0, 0)]
    assert worker.pull(0, [1]) == [5]
