# SPDX-License-Identifier: Apache-2.0
"""The rendezvous state is JSON: a pickle in the store is refused, never loaded."""

import base64
import contextlib
import os
import pickle
import threading
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetlight.errors import MembershipError
from fleetlight.launch.job.spec import RendezvousSpec
from fleetlight.launch.machines import store
from fleetlight.launch.machines.rendezvous_state import JsonBackend, from_json, to_json
from fleetlight.launch.machines.store import Rendezvous, Store
from fleetlight.launch.processes.ports import Reservation

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
