# SPDX-License-Identifier: Apache-2.0
"""Jobs on Kubernetes through kubectl, whose place a program with a folder takes."""

import base64
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from fleetlight.cli import fleetlight as tool
from fleetlight.cli.fleetrun import main
from fleetlight.launch.backends.kubernetes.kubectl import refusal

Capture = pytest.CaptureFixture[str]

WORDS = ("--on", "kubernetes", "--option", "image=me/job", "--server_num", "1", "--worker_num", "2")
SAVES = ("--checkpoint", "ckpt", "--option", "checkpoint_claim=shared")
JOURNALS = ("--option", "journal_size=1Gi")
TOKEN = "3f9ac27e51d0b8463f9ac27e51d0b846"


class FakeCluster:
    """The folder in place of a cluster."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def objects(self) -> dict[str, dict[str, Any]]:
        files = self.folder.glob("*.*.json")
        return {file.name.split(".")[0]: json.loads(file.read_text()) for file in files}

    def asked(self) -> list[list[str]]:
        return [json.loads(line) for line in (self.folder / "asked").read_text().splitlines()]

    def refuse(self, start: str, text: str) -> None:
        (self.folder / "refuses").write_text(f"{start}|{text}\n")

    def show(self, kind: str, *items: Any) -> None:
        (self.folder / f"{kind}.json").write_text(json.dumps(items))


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeCluster:
    folder, programs = tmp_path / "cluster", tmp_path / "programs"
    folder.mkdir()
    programs.mkdir()
    program = programs / "kubectl"
    source = Path(__file__).with_name("fake_kubectl.py").read_text()
    program.write_text(source.replace("/usr/bin/env python3", sys.executable, 1))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(programs))
    monkeypatch.setenv("FAKE_CLUSTER", str(folder))
    monkeypatch.setenv("FLEET_TOKEN", TOKEN)
    monkeypatch.chdir(tmp_path)
    return FakeCluster(folder)


def submit(*words: str) -> None:
    assert main([*WORDS, *words, "train.py"]) == 0


def pod(role: str, index: int, made: int = 0, **status: Any) -> dict[str, Any]:
    """A pod as the cluster describes it."""
    return {
        "metadata": {
            "name": f"train-{role}-0-{index}-{made}",
            "creationTimestamp": f"2026-01-01T00:00:0{made}Z",
            "labels": {"jobset.sigs.k8s.io/replicatedjob-name": role},
            "annotations": {"batch.kubernetes.io/job-completion-index": str(index)},
        },
        "spec": {"nodeName": f"n{index}"} if status else {},
        "status": {"phase": "Running", **status},
    }


def test_submitting_creates_the_objects(cluster: FakeCluster, capfd: Capture) -> None:
    submit(*JOURNALS)
    assert (
        "submitted kubernetes:train; see fleetlight ps kubernetes:train" in capfd.readouterr().out
    )
    found = cluster.objects()
    assert set(found) == {"jobset", "secret", "persistentvolumeclaim"}
    assert base64.b64decode(found["secret"]["data"]["token"]).decode() == TOKEN
    [owner] = found["secret"]["metadata"]["ownerReferences"]
    assert (owner["kind"], owner["name"], owner["uid"]) == ("JobSet", "train", "1-2-3")
    # other users see the arguments of a process
    assert TOKEN not in json.dumps(cluster.asked())
    assert base64.b64encode(TOKEN.encode()).decode() not in json.dumps(cluster.asked())


def test_a_token_is_made_where_none_is_given(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch, capfd: Capture
) -> None:
    monkeypatch.delenv("FLEET_TOKEN")
    submit()
    assert len(base64.b64decode(cluster.objects()["secret"]["data"]["token"])) == 64
    assert "can join" not in capfd.readouterr().out


def test_namespace_is_a_part_of_the_id(cluster: FakeCluster, capfd: Capture) -> None:
    submit("--option", "namespace=team")
    assert "submitted kubernetes:team/train" in capfd.readouterr().out
    assert tool.main(["stop", "kubernetes:team/train"]) == 0
    assert all(words[:2] == ["--namespace", "team"] for words in cluster.asked())
    assert not cluster.objects()


@pytest.mark.parametrize(
    ("start", "text", "message"),
    [
        ("create", 'error: no matches for kind "JobSet" in version "x"', "install it: kubectl"),
        ("create", "Error from server (Forbidden): exceeded quota: small", "ask for less"),
        ("create", "Error from server (Forbidden):\n  no", "ask the owner of the namespace"),
        ("create", "The connection to the server localhost:8080 was refused", "choose a cluster"),
    ],
)
def test_refusals_are_passed_on_in_a_line(
    start: str, text: str, message: str, cluster: FakeCluster, capfd: Capture
) -> None:
    cluster.refuse(start, text.splitlines()[0])
    assert main([*WORDS, "train.py"]) == 1
    [line] = capfd.readouterr().err.splitlines()
    assert text.splitlines()[0] in line
    assert message in line


def test_a_job_without_its_secret_is_taken_back(cluster: FakeCluster, capfd: Capture) -> None:
    cluster.refuse('"Secret"', "Error from server (Forbidden): secrets is forbidden")
    assert main([*WORDS, "train.py"]) == 1
    assert "secrets is forbidden" in capfd.readouterr().err
    assert not cluster.objects()


def test_a_second_job_of_a_name_is_refused(cluster: FakeCluster, capfd: Capture) -> None:
    submit()
    assert main([*WORDS, "train.py"]) == 1
    assert "AlreadyExists" in (text := capfd.readouterr().err)
    assert "give this one another --name" in text
    # the first job keeps its secret
    assert set(cluster.objects()) == {"jobset", "secret"}


def test_missing_kubectl_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: Capture
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main([*WORDS, "train.py"]) == 2
    assert "needs kubectl, which is not on PATH; install it" in capfd.readouterr().err


def test_ps_shows_pods_and_what_they_wait_for(cluster: FakeCluster, capfd: Capture) -> None:
    submit()
    waiting = {"reason": "ImagePullBackOff", "message": 'Back-off pulling "me/job"'}
    full = {"type": "PodScheduled", "status": "False", "message": "0/3 nodes: no GPU"}
    error = json.dumps({"error": "DataError: no such file", "time": 1})
    ended = {"exitCode": 78, "reason": "Error", "message": error}
    killed = {"exitCode": 137, "reason": "OOMKilled"}
    cluster.show(
        "pods",
        pod("worker", 1, containerStatuses=[{"state": {"waiting": waiting}}]),
        pod("worker", 0, phase="Pending", conditions=[full]),
        pod("server", 0, 1, phase="Running"),
        pod("server", 0, 0, phase="Failed", containerStatuses=[{"state": {"terminated": killed}}]),
        pod("worker", 2, phase="Failed", containerStatuses=[{"state": {"terminated": ended}}]),
    )
    capfd.readouterr()
    assert tool.main(["ps", "kubernetes:train"]) == 0
    lines = [line.split(None, 2) for line in capfd.readouterr().out.splitlines()]
    shown = {" ".join(line[:2]): line[2:] for line in lines}
    assert list(shown)[1:] == ["job Active", "server 0", "worker 0", "worker 1", "worker 2"]
    assert shown["server 0"][0].split(None, 2) == ["Running", "n0", "replaced once"]
    assert shown["worker 0"][0].split(None, 2) == ["Pending", "n0", "0/3 nodes: no GPU"]
    assert "ImagePullBackOff" in shown["worker 1"][0]
    assert 'Back-off pulling "me/job"' in shown["worker 1"][0]
    assert "exit code 78: DataError: no such file" in shown["worker 2"][0]


def test_ps_shows_why_there_are_no_pods(cluster: FakeCluster, capfd: Capture) -> None:
    submit()
    about = {"kind": "Job", "name": "train-worker-0"}
    other = {"kind": "Job", "name": "other-worker-0"}
    cluster.show(
        "events",
        {"involvedObject": about, "lastTimestamp": "1", "message": "exceeded quota: small"},
        {"involvedObject": other, "lastTimestamp": "2", "message": "of another job"},
    )
    assert tool.main(["ps", "kubernetes:train"]) == 0
    assert "Active" in (shown := capfd.readouterr().out)
    assert "exceeded quota: small" in shown
    assert "another" not in shown
    file = cluster.folder / "jobset.train.json"
    jobset = json.loads(file.read_text())
    file.write_text(json.dumps(jobset | {"spec": jobset["spec"] | {"suspend": True}}))
    assert tool.main(["ps", "kubernetes:train"]) == 0
    assert "waits in a queue" in capfd.readouterr().out
    condition = {"type": "Failed", "status": "True", "message": "a job failed"}
    status = {"terminalState": "Failed", "restarts": 2, "conditions": [condition]}
    file.write_text(json.dumps(jobset | {"status": status}))
    assert tool.main(["ps", "kubernetes:train"]) == 0
    assert "a job failed; restarted 2 times" in capfd.readouterr().out


def test_logs_are_those_of_all_pods_or_of_one(cluster: FakeCluster, capfd: Capture) -> None:
    submit()
    cluster.show("pods", pod("worker", 0), pod("worker", 1, 1), pod("worker", 1, 0))
    capfd.readouterr()
    assert tool.main(["logs", "kubernetes:train"]) == 0
    assert capfd.readouterr().out.splitlines() == [
        "[worker 0] printed by train-worker-0-0-0",
        "[worker 1] printed by train-worker-0-1-0",
        "[worker 1] printed by train-worker-0-1-1",
    ]
    assert tool.main(["logs", "kubernetes:train", "worker", "0"]) == 0
    assert capfd.readouterr().out == "printed by train-worker-0-0-0\n"
    assert tool.main(["logs", "kubernetes:train", "worker", "7"]) == 1
    assert "expected one of the job's: worker 0, worker 1" in capfd.readouterr().err


def test_scaling_ends_the_job_and_resumes_it(cluster: FakeCluster, capfd: Capture) -> None:
    submit(*SAVES, *JOURNALS)
    assert tool.main(["scale", "kubernetes:train", "--worker_num", "5"]) == 0
    assert "scaling: kubernetes:train" in capfd.readouterr().out
    [deleted] = [words for words in cluster.asked() if "delete" in words]
    # the pods of the first job end before those of the second begin
    assert {"--wait=true", "--cascade=foreground", "--timeout=150s"} <= set(deleted)
    found = cluster.objects()
    [_, workers] = found["jobset"]["spec"]["replicatedJobs"]
    assert workers["template"]["spec"]["completions"] == 5
    # the same token: it is not shown, and not made again
    assert base64.b64decode(found["secret"]["data"]["token"]).decode() == TOKEN
    assert "ownerReferences" in found["secret"]["metadata"]


def test_a_job_that_saves_nothing_is_not_scaled(cluster: FakeCluster, capfd: Capture) -> None:
    submit()
    assert tool.main(["scale", "kubernetes:train", "--worker_num", "5"]) == 1
    assert "kubernetes:train has no checkpoint folder" in capfd.readouterr().err
    assert not [words for words in cluster.asked() if "delete" in words]


@pytest.mark.parametrize("command", ["ps", "logs", "stop"])
def test_unknown_jobs_are_refused(command: str, cluster: FakeCluster, capfd: Capture) -> None:
    if command == "stop":
        cluster.refuse("delete", 'Error from server (NotFound): jobsets "x" not found')
    assert tool.main([command, "kubernetes:x"]) == 1
    assert "fleetlight ps lists a job by the name" in capfd.readouterr().err


def test_refusal_is_one_sentence_without_the_lines_of_a_library() -> None:
    line = 'E1127 05:45:21.641549 31876 memcache.go:265] "Unhandled Error" err="refused"\n'
    last = "The connection to the server localhost:8080 was refused - did you specify it?"
    assert refusal(("get", "jobset"), f"{line}{line}{last}\n") == (
        f"kubectl get jobset: {last}; choose a cluster: kubectl config use-context NAME"
    )
    unknown = 'Error from server (NotFound): jobsets.jobset.x-k8s.io "x" not found'
    assert refusal(("get", "jobset"), unknown).startswith("the cluster has no job x in this")
