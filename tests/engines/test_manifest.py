# SPDX-License-Identifier: Apache-2.0
"""The objects of a job on Kubernetes, as `--print` shows them."""

import copy
import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
from tests.engines import documents, schema

from fleetlight.cli.fleetrun import main
from fleetlight.launch.backends.kubernetes.engine import rescaled
from fleetlight.launch.backends.kubernetes.settings import ClusterSettings
from fleetlight.launch.backends.kubernetes.text import dump

IMAGE = ("--option", "image=registry/job:1")
SERVED = ("--server_num", "2", "--worker_num", "3")
SAVES = ("--checkpoint", "here/ckpt", "--option", "checkpoint_claim=shared")
JOURNALS = ("--option", "journal_size=10Gi", "--max_restarts", "4")
CERTIFICATES = ("ca.pem", "client.key", "client.pem", "server.key", "server.pem")


@pytest.fixture
def emitted(capfd: pytest.CaptureFixture[str]) -> Any:
    def emit(*words: str) -> list[dict[str, Any]]:
        code = main(["--on", "kubernetes", *IMAGE, *words, "--print", "train.py", "--lr", "3"])
        shown = capfd.readouterr()
        assert code == 0, shown.err
        return documents.read(shown.out)

    return emit


def test_a_job_that_saves_under_a_url_needs_no_claim(emitted: Any) -> None:
    text = str(emitted("--checkpoint", "s3://bucket/run"))
    assert "{'name': 'FLEET_CHECKPOINT', 'value': 's3://bucket/run'}" in text
    assert "'mountPath': '/checkpoint'" not in text


def one_of_kind(found: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    [one] = [one for one in found if one["kind"] == kind]
    return one


def jobs(jobset: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {one["name"]: one["template"]["spec"] for one in jobset["spec"]["replicatedJobs"]}


def pod(job: dict[str, Any]) -> dict[str, Any]:
    spec = job["template"]["spec"]
    assert isinstance(spec, dict)
    return spec


def variables(job: dict[str, Any]) -> dict[str, str]:
    [container] = pod(job)["containers"]
    named = [entry["name"] for entry in container["env"]]
    assert len(named) == len(set(named))
    return {
        entry["name"]: entry.get("value") or str(next(iter(entry["valueFrom"].values())))
        for entry in container["env"]
    }


def refused(capfd: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["--on", "kubernetes", *words, "--print", "train.py"]) == 2
    return capfd.readouterr().err


EVERYTHING = (
    *(*SERVED, *SAVES, *JOURNALS, "--gpus", "0,1,2", "--worker_memory", "4G", "--env", "A=b"),
    *("--option", "namespace=team", "--option", "service_account=trainer"),
    *("--option", "node_selector=pool=big,zone=a", "--option", "tolerate=nvidia.com/gpu"),
    *("--option", "queue=default", "--option", "priority_class=low", "--option", "ttl=600"),
    *("--option", "pull_secret=registry", "--option", "storage_class=nfs", "--option", "user=7"),
    *("--option", "mount=data:/data:ro,out:/out", "--option", "read_only_root=false"),
)


@pytest.mark.parametrize(
    "words", [(), ("--nproc_per_node", "4"), SERVED, (*SERVED, *JOURNALS), EVERYTHING]
)
def test_jobset_has_only_fields_of_its_schema(words: tuple[str, ...], emitted: Any) -> None:
    jobset = one_of_kind(emitted(*words), "JobSet")
    assert list(schema.problems(jobset, schema.JOBSET)) == []
    assert jobset["apiVersion"] == "jobset.x-k8s.io/v1alpha2"


def test_schema_refuses_mistakes(emitted: Any) -> None:
    def found(change: Any) -> list[str]:
        wrong = copy.deepcopy(jobset)
        change(wrong["spec"]["replicatedJobs"][0]["template"]["spec"])
        return list(schema.problems(wrong, schema.JOBSET))

    jobset = one_of_kind(emitted(*SERVED), "JobSet")
    assert "is unknown" in found(lambda job: job.update(backOffLimit=1))[0]
    assert "expected integer" in found(lambda job: job.update(completions="2"))[0]
    assert "is missing" in found(lambda job: pod(job)["containers"][0].pop("name"))[0]


def test_written_yaml_is_that_of_a_library(emitted: Any) -> None:
    yaml = pytest.importorskip("yaml")
    odd = [{"on": {"a b": ["", "x: y", [], {}, [1, [2.5]], None, True, 'q"\\\n']}, "n": -1}]
    for one in (odd, emitted(*EVERYTHING)):
        assert list(yaml.safe_load_all(dump(one))) == documents.read(dump(one)) == one


def test_processes_know_who_they_are(emitted: Any) -> None:
    found = jobs(one_of_kind(emitted(*EVERYTHING), "JobSet"))
    assert {name: job["completions"] for name, job in found.items()} == {"server": 2, "worker": 3}
    for name, job in found.items():
        assert job["completionMode"] == "Indexed"
        assert job["parallelism"] == job["completions"]
        known = variables(job)
        assert known["FLEET_ROLE"] == name
        assert "job-completion-index" in known["FLEET_INDEX"]
        assert (known["FLEET_WORKER_NUM"], known["FLEET_SERVER_NUM"]) == ("3", "2")
        assert known["FLEET_MASTER"] == (
            "$(K8S_JOBSET)-server-0-0.$(K8S_JOBSET).$(K8S_NAMESPACE).svc.cluster.local:6170"
        )
        # a variable refers only to those before it
        names = list(known)
        for position, value in enumerate(known.values()):
            assert set(re.findall(r"\$\((\w+)\)", value)) <= set(names[:position])
        assert "uid" in known["K8S_JOBSET_UID"]
        assert "$(K8S_JOBSET_UID)" in known["FLEET_JOB"]
        assert known["FLEET_CHECKPOINT"] == "/checkpoint/ckpt"
        assert known["A"] == "b"
        [container] = pod(job)["containers"]
        command = ["fleetlight", "member", "--", "python", "train.py", "--lr", "3"]
        assert container["command"] == command
    assert variables(found["worker"])["FLEET_DEVICE"] == "0"
    assert "FLEET_DEVICE" not in variables(found["server"])


def test_a_collective_job_meets_at_worker_0(emitted: Any) -> None:
    found = jobs(one_of_kind(emitted("--nproc_per_node", "4"), "JobSet"))
    assert list(found) == ["worker"]
    assert variables(found["worker"])["FLEET_MASTER"].startswith("$(K8S_JOBSET)-worker-0-0.")
    assert "FLEET_SERVER_NUM" not in variables(found["worker"])


def test_killed_pods_return_alone_if_their_journal_does(emitted: Any) -> None:
    found = emitted(*SERVED, *JOURNALS)
    claim = one_of_kind(found, "PersistentVolumeClaim")
    assert claim["spec"]["resources"]["requests"]["storage"] == "10Gi"
    for job in jobs(one_of_kind(found, "JobSet")).values():
        assert (job["backoffLimitPerIndex"], job["maxFailedIndexes"]) == (4, 0)
        ends, eviction, own_error = job["podFailurePolicy"]["rules"]
        assert (ends["action"], ends["onExitCodes"]["values"]) == ("FailJob", [75, 78, 126, 127])
        assert eviction["action"] == "Ignore"
        assert own_error["onExitCodes"]["operator"] == "NotIn"
        # killed processes, and those that failed with a peer, count
        assert {69, 137, 143} <= set(own_error["onExitCodes"]["values"])
        [mount] = [m for m in pod(job)["containers"][0]["volumeMounts"] if m["name"] == "journal"]
        assert (mount["mountPath"], mount["subPath"]) == ("/job/durability", "2-servers-3-workers")
        [volume] = [v for v in pod(job)["volumes"] if v["name"] == "journal"]
        assert volume["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
        assert variables(job)["FLEET_MAX_RESTARTS"] == "4"


def test_without_journals_the_job_restarts_as_a_whole(emitted: Any) -> None:
    found = emitted(*SERVED, "--max_restarts", "4")
    jobset = one_of_kind(found, "JobSet")
    assert jobset["spec"]["failurePolicy"]["maxRestarts"] == 4
    for job in jobs(jobset).values():
        # one process fails first; the others may end with it
        assert job["backoffLimit"] == job["completions"] - 1
        assert "backoffLimitPerIndex" not in job
        rules = job["podFailurePolicy"]["rules"]
        assert [rule["action"] for rule in rules] == ["FailJob"] * 3
        assert rules[2]["onExitCodes"]["values"] == [69]
        assert variables(job)["FLEET_MAX_RESTARTS"] == "0"
    assert not [one for one in found if one["kind"] == "PersistentVolumeClaim"]


def test_failure_rules_match_what_kubernetes_writes(emitted: Any) -> None:
    rules = one_of_kind(emitted(*SERVED), "JobSet")["spec"]["failurePolicy"]["rules"]

    def action(message: str) -> str | None:
        for rule in rules:
            if any(re.search(text, message) for text in rule["onJobFailureMessagePatterns"]):
                return str(rule["action"])
        return None

    container = "Container fleetlight for pod team/train-worker-0-1-x failed with exit code"
    for code in (78, 126, 127):
        assert action(f"{container} {code} matching FailJob rule at index 0") == "FailJobSet"
    again = "RestartJobSetAndIgnoreMaxRestarts"
    assert action(f"{container} 75 matching FailJob rule at index 0") == again
    evicted = "Pod team/x has condition DisruptionTarget matching FailJob rule at index 1"
    assert action(evicted) == again
    assert action(f"{container} 1 matching FailJob rule at index 2") is None


def test_pods_have_few_rights(emitted: Any) -> None:
    for job in jobs(one_of_kind(emitted(*SERVED), "JobSet")).values():
        spec = pod(job)
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert spec["automountServiceAccountToken"] is False
        [container] = spec["containers"]
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }


def test_options_reach_the_pods(emitted: Any) -> None:
    found = emitted(*EVERYTHING)
    jobset = one_of_kind(found, "JobSet")
    assert jobset["metadata"]["namespace"] == "team"
    assert jobset["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "default"
    assert jobset["spec"]["ttlSecondsAfterFinished"] == 600
    worker = pod(jobs(jobset)["worker"])
    assert worker["nodeSelector"] == {"pool": "big", "zone": "a"}
    assert worker["tolerations"] == [{"key": "nvidia.com/gpu", "operator": "Exists"}]
    assert worker["priorityClassName"] == "low"
    assert worker["serviceAccountName"] == "trainer"
    assert worker["imagePullSecrets"] == [{"name": "registry"}]
    assert worker["securityContext"]["runAsUser"] == 7
    assert worker["terminationGracePeriodSeconds"] == 30
    [container] = worker["containers"]
    assert container["image"] == "registry/job:1"
    limits = {"memory": "4096Mi", "nvidia.com/gpu": 1}
    assert container["resources"]["limits"] == limits
    assert container["resources"]["requests"] == {"cpu": 1, **limits}
    mounts = {mount["mountPath"]: mount for mount in container["volumeMounts"]}
    assert mounts["/data"]["readOnly"] is True
    assert "readOnly" not in mounts["/out"]
    assert set(mounts) == {"/tmp", "/dev/shm", "/checkpoint", "/data", "/out", "/job/durability"}
    assert one_of_kind(found, "PersistentVolumeClaim")["spec"]["storageClassName"] == "nfs"
    assert {mount["name"] for mount in mounts.values()} == {v["name"] for v in worker["volumes"]}


def test_secret_is_shown_without_values(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    token = "3f9ac27e51d0b8463f9ac27e51d0b846"
    monkeypatch.setenv("FLEET_TOKEN", token)
    assert main(["--on", "kubernetes", *IMAGE, *SERVED, "--print", "train.py"]) == 0
    shown = capfd.readouterr()
    assert token not in shown.out + shown.err
    secret = one_of_kind(documents.read(shown.out), "Secret")
    # no process accepts a token that short
    assert secret["stringData"] == {"token": "REPLACE"}


def test_certificates_are_in_the_secret(emitted: Any, tmp_path: Path) -> None:
    from fleetlight.security.certificates import make

    make(str(tmp_path / "certs"), ["*.train.default.svc.cluster.local"], 30)
    found = emitted(*SERVED, "--ssl", str(tmp_path / "certs"))
    assert sorted(one_of_kind(found, "Secret")["stringData"]) == sorted((*CERTIFICATES, "token"))
    for name, job in jobs(one_of_kind(found, "JobSet")).items():
        known = variables(job)
        assert known["FLEET_SSL"] == "/tls"
        assert known["FLEET_HOST"] == (
            f"$(K8S_JOBSET)-{name}-0-$(FLEET_INDEX)."
            "$(K8S_JOBSET).$(K8S_NAMESPACE).svc.cluster.local"
        )
        [volume] = [v for v in pod(job)["volumes"] if v["name"] == "tls"]
        assert [item["key"] for item in volume["secret"]["items"]] == list(CERTIFICATES)


def test_trainer_gets_the_same_job_as_a_template(emitted: Any) -> None:
    runtime = one_of_kind(emitted(*EVERYTHING, "--option", "runtime=trainer"), "TrainingRuntime")
    assert runtime["spec"]["mlPolicy"] == {"numNodes": 3}
    inside = {"kind": "JobSet", "apiVersion": "", "spec": runtime["spec"]["template"]["spec"]}
    assert list(schema.problems(inside, schema.JOBSET)) == []
    server, node = inside["spec"]["replicatedJobs"]
    assert node["name"] == "node"
    assert node["template"]["metadata"]["labels"] == {
        "trainer.kubeflow.org/trainjob-ancestor-step": "trainer"
    }
    assert pod(node["template"]["spec"])["containers"][0]["name"] == "node"
    assert inside["spec"]["successPolicy"]["targetReplicatedJobs"] == ["node"]
    rules = node["template"]["spec"]["podFailurePolicy"]["rules"]
    assert rules[0]["onExitCodes"]["containerName"] == "node"
    assert variables(node["template"]["spec"])["FLEET_ROLE"] == "worker"
    assert server["name"] == "server"


def test_more_workers_may_fail_before_the_job_does(emitted: Any) -> None:
    """A job without servers counts each worker that fails with the first."""
    jobset = one_of_kind(emitted("--nproc_per_node", "2", *SAVES), "JobSet")
    assert jobs(jobset)["worker"]["backoffLimit"] == 1
    assert jobs(rescaled(jobset, {"worker": 8}))["worker"]["backoffLimit"] == 7


def test_a_job_of_other_counts_resumes(emitted: Any) -> None:
    jobset = one_of_kind(emitted(*SERVED, *SAVES, *JOURNALS), "JobSet")
    jobset["metadata"] |= {"uid": "1", "resourceVersion": "2"}
    jobset["status"] = {"restarts": 1}
    again = rescaled(jobset, {"worker": 5})
    assert list(schema.problems(again, schema.JOBSET)) == []
    assert set(again["metadata"]) == {"name", "labels"}
    assert "status" not in again
    found = jobs(again)
    assert {name: job["completions"] for name, job in found.items()} == {"server": 2, "worker": 5}
    assert found["worker"]["parallelism"] == 5
    for job in found.values():
        known = variables(job)
        assert (known["FLEET_WORKER_NUM"], known["FLEET_SERVER_NUM"]) == ("5", "2")
        assert known["FLEET_RESUME"] == "1"
        parts = [m.get("subPath") for m in pod(job)["containers"][0]["volumeMounts"]]
        assert "2-servers-5-workers" in parts


def test_names_are_those_of_hosts(emitted: Any) -> None:
    for given in ("3d", "A_b.C", "x" * 80):
        name = one_of_kind(emitted(*SERVED, "--name", given), "JobSet")["metadata"]["name"]
        longest = f"{name}-worker-0-99999-abcde"
        assert re.fullmatch(r"[a-z][-a-z0-9]*[a-z0-9]", longest)
        assert len(longest) <= 63


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--option", "imege=x"), "kubernetes has no such option; did you mean 'image'?"),
        ((), "--on kubernetes needs an image"),
        ((*IMAGE, "--option", "user=0"), "--option user=0: expected the number of a user"),
        ((*IMAGE, "--option", "journal_size=1GB"), "expected a size such as 10Gi"),
        ((*IMAGE, "--option", "mount=data"), "expected CLAIM:/PATH"),
        ((*IMAGE, "--option", "storage_class=x"), "pass --option journal_size=SIZE too"),
        ((*IMAGE, "--option", "journal_size=1Gi"), "a collective job saves with --checkpoint"),
        ((*IMAGE, "--checkpoint", "c"), "pass --option checkpoint_claim=NAME"),
        ((*IMAGE, "--option", "checkpoint_claim=x"), "pass --checkpoint NAME"),
        ((*IMAGE, "--env", "FLEET_INDEX=1"), "--env FLEET_INDEX: the engine sets this"),
    ],
)
def test_wrong_options_are_refused(
    words: tuple[str, ...], message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert message in refused(capfd, *words)


def test_image_of_the_repository_fits_the_defaults() -> None:
    lines = Path("docker/Dockerfile").read_text().splitlines()
    default = ClusterSettings(image="x")
    assert f"USER {default.user}" in lines
    assert f"WORKDIR {default.workdir}" in lines


def test_each_option_is_documented() -> None:
    page = Path("docs/engines/kubernetes.md").read_text()
    for field in dataclasses.fields(ClusterSettings):
        assert re.search(rf"^\| .*`{field.name}`.* \|", page, re.MULTILINE), field.name
