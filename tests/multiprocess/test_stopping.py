# SPDX-License-Identifier: Apache-2.0
"""Jobs of fleetrun are stopped and go on, or lose a worker and go on by themselves."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.multiprocess.test_dialects import BIN, finish, start

from fleetlight import checkpoint

pytestmark = [pytest.mark.long, pytest.mark.multiprocess, pytest.mark.timeout(180)]

SCRIPT = str(Path(__file__).with_name("interrupted.py"))
EPOCHS, RECORDS = 3, 96
ALL = sorted((epoch, record) for epoch in range(EPOCHS) for record in range(RECORDS))


def run(folder: Path, processes: str, *arguments: str) -> tuple[int, str, str]:
    """Exit code, what was said, and the last line of it."""
    folder.mkdir(exist_ok=True)
    flags = [word for word in processes.split() if word]
    command = [str(BIN / "fleetrun"), *flags, "--tee", SCRIPT, *arguments]
    codes, text = finish([start(command, cwd=folder)])
    return codes[0], text, text.strip().splitlines()[-1]


def learnt(text: str) -> set[str]:
    """What the workers have learnt in the end."""
    # not to the end of the line: a line of the log may come before it
    return set(re.findall(r"LEARNT (\w+ [\d.]+ \d+)", text))


def amounts(found: set[str]) -> list[float]:
    """The numbers behind the digest, which are the same on all workers."""
    [one] = found
    return [float(word) for word in one.split()[1:]]


def seen(folder: Path, *lives: int) -> list[tuple[int, int]]:
    """Every record that a worker has trained on in these starts of the job."""
    texts = [p.read_text() for life in lives for p in folder.glob(f"seen.*.{life}")]
    return sorted(tuple(map(int, line.split())) for text in texts for line in text.splitlines())  # type: ignore[misc]


def test_a_collective_job_stops_and_goes_on(tmp_path: Path) -> None:
    two = "--nproc_per_node 2 --checkpoint ckpt"
    code, text, last = run(tmp_path, two, "--terminate", "10")
    assert code == 75, text
    step = checkpoint.read(tmp_path / "ckpt").manifest.step
    folder = tmp_path / "ckpt"
    assert last.startswith(f"fleetrun: stopped at step {step}, saved in {folder}; resume with"), (
        text
    )
    assert not learnt(text)
    code, text, last = run(tmp_path, two.replace("2", "3") + " --resume")
    assert code == 0, text
    assert f"resuming from {folder}, saved at step {step}" in text
    assert last.startswith("fleetrun: done: all 3 workers"), text
    assert len(learnt(text)) == 1
    assert seen(tmp_path, 0) == ALL


@pytest.mark.parametrize("mode", ["sync", "async", "geo"])
def test_a_job_with_servers_stops_and_goes_on_with_others(tmp_path: Path, mode: str) -> None:
    both = ("--mode", mode, "--batch", "3")
    flags = "--server_num 2 --worker_num 2 --checkpoint ckpt"
    code, text, last = run(tmp_path, flags, *both, "--terminate", "10")
    assert code == 75, text
    assert last.startswith("fleetrun: stopped at step "), text
    checkpoint.read(tmp_path / "ckpt").verify()
    flags = "--server_num 1 --worker_num 3 --checkpoint ckpt --resume"
    code, text, last = run(tmp_path, flags, *both[:2], "--batch", "2")
    assert code == 0, text
    assert last.endswith("servers ended by themselves"), text
    assert len(learnt(text)) == 1
    if mode == "sync":
        assert seen(tmp_path, 0) == ALL
        _, unharmed, _ = run(tmp_path / "unharmed", "--server_num 2 --worker_num 2", *both)
        # the amount of it, since sums have another order, and the steps of the scheduler
        assert amounts(learnt(text)) == pytest.approx(amounts(learnt(unharmed)), rel=1e-4)


def test_a_collective_job_that_loses_a_worker_learns_the_same_bits(tmp_path: Path) -> None:
    code, text, _ = run(tmp_path / "unharmed", "--nproc_per_node 2")
    assert code == 0, text
    expected = learnt(text)
    folder = tmp_path / "killed"
    flags = "--nproc_per_node 2 --max_restarts 1 --checkpoint ckpt"
    code, text, _ = run(folder, flags, "--kill", "12")
    assert code == 0, text
    assert "worker 1 of 2 was killed by SIGKILL" in text
    found = re.search(r"resuming from .*, saved at step (\d+)", text)
    assert found is not None, text
    assert found[1] in ("5", "10")
    assert learnt(text) == expected
    assert len(expected) == 1
    # from the checkpoint on, and each once
    again = seen(folder, 1)
    assert len(again) == len(set(again)) == EPOCHS * RECORDS - int(found[1]) * 4
