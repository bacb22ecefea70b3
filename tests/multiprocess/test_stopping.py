# SPDX-License-Identifier: Apache-2.0
"""Jobs of fleetrun stop and resume, or lose a worker and restart."""

import re
from pathlib import Path

import pytest
from tests.launch.workplace import outcome
from tests.multiprocess.test_dialects import BIN, finish, start

from fleetlight import checkpoint

pytestmark = [pytest.mark.long, pytest.mark.multiprocess, pytest.mark.timeout(180)]

SCRIPT = str(Path(__file__).with_name("interrupted.py"))
EPOCHS, RECORDS = 3, 96
ALL = sorted((epoch, record) for epoch in range(EPOCHS) for record in range(RECORDS))


def run(folder: Path, processes: str, *arguments: str) -> tuple[int, str, str]:
    """The exit code, the output, and its last line."""
    folder.mkdir(exist_ok=True)
    flags = [word for word in processes.split() if word]
    command = [str(BIN / "fleetrun"), *flags, "--tee", SCRIPT, *arguments]
    codes, text = finish([start(command, cwd=folder)])
    return codes[0], text, outcome(text)


def trained_values(text: str) -> set[str]:
    """The trained values that the workers printed."""
    # not to the end of the line: a line of the log may follow in it
    return set(re.findall(r"LEARNT (\w+ [\d.]+ \d+)", text))


def amounts(found: set[str]) -> list[float]:
    """The numbers after the digest, the same on all workers."""
    [line] = found
    return [float(word) for word in line.split()[1:]]


def seen(folder: Path, *restarts: int) -> list[tuple[int, int]]:
    """All records that a worker trained on in these starts of the job."""
    texts = [p.read_text() for restart in restarts for p in folder.glob(f"seen.*.{restart}")]
    return sorted(tuple(map(int, line.split())) for text in texts for line in text.splitlines())  # type: ignore[misc]


@pytest.mark.gate
def test_collective_job_stops_and_resumes(tmp_path: Path) -> None:
    two = "--nproc_per_node 2 --checkpoint ckpt"
    code, text, last = run(tmp_path, two, "--terminate", "10")
    assert code == 75, text
    step = checkpoint.read(tmp_path / "ckpt").manifest.step
    folder = tmp_path / "ckpt"
    assert last.startswith(f"fleetrun: stopped at step {step}, saved in {folder}; resume with"), (
        text
    )
    assert not trained_values(text)
    code, text, last = run(tmp_path, two.replace("2", "3") + " --resume")
    assert code == 0, text
    assert f"resuming from {folder}, saved at step {step}" in text
    assert last.startswith("fleetrun: done: all 3 workers"), text
    assert len(trained_values(text)) == 1
    assert seen(tmp_path, 0) == ALL


@pytest.mark.gate
@pytest.mark.parametrize("mode", ["sync", "async", "geo"])
def test_job_with_servers_resumes_with_other_numbers_of_processes(
    tmp_path: Path, mode: str
) -> None:
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
    assert len(trained_values(text)) == 1
    if mode == "sync":
        assert seen(tmp_path, 0) == ALL
        _, uninterrupted, _ = run(
            tmp_path / "uninterrupted", "--server_num 2 --worker_num 2", *both
        )
        # approximately, since sums have another order; exactly the steps of the scheduler
        assert amounts(trained_values(text)) == pytest.approx(
            amounts(trained_values(uninterrupted)), rel=1e-4
        )


@pytest.mark.gate
def test_collective_job_that_loses_a_worker_reaches_the_same_bits(tmp_path: Path) -> None:
    code, text, _ = run(tmp_path / "uninterrupted", "--nproc_per_node 2")
    assert code == 0, text
    expected = trained_values(text)
    folder = tmp_path / "killed"
    flags = "--nproc_per_node 2 --max_restarts 1 --checkpoint ckpt"
    code, text, _ = run(folder, flags, "--kill", "12")
    assert code == 0, text
    assert "worker 1 of 2 was killed by SIGKILL" in text
    found = re.search(r"resuming from .*, saved at step (\d+)", text)
    assert found is not None, text
    assert found[1] in ("5", "10")
    assert trained_values(text) == expected
    assert len(expected) == 1
    # each record after the checkpoint, once
    again = seen(folder, 1)
    assert len(again) == len(set(again)) == EPOCHS * RECORDS - int(found[1]) * 4


@pytest.mark.gate
def test_job_with_servers_that_loses_a_worker_resumes_from_a_delta(tmp_path: Path) -> None:
    servers = "--server_num 2 --worker_num 2"
    both = ("--mode", "sync", "--deltas")
    code, text, _ = run(tmp_path / "uninterrupted", servers, *both)
    assert code == 0, text
    expected = amounts(trained_values(text))
    folder = tmp_path / "killed"
    flags = f"{servers} --max_restarts 1 --checkpoint ckpt"
    code, text, _ = run(folder, flags, *both, "--kill", "18")
    assert code == 0, text
    found = re.search(r"resuming from .*, saved at step (\d+)", text)
    assert found is not None, text
    # the save at step 5 has all rows, those at 10 and 15 have what changed
    assert found[1] in ("10", "15"), text
    assert amounts(trained_values(text)) == pytest.approx(expected, rel=1e-4)
    again = seen(folder, 1)
    assert len(again) == len(set(again)) == EPOCHS * RECORDS - int(found[1]) * 4
    last = checkpoint.read(folder / "ckpt")
    last.verify()
    # servers that were started again cannot know what changed since that base
    assert last.base_location == "" or "generation-000001" not in last.base_location
