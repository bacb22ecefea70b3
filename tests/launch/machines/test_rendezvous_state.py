# SPDX-License-Identifier: Apache-2.0
"""The rendezvous state is JSON: a pickle in the store is refused, never loaded."""

import base64
import contextlib
import dataclasses
import os
import pickle
import socket
import threading
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetlight.errors import LaunchError, MembershipError
from fleetlight.launch.inventory import version_of
from fleetlight.launch.job.layout import Node
from fleetlight.launch.job.spec import JobSpec, MachineSpec, RendezvousSpec, RoleSpec
from fleetlight.launch.machines import store
from fleetlight.launch.machines.other_machines import NextAction, NoOtherMachines, conclusion
from fleetlight.launch.machines.own_node import reserve_node, script_hash, with_shared_facts
from fleetlight.launch.machines.rendezvous_state import JsonBackend, from_json, to_json
from fleetlight.launch.machines.store import Rendezvous, Store
from fleetlight.launch.processes.failure import JobFailure
from fleetlight.launch.processes.ports import Reservation
from fleetlight.launch.processes.watch import RemoteState
from fleetlight.roles.role import Kind

dynamic: Any = pytest.importorskip("torch.distributed.elastic.rendezvous.dynamic_rendezvous")

KEY = "torch.rendezvous.fleetrun"
NODES = st.builds(dynamic._NodeDesc, st.text(), st.integers(0, 1 << 22), st.integers(0, 99))
MOMENTS = st.datetimes(timezones=st.just(timezone.utc))


@st.composite
def states(draw: st.DrawFn) -> Any:
    state = dynamic._RendezvousState()
    state.round, state.complete = draw(st.integers(0, 1 << 40)), draw(st.booleans())
    state.deadline, state.closed = draw(st.none() | MOMENTS), draw(st.booleans())
    state.participants = draw(st.dictionaries(NODES, st.integers(0, 999)))
    state.wait_list, state.redundancy_list = draw(st.sets(NODES)), draw(st.sets(NODES))
    state.last_heartbeats = draw(st.dictionaries(NODES, MOMENTS))
    return state


@given(states())
def test_any_state_round_trips(state: Any) -> None:
    again = from_json(to_json(state), dynamic)
    assert vars(again) == vars(state)
    assert to_json(again) == to_json(state)


def test_codec_covers_all_fields_of_torchs_state() -> None:
    """A field that a new torch adds would be lost."""
    assert set(vars(dynamic._RendezvousState())) == set(msgspec.json.decode(to_json(fresh())))
    assert set(dynamic._NodeDesc.__annotations__) == {"addr", "pid", "local_id"}


def fresh() -> Any:
    return dynamic._RendezvousState()


class Memory:
    """torch's backend over one value in this process."""

    name = "memory"

    def __init__(self, value: bytes | None = None) -> None:
        self.value = value

    def get_state(self) -> tuple[bytes, Any] | None:
        return None if self.value is None else (self.value, self.value)

    def set_state(self, state: bytes, token: Any = None) -> tuple[bytes, Any, bool] | None:
        if token == self.value:
            self.value = state
        assert self.value is not None
        return self.value, self.value, self.value == state


class Trap:
    """Runs code when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self._mark),)


def test_state_is_stored_as_data() -> None:
    memory = Memory()
    one, other = JsonBackend(memory, dynamic), JsonBackend(memory, dynamic)
    assert one.name == "memory"
    assert one.get_state() is None
    mine, theirs = fresh(), fresh()
    mine.round, theirs.round = 1, 2
    sent = pickle.dumps(mine)
    answer = one.set_state(sent)
    assert answer is not None
    assert (answer[0], answer[2]) == (sent, True)
    assert memory.value is not None
    assert msgspec.json.decode(memory.value)["round"] == 1
    refused = other.set_state(pickle.dumps(theirs), "an old mark")
    assert refused is not None
    assert not refused[2]
    assert pickle.loads(refused[0]).round == 1
    found = other.get_state()
    assert found is not None
    assert pickle.loads(found[0]).round == 1


@pytest.mark.parametrize("data", [b"", b"{}", b"[]", b'{"round": "x"}', b"\x80\x04."])
def test_other_values_are_refused(data: bytes) -> None:
    with pytest.raises(dynamic.RendezvousStateError, match="in place of a rendezvous state"):
        JsonBackend(Memory(data), dynamic).get_state()


def met() -> tuple[Store, RendezvousSpec]:
    with contextlib.closing(Reservation("127.0.0.1")) as held:
        spec = RendezvousSpec(master=("127.0.0.1", held.port), min_nodes=2, max_nodes=2)
    served = store.serve(spec)
    assert served is not None
    return served, spec


@pytest.mark.slow
def test_pickle_in_the_store_is_not_loaded(tmp_path: Path) -> None:
    """With torch's own backend this pickle would run code in a launcher."""
    mark = tmp_path / "opened"
    served, spec = met()
    served.set(KEY, base64.b64encode(pickle.dumps(Trap(mark))).decode())
    rendezvous = Rendezvous(store.connect(spec), spec, "127.0.0.1", 10.0)
    with pytest.raises(MembershipError, match="in place of a rendezvous state"):
        rendezvous.next_round()
    with pytest.raises(RuntimeError):
        rendezvous.waiting()
    assert not mark.exists()
    pickle.loads(pickle.dumps(Trap(mark)))
    assert mark.exists(), "the trap works"


@pytest.mark.slow
def test_two_launchers_meet_over_a_json_store() -> None:
    store.quiet_torch()
    served, spec = met()
    ranks: list[int] = []
    all_met = threading.Barrier(2, timeout=60)

    def meet() -> None:
        rendezvous = Rendezvous(store.connect(spec), spec, "127.0.0.1", 60.0)
        ranks.append(rendezvous.next_round()[1])
        all_met.wait()
        rendezvous.close()

    threads = [threading.Thread(target=meet) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(ranks) == [0, 1]
    state = msgspec.json.decode(base64.b64decode(served.get(KEY)))
    assert len(state["participants"]) == 2
    assert datetime.now(timezone.utc) - timedelta(minutes=5) < datetime.fromisoformat(
        state["last_heartbeats"][0][1].replace("Z", "+00:00")
    )


# -- the node of this machine: its ports and the facts that launchers compare


def job(script: str = "t.py", **more: object) -> JobSpec:
    return JobSpec(
        script=script,
        worker=RoleSpec(kind=Kind.WORKER, count=2),
        server=RoleSpec(kind=Kind.SERVER, count=1),
        **more,  # type: ignore[arg-type]
    )


def test_each_process_and_the_master_have_their_own_port() -> None:
    with contextlib.ExitStack() as held:
        node, reservations = reserve_node(job(), held, restart=2, failures=1)
        ports = [port for _, port in (*node.workers, *node.servers)] + [node.master_port]
        assert sorted(ports) == sorted(reservation.port for reservation in reservations)
        assert len(set(ports)) == 4
        assert (node.restart, node.failures) == (2, 1)


def test_listed_endpoints_are_reserved() -> None:
    with contextlib.ExitStack() as held:
        _, [reservation, *_] = reserve_node(job(), held)
        port = reservation.port
    listed = MachineSpec(workers=(("127.0.0.1", port),))
    with contextlib.ExitStack() as held:
        node, reservations = reserve_node(JobSpec(script="t.py", machine=listed), held)
        assert node.workers == (("127.0.0.1", port),)
        assert port in [held_port.port for held_port in reservations]


@pytest.mark.parametrize("flag", ["--servers", "--workers"])
def test_error_for_a_listed_port_in_use_names_the_flag(flag: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        spec = job(machine=MachineSpec(**{flag.removeprefix("--"): (taken.getsockname(),)}))
        with (
            contextlib.ExitStack() as held,
            pytest.raises(LaunchError, match=f"is taken.* or choose another port in {flag}"),
        ):
            reserve_node(spec, held)


def test_script_is_identified_by_its_bytes(tmp_path: Path) -> None:
    one, same, other = (tmp_path / name for name in ("1.py", "2.py", "3.py"))
    one.write_text("a")
    same.write_text("a")
    other.write_text("b")
    assert script_hash(job(str(one))) == script_hash(job(str(same))) != script_hash(job(str(other)))
    assert script_hash(job(str(tmp_path / "none"))) == "unreadable"
    assert script_hash(job("pkg.train", is_module=True)) == "pkg.train"


def test_facts_that_launchers_compare() -> None:
    spec = RendezvousSpec(master=("h", 1), min_nodes=2, max_nodes=3, rank=1)
    with contextlib.ExitStack() as held:
        node = with_shared_facts(reserve_node(job(), held)[0], job(max_restarts=4), spec)
    agreed = dict(node.agreed)
    assert agreed["the number of machines"] == "2:3"
    assert agreed["--max_restarts"] == "4"
    assert agreed["the torch version"] == version_of("torch") != "not installed"
    assert node.rank == 1


# -- A job of one machine, and the rule for restarts


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
