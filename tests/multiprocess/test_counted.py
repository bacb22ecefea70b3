# SPDX-License-Identifier: Apache-2.0
"""Jobs that lose processes, stop and resume: every record counts once."""

import re
import shutil
from pathlib import Path

import pytest
from tests.launch.workplace import outcome
from tests.multiprocess.test_dialects import BIN, finish, start

from fleetlight import checkpoint

pytestmark = [pytest.mark.long, pytest.mark.multiprocess, pytest.mark.timeout(300)]

SCRIPT = str(Path(__file__).with_name("counted.py"))
TWO = "--server_num 2 --worker_num 2 --max_restarts 5 --checkpoint ckpt"


def run(folder: Path, flags: str, *arguments: str) -> tuple[int, str]:
    """The exit code and the output."""
    command = [str(BIN / "fleetrun"), *flags.split(), "--tee", SCRIPT, *arguments]
    codes, text = finish([start(command, cwd=folder)])
    return codes[0], text


def check_counts(text: str, workers: int) -> None:
    """Each of two epochs counts each record once, over all starts of the job."""
    assert re.findall(r"COUNTED (.*)", text) == ["2 to 2"] * workers, text


@pytest.mark.parametrize(
    ("mode", "first", "later"),
    [
        ("sync", ["1:2:step", "0:4:after"], ["0:8:after", "1:9:forward"]),
        ("async", ["1:2:step", "0:3:after"], ["1:8:step", "0:9:after"]),
    ],
)
def test_records_count_once_when_workers_die_around_a_stop(
    tmp_path: Path, mode: str, first: list[str], later: list[str]
) -> None:
    """With a shard queue, and with blocks."""
    options = ["--mode", mode, "--deal", "blocks" if mode == "sync" else "queue"]
    code, text = run(tmp_path, TWO, *options, "--die", *first, "--stop", "6")
    assert code == 75, text
    assert text.count("of 2 was killed by SIGKILL") == 2, text
    assert "restarting all processes" not in text
    flags = TWO.replace("worker_num 2", "worker_num 3") + " --resume"
    code, text = run(tmp_path, flags, *options, "--die", *later)
    assert code == 0, text
    assert text.count("of 3 was killed by SIGKILL") == 2, text
    # a restarted worker has nothing to load
    assert "saved at step 0" not in text
    check_counts(text, 3)


@pytest.mark.gate
def test_stop_within_an_epoch_resumes_with_the_remaining_records(tmp_path: Path) -> None:
    """Fewer or more workers resume."""
    stopped = tmp_path / "stopped"
    stopped.mkdir()
    options = ["--deal", "queue", "--durability", "none"]
    code, text = run(stopped, TWO, *options, "--stop", "4")
    assert code == 75, text
    zero = checkpoint.read(stopped / "ckpt").worker(0)
    assert zero is not None
    [position] = zero.values["loaders"]
    # two workers, four batches of four records
    assert position["consumed"] == 32
    for workers in (1, 3):
        folder = tmp_path / str(workers)
        shutil.copytree(stopped, folder)
        others = TWO.replace("server_num 2", "server_num 1").replace(
            "worker_num 2", f"worker_num {workers}"
        )
        code, text = run(folder, others + " --resume", *options)
        assert code == 0, text
        check_counts(text, workers)


def test_stop_waits_for_a_restarting_worker(tmp_path: Path) -> None:
    # the signal would end a restarted worker; it learns of the stop from the servers
    options = ["--mode", "sync"]
    code, text = run(tmp_path, TWO, *options, "--die", "1:4:forward", "--stop_within", "4")
    assert code == 75, text
    assert "worker 1 of 2 was killed by SIGKILL" in text
    # a server dies while the stop is saved
    code, text = run(tmp_path, TWO + " --resume", *options, "--stop", "8", "--kill_a_server")
    assert code == 75, text
    assert "server 0 of 2 was killed by SIGKILL" in text
    checkpoint.read(tmp_path / "ckpt").verify()
    code, text = run(tmp_path, TWO + " --resume", *options)
    assert code == 0, text
    check_counts(text, 2)


def test_asynchronous_stop_waits_for_a_restarting_worker(tmp_path: Path) -> None:
    # it learns of the stop from the reply to its first push
    options = ["--deal", "queue"]
    code, text = run(tmp_path, TWO, *options, "--die", "1:4:forward", "--stop_within", "4")
    assert code == 75, text
    assert "worker 1 of 2 was killed by SIGKILL" in text
    assert "still there" not in text
    code, text = run(tmp_path, TWO + " --resume", *options)
    assert code == 0, text
    check_counts(text, 2)


@pytest.mark.parametrize(("early", "step"), [(0, 24), (1, 4)])
def test_worker_that_waits_for_a_stopping_worker_stops_too(
    tmp_path: Path, early: int, step: int
) -> None:
    code, text = run(tmp_path, TWO, "--durability", "none", "--early", str(early))
    assert code == 75, text
    assert f"stopped at step {step}, saved in" in text
    assert "still there" not in text
    assert checkpoint.read(tmp_path / "ckpt").manifest.step == step


def test_restarted_server_names_a_port_in_use(tmp_path: Path) -> None:
    flags = "--server_num 2 --worker_num 2 --max_restarts 1"
    code, text = run(tmp_path, flags, "--mode", "sync", "--take_port", "4")
    assert code == 1, text
    last = outcome(text)
    assert "server 0 of 2 exited with code 1" in last, text
    assert re.search(r"cannot listen at 127\.0\.0\.1:\d+: Address already in use", last), text


@pytest.mark.parametrize("mode", ["sync", "async", "staleness", "geo"])
def test_restarted_server_with_an_older_folder_is_refused(tmp_path: Path, mode: str) -> None:
    """One worker: its pushes count exactly, also in GeoSGD."""
    flags = "--server_num 2 --worker_num 1 --max_restarts 2"
    code, text = run(tmp_path, flags, "--mode", mode, "--put_back")
    assert code == 0, text
    assert "server 0 of 2 was killed by SIGKILL" in text
    assert "this server restarted with an older state: it has acknowledged push" in text, text
    assert text.count("restarting all processes") == 1, text
    check_counts(text, 1)
