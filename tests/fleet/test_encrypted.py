# SPDX-License-Identifier: Apache-2.0
"""`FLEET_SSL`, as `fleetrun --ssl` sets it, encrypts a job with parameter servers."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.security.authority import Authority
from tests.workers import WorkerFailedError, reserved_port, run_processes

import fleetlight as fleet
from fleetlight.errors import MembershipError
from fleetlight.ps.messages import MetricsRequest
from fleetlight.ps.transport import SocketChannel
from fleetlight.security.certificates import make

pytestmark = pytest.mark.multiprocess


def train(kind: str, port: int, folder: str, more: dict[str, str] = {}) -> Any:  # noqa: B006
    """Runs the server or the worker; the worker returns the error of a client without TLS."""
    os.environ.update(
        FLEET_ROLE=kind,
        FLEET_INDEX="0",
        FLEET_WORKER_NUM="1",
        FLEET_SERVER_NUM="1",
        FLEET_SERVER_ENDPOINTS=f"127.0.0.1:{port}",
        FLEET_SSL=folder,
        **more,
    )
    fleet.init()
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model = fleet.distributed_model(model)
    optimizer = fleet.distributed_optimizer(optimizer)
    if fleet.is_server():
        fleet.init_server()
        fleet.run_server()
        return None
    fleet.init_worker()
    before = model.weight.detach().clone()
    model(torch.ones(4, 2)).sum().backward()
    optimizer.step()
    fleet.barrier_worker()
    error = refusal(port)
    moved = not torch.equal(before, model.weight)
    fleet.stop_worker()
    return moved, error


def refusal(port: int) -> str:
    channel = SocketChannel.connect(("127.0.0.1", port), "server 0", deadline_s=20.0)
    try:
        channel.call(MetricsRequest())
    except MembershipError as error:
        return str(error)
    finally:
        channel.close()
    return "it was let in"


def test_encrypted_job_trains_and_refuses_other_clients(tmp_path: Path) -> None:
    make(tmp_path / "certs")
    holder, port = reserved_port()
    with holder:
        each = [(kind, port, str(tmp_path / "certs")) for kind in ("server", "worker")]
        _, (moved, error) = run_processes(train, each)
    assert moved
    assert "accepts only clients with a certificate; give --ssl DIR" in error


@pytest.mark.gate
@pytest.mark.long
def test_encrypted_keys_and_revoked_certificates(tmp_path: Path) -> None:
    """In the second job the worker's certificate is revoked by the server's list."""
    authority = Authority(tmp_path / "certs", b"open sesame")
    (tmp_path / "words").write_text("open sesame\n")
    (tmp_path / "words").chmod(0o600)
    theirs = shutil.copytree(authority.folder, tmp_path / "theirs")
    more = {"FLEET_SSL_PASSWORD_FILE": str(tmp_path / "words")}
    for revoked in ((), ("client",)):
        (authority.folder / "crl.pem").write_text(authority.revoke(*revoked))
        folders = {"server": str(authority.folder), "worker": str(theirs)}
        holder, port = reserved_port()
        each = [(kind, port, folder, more) for kind, folder in folders.items()]
        with holder:
            if not revoked:
                assert run_processes(train, each)[1][0]
                continue
            with pytest.raises(WorkerFailedError, match=r"refuses .* it is revoked \(crl\.pem\)"):
                run_processes(train, each, deadline_s=5.0)
