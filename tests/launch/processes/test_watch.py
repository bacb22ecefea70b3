# SPDX-License-Identifier: Apache-2.0
"""What is decided, step by step, without processes or clocks."""

from __future__ import annotations

import dataclasses
import signal
from typing import Any

from fleetlight.launch.job.layout import JobProcess
from fleetlight.launch.processes.failure import ProcessExit, continuing_without
from fleetlight.launch.processes.watch import (
    EXIT_S,
    FIRST_SIGTERM_S,
    GOODBYE_S,
    LEAVE_S,
    SETTLE_S,
    UNKILLABLE_S,
    Observation,
    Phase,
    RemoteState,
    Verdict,
    Watch,
)
from fleetlight.launch.status import ProcessStatus, Stop
from fleetlight.roles.role import Kind

W0, W1 = (JobProcess(kind=Kind.WORKER, index=n, of=2, local_rank=n, local_size=2) for n in (0, 1))
S0 = JobProcess(kind=Kind.SERVER, index=0, of=1, local_rank=0, local_size=1)
GRACE_S = 3.0


def ended(
    member: JobProcess, status: int = 0, at: float = 0.0, error: str | None = None
) -> ProcessExit:
    return ProcessExit(member=member, status=status, at=at, reported=ProcessStatus(error=error))


def watch(*members: JobProcess) -> Watch:
    return Watch(members, GRACE_S)


def test_all_workers_done_is_success() -> None:
    one = watch(W0, W1)
    assert one.step(Observation(now=0)) is None
    assert one.step(Observation(now=1, exits=[ended(W0)])) is None
    assert not one.is_over
    assert one.step(Observation(now=2, exits=[ended(W0), ended(W1)])) is None
    assert one.is_over
    assert one.verdict is Verdict.SUCCESS


def test_a_certain_failure_ends_the_others_at_once() -> None:
    one = watch(W0, W1)
    killed = ended(W1, -signal.SIGKILL)
    assert one.step(Observation(now=0, exits=[killed])) == signal.SIGTERM
    assert one.failure is killed
    late = ended(W0, -signal.SIGTERM)
    one.step(Observation(now=1, exits=[killed, late]))
    assert one.is_over
    assert (one.verdict, one.failure) == (Verdict.FAILED, killed)


def test_who_is_about_to_exit_may_be_the_culprit() -> None:
    one = watch(W0, W1)
    unclear, cause = ended(W0, 1, at=1.0), ended(W1, 3, at=0.5)
    assert one.step(Observation(now=1, exits=[unclear], leaving=True)) is None
    assert one.step(Observation(now=1 + EXIT_S - 0.1, exits=[unclear], leaving=True)) is None
    one.step(Observation(now=1 + EXIT_S - 0.05, exits=[unclear, cause]))
    assert one.is_over
    assert one.failure is cause


def test_nobody_is_about_to_exit_for_long() -> None:
    one = watch(W0, W1)
    unclear = ended(W0, 1)
    one.step(Observation(now=1, exits=[unclear], leaving=True))
    assert one.step(Observation(now=1 + EXIT_S, exits=[unclear], leaving=True)) == signal.SIGTERM
    assert one.failure is unclear


def test_an_unclear_failure_waits_for_a_better_culprit() -> None:
    one = watch(W0, W1)
    unclear, cause = ended(W0, 1, at=1.0), ended(W1, 1, at=0.5, error="ValueError")
    assert one.step(Observation(now=1, exits=[unclear])) is None
    assert one.phase is Phase.SETTLING
    one.step(Observation(now=1.1, exits=[unclear, cause]))
    assert one.failure is cause


def test_an_unclear_failure_is_taken_when_nobody_else_fails() -> None:
    one = watch(W0, W1)
    unclear = ended(W0, 1)
    one.step(Observation(now=0, exits=[unclear]))
    assert one.step(Observation(now=SETTLE_S, exits=[unclear])) == signal.SIGTERM
    assert one.failure is unclear


def test_sigkill_follows_after_the_grace_period_and_only_once() -> None:
    one = watch(W0, W1)
    exits = [ended(W0, -9)]
    assert one.step(Observation(now=0, exits=exits)) == signal.SIGTERM
    assert one.step(Observation(now=GRACE_S - 0.1, exits=exits)) is None
    assert one.step(Observation(now=GRACE_S, exits=exits)) == signal.SIGKILL
    assert one.step(Observation(now=GRACE_S + 1, exits=exits)) is None
    one.step(Observation(now=GRACE_S + UNKILLABLE_S, exits=exits))
    assert one.is_over


def test_a_failing_exit_is_answered_within_five_seconds() -> None:
    assert SETTLE_S + GRACE_S < 5


def test_an_interrupt_is_passed_on_and_a_second_one_kills() -> None:
    one = watch(W0)
    assert one.step(Observation(now=0, interrupts=[signal.SIGINT])) == signal.SIGINT
    assert one.step(Observation(now=0.1, interrupts=[signal.SIGINT])) is None
    two = [signal.SIGINT, signal.SIGINT]
    assert one.step(Observation(now=0.2, interrupts=two)) == signal.SIGKILL
    one.step(Observation(now=0.3, interrupts=two, exits=[ended(W0, -9)]))
    assert (one.verdict, one.signal) == (Verdict.INTERRUPTED, signal.SIGINT)
    assert one.failure is None


def test_servers_may_end_by_themselves() -> None:
    one = watch(S0, W0)
    assert one.step(Observation(now=0, exits=[ended(W0)])) is None
    assert one.phase is Phase.LEAVING
    one.step(Observation(now=1, exits=[ended(W0), ended(S0)]))
    assert one.is_over
    assert (one.verdict, one.ended_servers) == (Verdict.SUCCESS, False)


def test_servers_that_stay_are_ended_and_that_is_no_failure() -> None:
    one = watch(S0, W0)
    one.step(Observation(now=0, exits=[ended(W0)]))
    assert one.step(Observation(now=LEAVE_S, exits=[ended(W0)])) == signal.SIGTERM
    one.step(Observation(now=LEAVE_S + 1, exits=[ended(W0), ended(S0, -15)]))
    assert one.is_over
    assert (one.verdict, one.ended_servers) == (Verdict.SUCCESS, True)


def test_a_server_that_fails_fails_the_job() -> None:
    for exits in ([ended(S0, -9)], [ended(W0), ended(S0, -9)]):
        one = watch(S0, W0)
        one.step(Observation(now=0, exits=exits))
        assert one.verdict is Verdict.FAILED
        assert one.failure is not None
        assert one.failure.member is S0


def test_a_server_that_is_done_early_is_no_failure() -> None:
    one = watch(S0, W0)
    assert one.step(Observation(now=0, exits=[ended(S0)])) is None
    assert one.phase is Phase.RUNNING


def test_the_end_waits_for_the_other_machines() -> None:
    one = watch(S0, W0)
    done = [ended(W0)]
    assert one.step(Observation(now=0, exits=done, remote=RemoteState.RUNNING)) is None
    assert one.phase is Phase.RUNNING
    one.step(Observation(now=1, exits=done, remote=RemoteState.DONE))
    assert one.phase is Phase.LEAVING


def test_another_machine_ends_this_one() -> None:
    one = watch(W0)
    assert one.step(Observation(now=0, remote=RemoteState.STOP)) == signal.SIGTERM
    one.step(Observation(now=1, exits=[ended(W0, -15)], remote=RemoteState.STOP))
    assert one.is_over
    assert (one.verdict, one.failure) == (Verdict.STOPPED, None)


def test_the_own_failure_is_told_also_when_others_stopped() -> None:
    one = watch(W0)
    failed = ended(W0, 3)
    one.step(Observation(now=0, exits=[failed], remote=RemoteState.STOP))
    assert (one.verdict, one.failure) == (Verdict.FAILED, failed)


def returning(member: JobProcess, status: int = -signal.SIGKILL) -> ProcessExit:
    return ProcessExit(
        member=member, status=status, at=0.0, reported=ProcessStatus(restartable=True)
    )


def test_who_may_return_is_started_again_as_often_as_that_is_allowed() -> None:
    one = Watch((W0, W1, S0), GRACE_S, max_restarts=2)
    lost = returning(S0)
    for left in (1, 0):
        assert one.to_restart(Observation(now=0, exits=[lost])) is lost
        assert one.restarts_left == left
        assert one.step(Observation(now=0)) is None
    assert one.to_restart(Observation(now=1, exits=[lost])) is None
    assert one.step(Observation(now=1, exits=[lost])) == signal.SIGTERM
    assert (one.failure, one.restarted) == (lost, 2)


def test_nobody_is_started_again_while_a_job_ends() -> None:
    one = Watch((W0, S0), GRACE_S, max_restarts=9)
    seen = Observation(now=0, exits=[returning(S0)], interrupts=[signal.SIGINT])
    assert one.to_restart(seen) is None
    one = Watch((W0, W1, S0), GRACE_S, max_restarts=9)
    one.step(Observation(now=0, exits=[ended(W0, 1, error="ValueError")]))
    assert one.to_restart(Observation(now=0, exits=[returning(S0)])) is None
    # and nobody who did not say that it may
    one = Watch((W0, W1, S0), GRACE_S, max_restarts=9)
    assert one.to_restart(Observation(now=0, exits=[ended(S0, -signal.SIGKILL)])) is None


def test_without_one_that_is_dispensable_the_others_go_on() -> None:
    one = watch(W0, W1, S0)
    reported = ProcessStatus(restartable=True, expendable=True)
    lost = ProcessExit(member=W1, status=-signal.SIGKILL, at=0.0, reported=reported)
    assert one.to_restart(Observation(now=0, exits=[lost])) is None
    assert one.to_continue_without(Observation(now=0, exits=[lost])) is lost
    assert one.to_continue_without(Observation(now=1, exits=[lost])) is None
    assert one.step(Observation(now=1, exits=[lost])) is None
    assert one.phase is Phase.RUNNING
    one.step(Observation(now=2, exits=[lost, ended(W0)]))
    assert one.phase is Phase.LEAVING
    one.step(Observation(now=3, exits=[lost, ended(W0), ended(S0)]))
    assert (one.verdict, one.failure, one.continued_without) == (Verdict.SUCCESS, None, [lost])


def test_one_that_is_not_is_the_failure() -> None:
    one = watch(W0, W1, S0)
    reported = ProcessStatus(expendable=True, error="ValueError: x")
    lost = ProcessExit(member=W1, status=1, at=0.0, reported=reported)
    one.to_continue_without(Observation(now=0, exits=[lost]))
    killed = ended(W0, -signal.SIGKILL, at=1.0)
    assert one.step(Observation(now=1, exits=[lost, killed])) == signal.SIGTERM
    assert one.failure is killed


# --- asked to stop

STOP_S = 30.0
TERM = [signal.SIGTERM]


def stopped(member: JobProcess, step: int = 7) -> ProcessExit:
    return ProcessExit(member=member, status=75, at=0.0, stop=Stop(step, "/ckpt"))


def asked(*members: JobProcess) -> Watch:
    """A watch over processes that save, at SIGTERM."""
    one = Watch(members, GRACE_S, stop_s=STOP_S)
    assert one.step(Observation(now=0, interrupts=TERM, can_stop=True)) == signal.SIGTERM
    assert one.phase is Phase.STOPPING
    return one


def test_workers_are_asked_to_stop_and_servers_end_when_they_have() -> None:
    one = asked(S0, W0, W1)
    assert one.asked == (Kind.WORKER,)
    # longer than any other end may take
    assert one.step(Observation(now=STOP_S - 1, interrupts=TERM, exits=[stopped(W0)])) is None
    both = [stopped(W0, 9), stopped(W1, 7)]
    assert one.step(Observation(now=STOP_S - 0.5, interrupts=TERM, exits=both)) is None
    assert one.phase is Phase.LEAVING
    one.step(Observation(now=STOP_S + 1, interrupts=TERM, exits=[*both, stopped(S0, 0)]))
    assert (one.is_over, one.verdict, one.failure) == (True, Verdict.SAVED, None)
    # that of worker 0, who has saved
    assert one.stop == Stop(9, "/ckpt")


def test_one_that_is_killed_while_the_job_is_saved_is_started_again() -> None:
    one = Watch((S0, W0, W1), GRACE_S, max_restarts=9, stop_s=STOP_S)
    lost = returning(W1)
    # the signal comes first, and is acted upon
    assert one.to_restart(Observation(now=0, interrupts=TERM, exits=[lost], can_stop=True)) is None
    assert (
        one.step(Observation(now=0, interrupts=TERM, exits=[lost], can_stop=True)) == signal.SIGTERM
    )
    assert one.to_restart(Observation(now=1, interrupts=TERM, exits=[lost])) is lost
    assert one.step(Observation(now=1, interrupts=TERM)) is None
    assert one.phase is Phase.STOPPING
    twice = [*TERM, signal.SIGINT]
    assert one.to_restart(Observation(now=2, interrupts=twice, exits=[lost])) is None
    assert one.step(Observation(now=2, interrupts=twice, exits=[lost])) == signal.SIGKILL


def test_a_server_that_stays_after_a_stop_is_ended() -> None:
    one = asked(S0, W0)
    one.step(Observation(now=1, interrupts=TERM, exits=[stopped(W0)]))
    assert (
        one.step(Observation(now=1 + LEAVE_S, interrupts=TERM, exits=[stopped(W0)]))
        == signal.SIGTERM
    )
    one.step(Observation(now=9, interrupts=TERM, exits=[stopped(W0), ended(S0, -15)]))
    assert (one.is_over, one.verdict) == (True, Verdict.SAVED)


KILLED = dataclasses.replace(
    stopped(W0, 9), status=-signal.SIGKILL, reported=ProcessStatus(exiting=True)
)


def test_a_job_is_saved_though_a_worker_is_killed_between_its_stop_and_its_goodbye() -> None:
    """A server that may wait for it is ended."""
    one = asked(S0, W0, W1)
    for exits in ([KILLED], [KILLED, stopped(W1)]):
        assert (
            one.step(Observation(now=1, interrupts=TERM, exits=one.confirmed_exits(exits, 1)))
            is None
        )
    assert one.phase is Phase.LEAVING
    assert one.step(Observation(now=1 + LEAVE_S, interrupts=TERM, exits=exits)) == signal.SIGTERM
    one.step(Observation(now=9, interrupts=TERM, exits=[*exits, ended(S0, -15)]))
    assert (one.is_over, one.verdict, one.failure) == (True, Verdict.SAVED, None)
    assert one.stop == Stop(9, "/ckpt")


def test_nor_does_it_count_that_servers_miss_its_goodbye() -> None:
    reported = ProcessStatus(error="PeerLostError", caused_by_peer=True)
    missing = ProcessExit(member=S0, status=1, at=0.0, reported=reported)
    orders = ([KILLED], [KILLED, stopped(W1)]), ([KILLED, missing], [missing, KILLED])
    for order in orders:
        one = asked(S0, W0, W1)
        for exits in (*order, [missing, KILLED, stopped(W1)]):
            one.step(Observation(now=1, interrupts=TERM, exits=one.confirmed_exits(exits, 1)))
        assert (one.is_over, one.verdict, one.failure) == (True, Verdict.SAVED, None)
        assert one.stop == Stop(9, "/ckpt")
    # but not that another worker does, nor an error of a server's own
    for failed in (dataclasses.replace(missing, member=W1), ended(S0, 1, error="ValueError")):
        one = asked(S0, W0, W1)
        exits = one.confirmed_exits([KILLED, failed], 1)
        assert one.step(Observation(now=1, interrupts=TERM, exits=exits)) == signal.SIGKILL
        assert (one.verdict, one.failure) == (Verdict.INTERRUPTED, failed)


def test_a_second_signal_ends_servers_once_all_is_saved() -> None:
    one = asked(S0, W0)
    one.step(Observation(now=1, interrupts=TERM, exits=[stopped(W0)]))
    twice = [*TERM, signal.SIGINT]
    assert one.step(Observation(now=2, interrupts=twice, exits=[stopped(W0)])) == signal.SIGINT
    one.step(Observation(now=3, interrupts=twice, exits=[stopped(W0), ended(S0, -2)]))
    assert (one.is_over, one.verdict) == (True, Verdict.SAVED)


def test_a_machine_of_servers_asks_these() -> None:
    one = asked(S0)
    assert one.asked == (Kind.SERVER,)
    assert one.step(Observation(now=LEAVE_S + 1, interrupts=TERM)) is None
    one.step(Observation(now=9, interrupts=TERM, exits=[stopped(S0, 0)]))
    assert (one.is_over, one.verdict) == (True, Verdict.SAVED)


def test_who_does_not_save_ends_as_ever() -> None:
    for interrupts, can_stop in ((TERM, False), ([signal.SIGINT], True), ([signal.SIGHUP], True)):
        one = watch(W0, S0)
        seen = Observation(now=0, interrupts=interrupts, can_stop=can_stop)
        assert one.step(seen) == interrupts[0]
        assert (one.phase, one.asked) == (Phase.ENDING, ())


def test_a_second_signal_kills_while_the_job_is_saved() -> None:
    one = asked(S0, W0)
    twice = [signal.SIGTERM, signal.SIGINT]
    assert one.step(Observation(now=1, interrupts=twice, can_stop=True)) == signal.SIGKILL
    assert one.asked == ()
    one.step(Observation(now=2, interrupts=twice, exits=[ended(S0, -9), ended(W0, -9)]))
    assert (one.is_over, one.verdict, one.stop_failed) == (True, Verdict.INTERRUPTED, True)


def test_a_stop_has_its_time() -> None:
    one = asked(W0, W1)
    exits = [stopped(W0)]
    assert one.step(Observation(now=STOP_S - 0.1, interrupts=TERM, exits=exits)) is None
    assert one.step(Observation(now=STOP_S, interrupts=TERM, exits=exits)) == signal.SIGKILL
    assert (one.verdict, one.stop_failed) == (Verdict.INTERRUPTED, True)


def test_a_stop_that_goes_wrong_is_no_failure_that_a_restart_cures() -> None:
    one = asked(W0, W1)
    exits = [ended(W1, 1, error="CheckpointError")]
    assert one.step(Observation(now=1, interrupts=TERM, exits=exits)) == signal.SIGKILL
    # but it is shown
    assert (one.verdict, one.failure, one.stop_failed) == (Verdict.INTERRUPTED, exits[0], True)


def test_workers_may_have_been_asked_elsewhere() -> None:
    one = watch(W0, W1)
    assert one.step(Observation(now=0, exits=[stopped(W0)], remote=RemoteState.RUNNING)) is None
    assert one.phase is Phase.STOPPING
    # this machine hears it a little later than the first one
    late = Observation(now=1, exits=[stopped(W0)], interrupts=TERM, remote=RemoteState.RUNNING)
    assert one.step(late) is None
    both = [stopped(W0), stopped(W1)]
    one.step(Observation(now=2, exits=both, interrupts=TERM, remote=RemoteState.STOP))
    assert (one.is_over, one.verdict) == (True, Verdict.SAVED)


def test_a_job_that_was_done_anyhow_is_done() -> None:
    one = asked(W0, W1)
    one.step(Observation(now=1, interrupts=TERM, exits=[ended(W0), ended(W1)]))
    assert (one.is_over, one.verdict, one.stop) == (True, Verdict.SUCCESS, None)


def test_who_only_notes_sigterm_gets_another_one_when_a_job_fails() -> None:
    one = watch(W0, W1)
    exits = [ended(W1, -signal.SIGKILL)]
    assert one.step(Observation(now=0, exits=exits, can_stop=True)) == signal.SIGTERM
    assert one.step(Observation(now=FIRST_SIGTERM_S - 0.1, exits=exits, can_stop=True)) is None
    assert one.step(Observation(now=FIRST_SIGTERM_S, exits=exits, can_stop=True)) == signal.SIGTERM
    assert one.step(Observation(now=FIRST_SIGTERM_S + 0.1, exits=exits, can_stop=True)) is None
    assert one.step(Observation(now=GRACE_S, exits=exits, can_stop=True)) == signal.SIGKILL


def test_who_ends_at_sigterm_gets_one() -> None:
    one = watch(W0, W1)
    exits = [ended(W1, -signal.SIGKILL)]
    assert one.step(Observation(now=0, exits=exits)) == signal.SIGTERM
    assert one.step(Observation(now=FIRST_SIGTERM_S, exits=exits)) is None


def test_one_that_is_killed_behind_the_end_of_its_script_has_done_all() -> None:
    one = watch(W0, W1, S0)
    reported = ProcessStatus(left_job=True, exiting=True)
    killed = ProcessExit(member=W0, status=-signal.SIGKILL, at=0.0, reported=reported)
    assert not killed.has_failed
    assert one.to_continue_without(Observation(now=0, exits=[killed])) is killed
    assert "no work is lost" in continuing_without(killed)
    one.step(Observation(now=1, exits=[killed, ended(W1)]))
    one.step(Observation(now=2, exits=[killed, ended(W1), ended(S0)]))
    assert one.verdict is Verdict.SUCCESS
    # its script may have had something to do, or its end is its own fault
    for less in (ProcessStatus(left_job=True), ProcessStatus(exiting=True)):
        assert dataclasses.replace(killed, reported=less).has_failed
    for status in (1, -signal.SIGABRT):
        assert dataclasses.replace(killed, status=status).has_failed


def test_a_server_that_is_killed_behind_the_last_goodbye_has_done_all() -> None:
    reported = ProcessStatus(left_job=True, exiting=True)
    killed = ProcessExit(member=S0, status=-signal.SIGKILL, at=0.0, reported=reported)
    # the workers may have ended before, or still be about to
    for steps in ([[ended(W0)], [ended(W0), killed]], [[killed], [ended(W0), killed]]):
        one = watch(S0, W0)
        for exits in steps:
            assert one.to_restart(Observation(now=0, exits=exits)) is None
            assert one.step(Observation(now=0, exits=exits)) is None
        assert one.is_over
        assert (one.verdict, one.failure) == (Verdict.SUCCESS, None)


def parting(status: int = -signal.SIGKILL, **facts: Any) -> ProcessExit:
    """Worker 0 was killed amid its goodbye, and its script was over."""
    usual = {"restartable": True, "saying_goodbye": True, "exiting": True}
    reported = ProcessStatus(**{**usual, **facts})
    return ProcessExit(member=W0, status=status, at=0.0, reported=reported)


def test_servers_that_end_have_heard_the_goodbye_of_one_that_was_killed_amid_it() -> None:
    one = Watch([S0, W0], GRACE_S, 1)
    assert one.confirmed_exits([parting()], 1.0) == []
    known = one.confirmed_exits([parting(), ended(S0)], 1.1)
    assert [lost.is_done for lost in known] == [True, False]
    seen = Observation(now=1.1, exits=known)
    assert one.to_restart(seen) is None
    one.step(seen)
    assert one.is_over
    assert (one.verdict, one.restarted) == (Verdict.SUCCESS, 0)
    # its script may have had something to do, and another life could not call the servers
    again = Watch([S0, W0], GRACE_S, 1)
    lost = again.confirmed_exits([parting(exiting=False), ended(S0)], 1.1)[0]
    assert not lost.is_done
    assert not lost.may_restart_alone


def test_one_that_servers_may_not_have_heard_is_started_again() -> None:
    one = Watch([S0, W0, W1], GRACE_S, 2)
    for now in (1.0, 10.0):
        assert one.confirmed_exits([parting()], now) == []
        known = one.confirmed_exits([parting()], now + GOODBYE_S)
        assert one.to_restart(Observation(now=now + GOODBYE_S, exits=known)) == parting()
    # nothing is waited for where nobody could tell, or where the job has failed anyhow
    failed = ended(W1, 3, error="ValueError")
    for members, exits in (([W0, W1], [parting()]), ([S0, W0, W1], [parting(), failed])):
        assert Watch(members, GRACE_S, 1).confirmed_exits(exits, 1.0) == exits
