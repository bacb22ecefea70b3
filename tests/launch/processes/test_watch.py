# SPDX-License-Identifier: Apache-2.0
"""The decisions of `Watch`, step by step, without processes or clocks."""

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


def test_root_cause_ends_the_others_at_once() -> None:
    one = watch(W0, W1)
    killed = ended(W1, -signal.SIGKILL)
    assert one.step(Observation(now=0, exits=[killed])) == signal.SIGTERM
    assert one.failure is killed
    one.step(Observation(now=1, exits=[killed, ended(W0, -signal.SIGTERM)]))
    assert one.is_over
    assert (one.verdict, one.failure) == (Verdict.FAILED, killed)


def test_exiting_process_may_be_the_root_cause() -> None:
    one = watch(W0, W1)
    unclear, cause = ended(W0, 1, at=1.0), ended(W1, 3, at=0.5)
    assert one.step(Observation(now=1, exits=[unclear], leaving=True)) is None
    assert one.step(Observation(now=1 + EXIT_S - 0.1, exits=[unclear], leaving=True)) is None
    one.step(Observation(now=1 + EXIT_S - 0.05, exits=[unclear, cause]))
    assert one.is_over
    assert one.failure is cause


def test_wait_for_an_exiting_process_has_a_limit() -> None:
    one = watch(W0, W1)
    unclear = ended(W0, 1)
    one.step(Observation(now=1, exits=[unclear], leaving=True))
    assert one.step(Observation(now=1 + EXIT_S, exits=[unclear], leaving=True)) == signal.SIGTERM
    assert one.failure is unclear


def test_unclear_failure_waits_for_the_root_cause() -> None:
    one = watch(W0, W1)
    unclear, cause = ended(W0, 1, at=1.0), ended(W1, 1, at=0.5, error="ValueError")
    assert one.step(Observation(now=1, exits=[unclear])) is None
    assert one.phase is Phase.SETTLING
    one.step(Observation(now=1.1, exits=[unclear, cause]))
    assert one.failure is cause


def test_unclear_failure_is_reported_when_no_other_follows() -> None:
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


def test_failure_ends_the_job_within_five_seconds() -> None:
    assert SETTLE_S + GRACE_S < 5


def test_interrupt_is_forwarded_and_a_second_one_kills() -> None:
    one = watch(W0)
    assert one.step(Observation(now=0, interrupts=[signal.SIGINT])) == signal.SIGINT
    assert one.step(Observation(now=0.1, interrupts=[signal.SIGINT])) is None
    two = [signal.SIGINT, signal.SIGINT]
    assert one.step(Observation(now=0.2, interrupts=two)) == signal.SIGKILL
    one.step(Observation(now=0.3, interrupts=two, exits=[ended(W0, -9)]))
    assert (one.verdict, one.signal) == (Verdict.INTERRUPTED, signal.SIGINT)
    assert one.failure is None


def test_servers_may_exit_by_themselves() -> None:
    one = watch(S0, W0)
    assert one.step(Observation(now=0, exits=[ended(W0)])) is None
    assert one.phase is Phase.LEAVING
    one.step(Observation(now=1, exits=[ended(W0), ended(S0)]))
    assert one.is_over
    assert (one.verdict, one.ended_servers) == (Verdict.SUCCESS, False)


def test_remaining_servers_are_stopped_without_a_failure() -> None:
    one = watch(S0, W0)
    one.step(Observation(now=0, exits=[ended(W0)]))
    assert one.step(Observation(now=LEAVE_S, exits=[ended(W0)])) == signal.SIGTERM
    one.step(Observation(now=LEAVE_S + 1, exits=[ended(W0), ended(S0, -15)]))
    assert one.is_over
    assert (one.verdict, one.ended_servers) == (Verdict.SUCCESS, True)


def test_failed_server_fails_the_job() -> None:
    for exits in ([ended(S0, -9)], [ended(W0), ended(S0, -9)]):
        one = watch(S0, W0)
        one.step(Observation(now=0, exits=exits))
        assert one.verdict is Verdict.FAILED
        assert one.failure is not None
        assert one.failure.member is S0


def test_server_that_is_done_early_is_no_failure() -> None:
    one = watch(S0, W0)
    assert one.step(Observation(now=0, exits=[ended(S0)])) is None
    assert one.phase is Phase.RUNNING


def test_servers_run_until_the_other_machines_are_done() -> None:
    one = watch(S0, W0)
    done = [ended(W0)]
    assert one.step(Observation(now=0, exits=done, remote=RemoteState.RUNNING)) is None
    assert one.phase is Phase.RUNNING
    one.step(Observation(now=1, exits=done, remote=RemoteState.DONE))
    assert one.phase is Phase.LEAVING


def test_failure_of_another_machine_ends_this_one() -> None:
    one = watch(W0)
    assert one.step(Observation(now=0, remote=RemoteState.STOP)) == signal.SIGTERM
    one.step(Observation(now=1, exits=[ended(W0, -15)], remote=RemoteState.STOP))
    assert one.is_over
    assert (one.verdict, one.failure) == (Verdict.STOPPED, None)


def test_local_failure_is_reported_after_a_remote_stop() -> None:
    one = watch(W0)
    failed = ended(W0, 3)
    one.step(Observation(now=0, exits=[failed], remote=RemoteState.STOP))
    assert (one.verdict, one.failure) == (Verdict.FAILED, failed)


def restartable(member: JobProcess, status: int = -signal.SIGKILL) -> ProcessExit:
    return ProcessExit(
        member=member, status=status, at=0.0, reported=ProcessStatus(restartable=True)
    )


def test_restartable_process_restarts_up_to_the_limit() -> None:
    one = Watch((W0, W1, S0), GRACE_S, max_restarts=2)
    lost = restartable(S0)
    for left in (1, 0):
        assert one.to_restart(Observation(now=0, exits=[lost])) is lost
        assert one.restarts_left == left
        assert one.step(Observation(now=0)) is None
    assert one.to_restart(Observation(now=1, exits=[lost])) is None
    assert one.step(Observation(now=1, exits=[lost])) == signal.SIGTERM
    assert (one.failure, one.restarted) == (lost, 2)


def test_no_process_restarts_while_a_job_ends() -> None:
    one = Watch((W0, S0), GRACE_S, max_restarts=9)
    seen = Observation(now=0, exits=[restartable(S0)], interrupts=[signal.SIGINT])
    assert one.to_restart(seen) is None
    one = Watch((W0, W1, S0), GRACE_S, max_restarts=9)
    one.step(Observation(now=0, exits=[ended(W0, 1, error="ValueError")]))
    assert one.to_restart(Observation(now=0, exits=[restartable(S0)])) is None
    # a process that has not reported itself restartable does not restart
    one = Watch((W0, W1, S0), GRACE_S, max_restarts=9)
    assert one.to_restart(Observation(now=0, exits=[ended(S0, -signal.SIGKILL)])) is None


def test_others_continue_without_an_expendable_process() -> None:
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


def test_the_first_loss_is_known_where_all_workers_were_lost() -> None:
    reported = ProcessStatus(expendable=True)
    lost = [
        ProcessExit(member=member, status=-signal.SIGKILL, at=float(number), reported=reported)
        for number, member in enumerate((W0, W1))
    ]
    one = watch(W0, W1)
    one.to_continue_without(Observation(now=0, exits=lost[:1]))
    assert one.first_of_lost_workers is None
    one.to_continue_without(Observation(now=1, exits=lost))
    assert one.first_of_lost_workers is lost[0]


def test_process_that_is_not_expendable_fails_the_job() -> None:
    one = watch(W0, W1, S0)
    reported = ProcessStatus(expendable=True, error="ValueError: x")
    lost = ProcessExit(member=W1, status=1, at=0.0, reported=reported)
    one.to_continue_without(Observation(now=0, exits=[lost]))
    killed = ended(W0, -signal.SIGKILL, at=1.0)
    assert one.step(Observation(now=1, exits=[lost, killed])) == signal.SIGTERM
    assert one.failure is killed


# --- graceful stop

STOP_S = 30.0
TERM = [signal.SIGTERM]


def stopped(member: JobProcess, step: int = 7) -> ProcessExit:
    return ProcessExit(member=member, status=75, at=0.0, stop=Stop(step, "/ckpt"))


def stopping_watch(*members: JobProcess) -> Watch:
    """A watch over processes that save at SIGTERM."""
    one = Watch(members, GRACE_S, stop_s=STOP_S)
    assert one.step(Observation(now=0, interrupts=TERM, can_stop=True)) == signal.SIGTERM
    assert one.phase is Phase.STOPPING
    return one


def test_workers_stop_on_request_and_servers_exit_after_them() -> None:
    one = stopping_watch(S0, W0, W1)
    assert one.asked == (Kind.WORKER,)
    # longer than the limit of any other end
    assert one.step(Observation(now=STOP_S - 1, interrupts=TERM, exits=[stopped(W0)])) is None
    both = [stopped(W0, 9), stopped(W1, 7)]
    assert one.step(Observation(now=STOP_S - 0.5, interrupts=TERM, exits=both)) is None
    assert one.phase is Phase.LEAVING
    one.step(Observation(now=STOP_S + 1, interrupts=TERM, exits=[*both, stopped(S0, 0)]))
    assert (one.is_over, one.verdict, one.failure) == (True, Verdict.SAVED, None)
    # that of worker 0, which has saved
    assert one.stop == Stop(9, "/ckpt")


def test_a_process_killed_during_a_save_restarts() -> None:
    one = Watch((S0, W0, W1), GRACE_S, max_restarts=9, stop_s=STOP_S)
    lost = restartable(W1)
    # the signal comes first and takes effect
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


def test_server_that_remains_after_a_stop_is_ended() -> None:
    one = stopping_watch(S0, W0)
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


def test_worker_killed_between_stop_and_goodbye_has_saved() -> None:
    """A server that may wait for its goodbye is ended."""
    one = stopping_watch(S0, W0, W1)
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


def test_servers_may_miss_the_goodbye_of_a_stopped_worker() -> None:
    reported = ProcessStatus(error="PeerLostError", caused_by_peer=True)
    missing = ProcessExit(member=S0, status=1, at=0.0, reported=reported)
    orders = ([KILLED], [KILLED, stopped(W1)]), ([KILLED, missing], [missing, KILLED])
    for order in orders:
        one = stopping_watch(S0, W0, W1)
        for exits in (*order, [missing, KILLED, stopped(W1)]):
            one.step(Observation(now=1, interrupts=TERM, exits=one.confirmed_exits(exits, 1)))
        assert (one.is_over, one.verdict, one.failure) == (True, Verdict.SAVED, None)
        assert one.stop == Stop(9, "/ckpt")
    # but no failure of another worker, and no error of the server itself
    for failed in (dataclasses.replace(missing, member=W1), ended(S0, 1, error="ValueError")):
        one = stopping_watch(S0, W0, W1)
        exits = one.confirmed_exits([KILLED, failed], 1)
        assert one.step(Observation(now=1, interrupts=TERM, exits=exits)) == signal.SIGKILL
        assert (one.verdict, one.failure) == (Verdict.INTERRUPTED, failed)


def test_second_signal_ends_servers_after_the_save() -> None:
    one = stopping_watch(S0, W0)
    one.step(Observation(now=1, interrupts=TERM, exits=[stopped(W0)]))
    twice = [*TERM, signal.SIGINT]
    assert one.step(Observation(now=2, interrupts=twice, exits=[stopped(W0)])) == signal.SIGINT
    one.step(Observation(now=3, interrupts=twice, exits=[stopped(W0), ended(S0, -2)]))
    assert (one.is_over, one.verdict) == (True, Verdict.SAVED)


def test_machine_with_only_servers_signals_them() -> None:
    one = stopping_watch(S0)
    assert one.asked == (Kind.SERVER,)
    assert one.step(Observation(now=LEAVE_S + 1, interrupts=TERM)) is None
    one.step(Observation(now=9, interrupts=TERM, exits=[stopped(S0, 0)]))
    assert (one.is_over, one.verdict) == (True, Verdict.SAVED)


def test_processes_that_do_not_save_end_at_sigterm() -> None:
    for interrupts, can_stop in ((TERM, False), ([signal.SIGINT], True), ([signal.SIGHUP], True)):
        one = watch(W0, S0)
        seen = Observation(now=0, interrupts=interrupts, can_stop=can_stop)
        assert one.step(seen) == interrupts[0]
        assert (one.phase, one.asked) == (Phase.ENDING, ())


def test_second_signal_kills_during_a_save() -> None:
    one = stopping_watch(S0, W0)
    twice = [signal.SIGTERM, signal.SIGINT]
    assert one.step(Observation(now=1, interrupts=twice, can_stop=True)) == signal.SIGKILL
    assert one.asked == ()
    one.step(Observation(now=2, interrupts=twice, exits=[ended(S0, -9), ended(W0, -9)]))
    assert (one.is_over, one.verdict, one.stop_failed) == (True, Verdict.INTERRUPTED, True)


def test_stop_has_a_deadline() -> None:
    one = stopping_watch(W0, W1)
    exits = [stopped(W0)]
    assert one.step(Observation(now=STOP_S - 0.1, interrupts=TERM, exits=exits)) is None
    assert one.step(Observation(now=STOP_S, interrupts=TERM, exits=exits)) == signal.SIGKILL
    assert (one.verdict, one.stop_failed) == (Verdict.INTERRUPTED, True)


def test_failed_stop_causes_no_restart() -> None:
    one = stopping_watch(W0, W1)
    exits = [ended(W1, 1, error="CheckpointError")]
    assert one.step(Observation(now=1, interrupts=TERM, exits=exits)) == signal.SIGKILL
    # but it is reported
    assert (one.verdict, one.failure, one.stop_failed) == (Verdict.INTERRUPTED, exits[0], True)


def test_stop_may_come_from_another_machine() -> None:
    one = watch(W0, W1)
    assert one.step(Observation(now=0, exits=[stopped(W0)], remote=RemoteState.RUNNING)) is None
    assert one.phase is Phase.STOPPING
    # this machine learns of the stop a little later than the first
    late = Observation(now=1, exits=[stopped(W0)], interrupts=TERM, remote=RemoteState.RUNNING)
    assert one.step(late) is None
    both = [stopped(W0), stopped(W1)]
    one.step(Observation(now=2, exits=both, interrupts=TERM, remote=RemoteState.STOP))
    assert (one.is_over, one.verdict) == (True, Verdict.SAVED)


def test_job_that_ends_during_a_stop_is_done() -> None:
    one = stopping_watch(W0, W1)
    one.step(Observation(now=1, interrupts=TERM, exits=[ended(W0), ended(W1)]))
    assert (one.is_over, one.verdict, one.stop) == (True, Verdict.SUCCESS, None)


def test_process_that_records_sigterm_gets_a_second_one() -> None:
    one = watch(W0, W1)
    exits = [ended(W1, -signal.SIGKILL)]
    assert one.step(Observation(now=0, exits=exits, can_stop=True)) == signal.SIGTERM
    assert one.step(Observation(now=FIRST_SIGTERM_S - 0.1, exits=exits, can_stop=True)) is None
    assert one.step(Observation(now=FIRST_SIGTERM_S, exits=exits, can_stop=True)) == signal.SIGTERM
    assert one.step(Observation(now=FIRST_SIGTERM_S + 0.1, exits=exits, can_stop=True)) is None
    assert one.step(Observation(now=GRACE_S, exits=exits, can_stop=True)) == signal.SIGKILL


def test_process_that_ends_at_sigterm_gets_one() -> None:
    one = watch(W0, W1)
    exits = [ended(W1, -signal.SIGKILL)]
    assert one.step(Observation(now=0, exits=exits)) == signal.SIGTERM
    assert one.step(Observation(now=FIRST_SIGTERM_S, exits=exits)) is None


def test_worker_killed_after_its_script_is_done() -> None:
    one = watch(W0, W1, S0)
    reported = ProcessStatus(left_job=True, exiting=True)
    killed = ProcessExit(member=W0, status=-signal.SIGKILL, at=0.0, reported=reported)
    assert not killed.has_failed
    assert one.to_continue_without(Observation(now=0, exits=[killed])) is killed
    assert "no work is lost" in continuing_without(killed)
    one.step(Observation(now=1, exits=[killed, ended(W1)]))
    one.step(Observation(now=2, exits=[killed, ended(W1), ended(S0)]))
    assert one.verdict is Verdict.SUCCESS
    # its script may not be over, or its end may be its own fault
    for less in (ProcessStatus(left_job=True), ProcessStatus(exiting=True)):
        assert dataclasses.replace(killed, reported=less).has_failed
    for status in (1, -signal.SIGABRT):
        assert dataclasses.replace(killed, status=status).has_failed


def test_server_killed_after_the_last_goodbye_is_done() -> None:
    reported = ProcessStatus(left_job=True, exiting=True)
    killed = ProcessExit(member=S0, status=-signal.SIGKILL, at=0.0, reported=reported)
    # the workers may have ended before, or be about to end
    for steps in ([[ended(W0)], [ended(W0), killed]], [[killed], [ended(W0), killed]]):
        one = watch(S0, W0)
        for exits in steps:
            assert one.to_restart(Observation(now=0, exits=exits)) is None
            assert one.step(Observation(now=0, exits=exits)) is None
        assert one.is_over
        assert (one.verdict, one.failure) == (Verdict.SUCCESS, None)


def killed_while_leaving(status: int = -signal.SIGKILL, **facts: Any) -> ProcessExit:
    """Worker 0, killed during its goodbye after its script was over."""
    usual = {"restartable": True, "saying_goodbye": True, "exiting": True}
    reported = ProcessStatus(**{**usual, **facts})
    return ProcessExit(member=W0, status=status, at=0.0, reported=reported)


def test_exited_servers_confirm_the_goodbye_of_a_killed_worker() -> None:
    one = Watch([S0, W0], GRACE_S, 1)
    assert one.confirmed_exits([killed_while_leaving()], 1.0) == []
    known = one.confirmed_exits([killed_while_leaving(), ended(S0)], 1.1)
    assert [lost.is_done for lost in known] == [True, False]
    seen = Observation(now=1.1, exits=known)
    assert one.to_restart(seen) is None
    one.step(seen)
    assert one.is_over
    assert (one.verdict, one.restarted) == (Verdict.SUCCESS, 0)
    # its script may not be over, but a restarted worker could not reach the servers
    again = Watch([S0, W0], GRACE_S, 1)
    lost = again.confirmed_exits([killed_while_leaving(exiting=False), ended(S0)], 1.1)[0]
    assert not lost.is_done
    assert not lost.may_restart_alone


def test_worker_without_a_confirmed_goodbye_restarts() -> None:
    one = Watch([S0, W0, W1], GRACE_S, 2)
    for now in (1.0, 10.0):
        assert one.confirmed_exits([killed_while_leaving()], now) == []
        known = one.confirmed_exits([killed_while_leaving()], now + GOODBYE_S)
        assert (
            one.to_restart(Observation(now=now + GOODBYE_S, exits=known)) == killed_while_leaving()
        )
    # no wait without servers to confirm it, or after another failure
    failed = ended(W1, 3, error="ValueError")
    for members, exits in (
        ([W0, W1], [killed_while_leaving()]),
        ([S0, W0, W1], [killed_while_leaving(), failed]),
    ):
        assert Watch(members, GRACE_S, 1).confirmed_exits(exits, 1.0) == exits
