# SPDX-License-Identifier: Apache-2.0
"""Jobs whose servers and workers die during training reach the same result."""

import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.launch.workplace import outcome, wait_until
from tests.multiprocess.test_dialects import BIN, finish, start

from fleetlight import checkpoint
from fleetlight.launch.exit_codes import PERMANENT

pytestmark = [pytest.mark.long, pytest.mark.multiprocess, pytest.mark.timeout(180)]

SCRIPT = str(Path(__file__).with_name("outlive.py"))


def trained_values(
    folder: Path, *arguments: str, restarts: int = 0, flags: Sequence[str] = ()
) -> tuple[set[str], set[str], str]:
    """The trained values of each worker of a job with two servers, and the output."""
    folder.mkdir()
    job = ["--server_num", "2", "--worker_num", "2", "--max_restarts", str(restarts), "--tee"]
    job += flags
    codes, text = finish([start([str(BIN / "fleetrun"), *job, SCRIPT, *arguments], cwd=folder)])
    assert codes == [0], text
    found = re.findall(r"LEARNT (\w+) \S+ OWN (\w+)", text)
    assert len(found) == (1 if "--go_on" in arguments else 2), text
    return {shared for shared, _ in found}, {own for _, own in found}, text


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> tuple[set[str], set[str]]:
    """The values that the same job reaches without a failure."""
    shared, own, _ = trained_values(tmp_path_factory.mktemp("quiet") / "uninterrupted")
    assert len(shared) == 1
    return shared, own


@pytest.mark.gate
def test_killed_sync_job_reaches_the_same_bits(
    tmp_path: Path, uninterrupted: tuple[set[str], set[str]]
) -> None:
    """Clipping spans all servers, so a process may die between the two halves of a step."""
    killed, own, text = trained_values(tmp_path / "killed", "--kill", "2", "5", "6", restarts=9)
    assert (killed, own) == uninterrupted
    for number, left in ((0, 8), (1, 7), (0, 6)):
        assert f"server {number} of 2 was killed by SIGKILL" in text
        assert f"{left} left), the others continue" in text
    died, own, text = trained_values(
        tmp_path / "died",
        "--die",
        *("0:1:forward", "1:2:clip", "0:3:step", "1:3:told", "1:6:after", "0:0:epoch"),
        restarts=9,
    )
    assert (died, own) == uninterrupted
    assert text.count("of 2 was killed by SIGKILL") == 6
    assert "restarting all processes" not in text


@pytest.mark.gate
def test_other_workers_continue_without_a_lost_worker(tmp_path: Path) -> None:
    _, _, text = trained_values(tmp_path / "lost", "--go_on", "--die", "1:3:clip")
    assert "worker 1 of 2 was killed by SIGKILL" in text
    assert "the others continue without it" in text
    assert "done: all workers but worker 1 exited with code 0" in text


def test_restarted_worker_saves_with_the_others(
    tmp_path: Path, uninterrupted: tuple[set[str], set[str]]
) -> None:
    """It died in a step after which all workers save."""
    dying = ("1:3:made", "0:6:held", "1:8:made")
    killed, own, text = trained_values(
        tmp_path / "killed",
        *("--save", "3", "6", "8", "--die", *dying),
        restarts=9,
        flags=["--checkpoint", "ckpt"],
    )
    assert (killed, own) == uninterrupted
    assert text.count("of 2 was killed by SIGKILL") == 3
    assert checkpoint.read(tmp_path / "killed" / "ckpt").manifest.step == 9


@pytest.mark.gate
def test_save_waits_for_the_restart_of_a_server(
    tmp_path: Path, uninterrupted: tuple[set[str], set[str]]
) -> None:
    killed, own, text = trained_values(tmp_path / "killed", "--die_saving", restarts=9)
    assert (killed, own) == uninterrupted
    assert text.count("server 1 of 2 was killed by SIGKILL") == 1
    assert "restarting the save into ckpt: lost server 1" in text
    saved = checkpoint.read(tmp_path / "killed" / "ckpt")
    saved.verify()
    assert saved.manifest.step == 10


@pytest.mark.gate
@pytest.mark.parametrize("resume", ["1", "auto"])
def test_resumed_job_has_the_state_of_its_servers(tmp_path: Path, resume: str) -> None:
    """Dense values and rows on the servers replace the first values of the script."""

    def run(resume: str, *arguments: str) -> tuple[int, set[str], set[str]]:
        job = ["--server_num", "2", "--worker_num", "2", "--tee"]
        script = str(Path(__file__).with_name("resumed.py"))
        command = [str(BIN / "fleetrun"), *job, script, *arguments]
        [code], text = finish([start(command, {"FLEET_RESUME": resume}, cwd=tmp_path)])
        began, trained = (re.findall(rf"{word} (\w+)", text) for word in ("BEGAN", "LEARNT"))
        assert len(began) == len(trained) == 2, text
        return code, set(began), set(trained)

    # a job that may begin does so where nothing is saved
    code, began, died_with = run("auto" if resume == "auto" else "", "--die")
    assert code != 0
    assert len(died_with) == 1
    assert began != died_with
    code, began, ended_with = run(resume)
    assert code == 0
    assert began == died_with
    assert ended_with != died_with
    if resume == "auto":
        # that job has ended well, so another one begins and can be resumed in turn
        code, began, died_with = run("auto", "--die")
        assert began != ended_with
        assert run("auto")[1] == died_with


def test_two_jobs_cannot_share_a_folder(tmp_path: Path) -> None:
    script = str(Path(__file__).with_name("resumed.py"))
    flags = ["--server_num", "1", "--worker_num", "1", "--max_restarts", "3"]
    command = [str(BIN / "fleetrun"), *flags, script]
    first = start([*command, "--wait"], cwd=tmp_path)
    try:
        waiting = tmp_path / "waiting"
        wait_until(lambda: waiting.exists() or first.poll() is not None, "the first job to train")
        [code], text = finish([start(command, cwd=tmp_path)])
        assert code == PERMANENT, text
        last = outcome(text)
        assert last.startswith("fleetrun: failed: "), text
        assert re.search(r"in use by another process \(process \d+ on .+\); give each", last), text
        # a restart would be refused again
        assert "restart 1" not in text
        (tmp_path / "go").touch()
        [code], text = finish([first])
        assert code == 0, text
        assert text.count("LEARNT") == 1, text
    finally:
        if first.poll() is None:
            first.terminate()
            first.communicate(timeout=60)
