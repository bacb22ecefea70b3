# SPDX-License-Identifier: Apache-2.0
"""The state of torch's elastic rendezvous, which launchers of several machines share.

Why: torch reads and writes this state as a pickle. Fleetlight puts JSON there, so it makes the
objects of the state itself. There is no public way. `dynamic` is torch's module
`torch.distributed.elastic.rendezvous.dynamic_rendezvous`: the launcher imports it only for jobs on
several machines.
"""

from __future__ import annotations

from typing import Any


def node(dynamic: Any, addr: str, pid: int, local_id: int) -> Any:
    """The description of one launcher."""
    return dynamic._NodeDesc(addr, pid, local_id)


def empty_state(dynamic: Any) -> Any:
    """A state without any launcher."""
    return dynamic._RendezvousState()
