# SPDX-License-Identifier: Apache-2.0
"""A collective job between hosts with `ssl` equals a plain one and sends nothing readable."""

import contextlib
import os
import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rig.hosts import Rig, hosts
from tests.rig.needed import NEEDED, run_on
from tests.workers import WorkerFailedError
from torch import nn

import fleetlight as fleet
from fleetlight.security.certificates import make
from fleetlight.security.context import client_context

pytestmark = NEEDED

#: a float32 whose four bytes, repeated eight times, occur in no other traffic
MARK = 1234.5678
TRACE = struct.pack("<f", MARK) * 8
_EVERY_PROTOCOL = 3


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    with hosts(2) as made:
        yield made


def certificates(rig: Rig, folder: Path) -> Path:
    make(folder, [host.address for host in rig.hosts])
    return folder


class Eavesdropper:
    """Reads every packet that leaves or reaches this host."""

    def __init__(self) -> None:
        self._socket = socket.socket(
            socket.AF_PACKET, socket.SOCK_RAW, socket.ntohs(_EVERY_PROTOCOL)
        )
        self._socket.settimeout(0.2)
        self._data = bytearray()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._listen)
        self._thread.start()

    def captured(self) -> bytes:
        """All captured bytes."""
        self._stop.set()
        self._thread.join()
        self._socket.setblocking(False)
        # the thread may have stopped before it read the last packets
        with contextlib.suppress(BlockingIOError):
            while True:
                self._data += self._socket.recv(1 << 16)
        self._socket.close()
        return bytes(self._data)

    def _listen(self) -> None:
        while not self._stop.is_set():
            try:
                self._data += self._socket.recv(1 << 16)
            except TimeoutError:
                continue


def trained(steps: int = 3) -> dict[str, Any]:
    """Parameters after some steps, and whether an eavesdropper saw a reduced tensor."""
    torch.manual_seed(0)
    listener = Eavesdropper()
    model = fleet.distributed_model(nn.Sequential(nn.Linear(20, 50), nn.ReLU(), nn.Linear(50, 3)))
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    for step in range(steps):
        data = torch.randn(8, 20, generator=torch.Generator().manual_seed(step))
        model(data[fleet.worker_index() :: fleet.worker_num()]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    fleet.all_reduce(torch.full((64,), MARK))
    return {
        "values": torch.cat([p.detach().flatten() for p in model.parameters()]),
        "readable": TRACE in listener.captured(),
        "groups": fleet.all_gather(fleet.worker_index()),
    }


@pytest.mark.parametrize("places", [(0, 1), (0, 0, 1, 1)])
def test_encrypted_job_is_as_a_plain_one(rig: Rig, tmp_path: Path, places: tuple[int, ...]) -> None:
    plain = run_on(rig, places, trained)
    folder = certificates(rig, tmp_path / "certs")
    inside = run_on(rig, places, trained, env={"FLEET_SSL": str(folder)})
    assert all(one["readable"] for one in plain)
    assert not any(one["readable"] for one in inside)
    for one in inside:
        assert torch.equal(one["values"], inside[0]["values"])
        torch.testing.assert_close(one["values"], plain[0]["values"], rtol=1e-5, atol=1e-6)
        assert one["groups"] == list(range(len(places)))


def joined() -> bool:
    return True


def test_worker_with_certificates_of_another_job_is_refused(rig: Rig, tmp_path: Path) -> None:
    ours, theirs = certificates(rig, tmp_path / "ours"), certificates(rig, tmp_path / "theirs")
    with pytest.raises(WorkerFailedError, match="another CA signed the certificate"):
        run_on(
            rig,
            (0, 1),
            joined,
            env=lambda index: {"FLEET_SSL": str((ours, theirs)[index])},
            deadline_s=5.0,
        )


def test_every_port_that_other_hosts_reach_speaks_tls(rig: Rig, tmp_path: Path) -> None:
    folder = certificates(rig, tmp_path / "certs")
    first, second = run_on(rig, (0, 1), versions, env={"FLEET_SSL": str(folder)})
    # the store, and each worker's own port
    assert (first, second) == (["TLSv1.3", "TLSv1.3"], ["TLSv1.3"])


def versions() -> list[str | None]:
    """The TLS versions of this host's external ports; a port without TLS is an error."""
    tls, found = client_context(os.environ["FLEET_SSL"]), []
    for port in listening_elsewhere():
        caller = socket.create_connection((own_address(), port), 5.0)
        with tls.wrap_socket(caller, server_hostname=own_address()) as connected:
            found.append(connected.version())
    fleet.barrier_worker()
    return found


def own_address() -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((os.environ["FLEET_MASTER"].partition(":")[0], 9))
        return str(probe.getsockname()[0])


def listening_elsewhere() -> list[int]:
    """The TCP ports of this host outside the loopback."""
    found = []
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        _, local, _, state, *_ = line.split()
        address, port = local.split(":")
        if state == "0A" and not address.endswith("7F"):
            found.append(int(port, 16))
    return found
