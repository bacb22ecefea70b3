# SPDX-License-Identifier: Apache-2.0
"""MindSpore's page on CPUs, line by line; `README.md` has a table of claims and tests."""

import contextlib
import io
import os
import runpy
import socket
import ssl
import sys
from pathlib import Path

import pytest
import torch
from tests import workers
from tests.ported.jobs import numbers, run
from tests.workers import reserved_port, run_processes

import fleetlight as fleet
from fleetlight.security.certificates import make

pytestmark = [pytest.mark.long, pytest.mark.multiprocess, pytest.mark.timeout(240)]
HERE = Path(__file__).parent


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Images in place of those of CIFAR-10."""
    draws = torch.Generator().manual_seed(1)
    labels = torch.randint(0, 10, (512,), generator=draws)
    colours = torch.rand(10, 3, 1, 1, generator=draws)
    images = colours[labels] + 0.05 * torch.randn(512, 3, 16, 16, generator=draws)
    pixels = (images.clamp(0, 1) * 255).to(torch.uint8).permute(0, 2, 3, 1)
    torch.save({"images": pixels, "labels": labels.to(torch.int32)}, tmp_path / "data.pt")
    return tmp_path


def shell_loop(data: Path, workers: int, started: int, **variables: object) -> list[str]:
    """Logs of the workers and, last, of the scheduler."""
    holder, port = reserved_port()
    numbers_ = {"WORKERS": workers, "STARTED": started, "PORT": port, "PYTHON": sys.executable}
    with holder:
        run(data, "bash", HERE / "run.sh", data, **numbers_, **variables)
    names = [*(f"worker_{n}" for n in range(started)), "scheduler"]
    return [(data / f"{name}.txt").read_text() for name in names]


def test_the_shell_loop_trains(data: Path) -> None:
    *workers, scheduler = shell_loop(data, 4, 4)
    assert sorted(int(numbers(r"rank (\d)", text)[0]) for text in workers) == [0, 1, 2, 3]
    for text in workers:
        losses = numbers(r"epoch: \d+ step: \d+, loss is ([\d.]+)", text)
        # 512 records in blocks of 4 x 32, twice
        assert len(losses) == 8
        assert losses[-1] < losses[0]
        assert "512 records in all" in text
    assert len({numbers(r"weights ([\d.]+)", text)[0] for text in workers}) == 1
    assert "loss is" not in scheduler


def test_too_few_workers_are_reported(data: Path) -> None:
    *workers, scheduler = shell_loop(data, 3, 2, FLEET_DEADLINE_S=15)
    for text in (*workers, scheduler):
        assert "loss is" not in text
    for text in workers:
        assert "the scheduler says: 2 of 3 workers joined within 15 s, 1 missing" in text
    assert "2 of 3 workers joined within 15 s, 1 missing" in scheduler


def tls_version(port: int) -> str | None:
    """The TLS version that a client without a certificate negotiates with the scheduler."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with socket.create_connection(("127.0.0.1", port), 10) as plain:
        return context.wrap_socket(plain).version()


def run_page_process(role: str, port: int, data: str, certificates: str) -> tuple[str, str | None]:
    """The output of the script in one process, and the scheduler's protocol after it."""
    for name in [name for name in os.environ if name.startswith("FLEET_")]:
        del os.environ[name]
    os.environ |= {"MS_WORKER_NUM": "8", "MS_SCHED_HOST": "127.0.0.1", "MS_SCHED_PORT": str(port)}
    os.environ |= {"MS_ROLE": role, "DATA_PATH": data, "CERTIFICATES": certificates}
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        try:
            runpy.run_path(str(HERE / "resnet_distributed_training.py"), run_name="__main__")
        except SystemExit as end:
            # the scheduler exits after all workers
            return printed.getvalue(), f"exit {end.code}"
    version = tls_version(port)
    fleet.stop_worker()
    return printed.getvalue(), version


def test_eight_workers_train_with_tls(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "LIMIT_S", 200.0)
    make(data / "certificates")
    holder, port = reserved_port()
    job = (port, str(data), str(data / "certificates"))
    with holder:
        found = run_processes(run_page_process, [("MS_SCHED", *job), *[("MS_WORKER", *job)] * 8])
    scheduler, *ranks = found
    assert scheduler == ("", "exit 0")
    assert sorted(numbers(r"rank (\d)", [text for text, _ in ranks])) == list(range(8))
    assert len({numbers(r"weights ([\d.]+)", text)[0] for text, _ in ranks}) == 1
    for text, version in ranks:
        # 512 records in blocks of 8 x 32, twice
        assert len(numbers(r"loss is ([\d.]+)", text)) == 4
        assert version == "TLSv1.3"
