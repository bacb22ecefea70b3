# SPDX-License-Identifier: Apache-2.0
"""A job of one machine, and the rule for restarts."""

import dataclasses

from fleetlight.launch.job.layout import Node
from fleetlight.launch.machines.other_machines import NextAction, NoOtherMachines, conclusion
from fleetlight.launch.processes.failure import JobFailure
from fleetlight.launch.processes.watch import RemoteState

FAILURE = JobFailure(what="worker 0 of 1 exited with code 1", code=1)


def test_single_machine_waits_for_no_other() -> None:
    alone, node = NoOtherMachines(), Node(host="a")
    assert alone.gather(node).nodes == (node,)
    assert alone.share("id") == "id"
    assert alone.exchange_state(workers_done=False) is RemoteState.DONE
    assert alone.conclude(FAILURE, restarts_left=1).next is NextAction.RESTART
    alone.give_up("why")
    alone.close()


def test_failure_restarts_while_restarts_remain() -> None:
    assert conclusion(FAILURE, 1).next is NextAction.RESTART
    assert conclusion(FAILURE, 0).next is NextAction.FINISH
    assert conclusion(None, 1).next is NextAction.FINISH
    assert conclusion(dataclasses.replace(FAILURE, may_restart=False), 1).next is NextAction.FINISH
