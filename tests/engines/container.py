# SPDX-License-Identifier: Apache-2.0
"""One pod as a process: its own network, files and user, from the template in a manifest.

The files are those of this machine below a layer of the pod's own, which ends with it. So the
interpreter, the packages and Fleetlight are those of the tests.
"""

import dataclasses
import json
import os
import posixpath
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rig.hosts import Host

REPOSITORY = Path(__file__).parents[2]
_DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
_PROGRAMS, _SOURCES = "/usr/local/image/bin", "/usr/local/image/src"


@dataclasses.dataclass(frozen=True)
class Place:
    """What the cluster knows about a pod before it starts."""

    namespace: str
    jobset: str
    uid: str
    restart: int
    index: int
    address: str
    #: by the name of the secret
    secrets: Mapping[str, Mapping[str, str]]

    def field(self, path: str) -> str:
        """The value of a reference to a field of the pod."""
        return {
            "metadata.namespace": self.namespace,
            "metadata.labels['jobset.sigs.k8s.io/jobset-name']": self.jobset,
            "metadata.labels['jobset.sigs.k8s.io/jobset-uid']": self.uid,
            "metadata.labels['jobset.sigs.k8s.io/restart-attempt']": str(self.restart),
            "metadata.annotations['batch.kubernetes.io/job-completion-index']": str(self.index),
            "status.podIP": self.address,
        }[path]


def variables(container: Mapping[str, Any], place: Place) -> dict[str, str]:
    """The variables of a container, as a kubelet expands them: `$(NAME)` is one before it."""
    found: dict[str, str] = {}
    for entry in container["env"]:
        found[entry["name"]] = _value(entry, place, found)
    return found


def _value(entry: Mapping[str, Any], place: Place, before: Mapping[str, str]) -> str:
    if "valueFrom" not in entry:
        return re.sub(r"\$\((\w+)\)", lambda m: before.get(m[1], m[0]), entry["value"])
    [(kind, source)] = entry["valueFrom"].items()
    if kind == "fieldRef":
        return place.field(source["fieldPath"])
    assert kind == "secretKeyRef", kind
    return place.secrets[source["name"]][source["key"]]


def start(
    pod: Mapping[str, Any], place: Place, host: Host, folder: Path, claims: Path
) -> subprocess.Popen[str]:
    """Start the container of a pod; its output goes to `log` in the folder."""
    [container] = pod["containers"]
    folder.mkdir(parents=True)
    sources = {v["name"]: _source(v, folder, claims, place) for v in pod["volumes"]}
    mounts = [(sources[m["name"]], m) for m in container["volumeMounts"]]
    script = folder / "start.sh"
    script.write_text("\n".join(_script(pod, container, folder, mounts)))
    image = {"PATH": f"{_PROGRAMS}:/usr/bin:/bin", "PYTHONPATH": _SOURCES}
    environment = {**image, **variables(container, place)}
    command = ["env", "-i", *(f"{k}={v}" for k, v in environment.items()), "bash", str(script)]
    with (folder / "log").open("w") as log:
        return host.start(command, stdout=log, stderr=subprocess.STDOUT)


def _source(volume: Mapping[str, Any], folder: Path, claims: Path, place: Place) -> Path:
    """The folder on this machine that a volume is."""
    if "persistentVolumeClaim" in volume:
        path = claims / volume["persistentVolumeClaim"]["claimName"]
        assert path.is_dir(), f"no claim {path.name}"
        return path
    path = folder / "volumes" / volume["name"]
    path.mkdir(parents=True)
    if "secret" in volume:
        values = place.secrets[volume["secret"]["secretName"]]
        for item in volume["secret"]["items"]:
            (path / item["path"]).write_text(values[item["key"]])
            (path / item["path"]).chmod(volume["secret"]["defaultMode"])
    return path


def _script(
    pod: Mapping[str, Any],
    container: Mapping[str, Any],
    folder: Path,
    mounts: Sequence[tuple[Path, Mapping[str, Any]]],
) -> list[str]:
    """The commands that make the files of the pod, and become its process."""
    top, user = folder / "top", pod["securityContext"]["runAsUser"]
    top.mkdir()
    root = f"{top}/root"
    rights = container["securityContext"]
    assert rights["allowPrivilegeEscalation"] is False
    lines = [
        "set -e",
        f"mount -t tmpfs tmpfs {top}",
        f"mkdir {top}/upper {top}/work {root}",
        f"mount -t overlay -o lowerdir=/,upperdir={top}/upper,workdir={top}/work overlay {root}",
        *_image(root),
        *(f"mkdir -p {root}{m['mountPath']}" for _, m in mounts),
        f"mkdir -p {root}{container['workingDir']}",
        f"mount --rbind /proc {root}/proc",
        f"mount --bind /etc/hosts {root}/etc/hosts",
        *_devices(root, user),
    ]
    if rights["readOnlyRootFilesystem"]:
        lines.append(f"mount -o remount,bind,ro {root}")
    for source, mount in sorted(mounts, key=lambda pair: str(pair[1]["mountPath"])):
        lines += _mounted(source, mount, root, user)
    argv = shlex.join(container["command"])
    inside = shlex.quote(f"cd {container['workingDir']} && exec {argv}")
    enter = f"{shutil.which('chroot')} --userspec={user}:{user} {root}"
    lines.append(f"exec {enter} setpriv --no-new-privs bash -c {inside}")
    return lines


def _image(root: str) -> list[str]:
    """What an image would have: programs that any user may start."""
    python = shlex.quote(sys.executable)
    parts = {sys.prefix, sys.base_prefix}
    above = {str(p) for part in parts for p in Path(part).parents} - {"/"}
    lines = [f"chmod a+rx {shlex.join(root + path for path in sorted(above))}"]
    lines += [f"mount --rbind {shlex.quote(part)} {root}{part}" for part in sorted(parts)]
    lines.append(f"mkdir -p {root}{_PROGRAMS} {root}{_SOURCES}")
    lines.append(f"mount --bind {REPOSITORY}/src {root}{_SOURCES}")
    for name, arguments in {"python": "", "fleetlight": " -m fleetlight.cli.fleetlight"}.items():
        program = f"{root}{_PROGRAMS}/{name}"
        text = shlex.quote(f'#!/bin/sh\nexec {python}{arguments} "$@"\n')
        lines += [f"printf %s {text} > {program}", f"chmod 755 {program}"]
    return lines


def _devices(root: str, user: int) -> list[str]:
    lines = [f"mount -t tmpfs -o mode=755 tmpfs {root}/dev", f"mkdir {root}/dev/shm"]
    for name in _DEVICES:
        lines += [f"touch {root}/dev/{name}", f"mount --bind /dev/{name} {root}/dev/{name}"]
    log = f"{root}/dev/termination-log"
    return [*lines, f"touch {log}", f"chown {user} {log}", f"ln -s /proc/self/fd {root}/dev/fd"]


def _mounted(source: Path, mount: Mapping[str, Any], root: str, user: int) -> list[str]:
    inside = posixpath.join(source, mount.get("subPath", ""))
    place = f"{root}{mount['mountPath']}"
    # a volume may lie in another one
    lines = [
        f"mkdir -p {inside} {place}",
        # as fsGroup does; a claim may have files of its own
        f"chown -R :{user} {inside}",
        f"mount --bind {inside} {place}",
    ]
    if mount.get("readOnly"):
        lines.append(f"mount -o remount,bind,ro {place}")
    else:
        lines.insert(2, f"chmod g+rwxs {inside}")
    return lines


def obstacle() -> str | None:
    """Why no such pod can run here; None where one can."""
    if os.geteuid() != 0:
        return "got an ordinary user, expected root: mounts need it"
    if any(Path(part).is_relative_to("/tmp") for part in (sys.prefix, sys.base_prefix)):
        return (
            f"got Python in {sys.prefix}, expected a place outside /tmp: pods have a volume there"
        )
    trial = (
        "d=$(mktemp -d) && mount -t tmpfs tmpfs $d && mkdir $d/u $d/w $d/r && mount -t overlay -o "
        "lowerdir=/,upperdir=$d/u,workdir=$d/w overlay $d/r; e=$?; umount -R $d; rmdir $d; exit $e"
    )
    done = subprocess.run(["unshare", "-m", "bash", "-c", trial], capture_output=True, text=True)
    return f"no layers of files here: {done.stderr.strip()}" if done.returncode else None


def secret_values(found: Mapping[str, Any], given: Mapping[str, str]) -> dict[str, str]:
    """The values of a secret of which the manifest shows placeholders."""
    assert set(found["stringData"]) == set(given), json.dumps(sorted(found["stringData"]))
    return dict(given)
