# SPDX-License-Identifier: Apache-2.0
"""`ClusterSettings`: the options of a job on Kubernetes (`--option NAME=VALUE`), checked. Pure."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any

from fleetlight.errors import ConfigError, did_you_mean

#: the value of `runtime` that describes a template of Kubeflow Trainer
TRAINER = "trainer"

_QUANTITY = r"[0-9]+(\.[0-9]+)?(Ki|Mi|Gi|Ti|Pi|k|M|G|T|P)?"
_NAME = r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?"
_ACCESS = ("ReadWriteMany", "ReadWriteOnce", "ReadWriteOncePod")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mount:
    """An existing claim that all pods see under a path."""

    claim: str
    path: str
    read_only: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClusterSettings:
    """What Kubernetes needs to know beyond the job; each field is an option."""

    #: the container image, with the script and Fleetlight
    image: str
    #: "": that of kubectl's context
    namespace: str = ""
    service_account: str = ""
    node_selector: Mapping[str, str] = dataclasses.field(default_factory=dict)
    #: keys of taints
    tolerate: tuple[str, ...] = ()
    #: a local queue of Kueue
    queue: str = ""
    priority_class: str = ""
    #: the name of a secret
    pull_secret: str = ""
    #: the folder of the script in the image
    workdir: str = "/job"
    #: the number of the user that runs the processes, and of its group
    user: int = 1000
    read_only_root: bool = True
    #: the size of a claim for the logs of servers and workers; "": they end with their pod
    journal_size: str = ""
    #: of that claim; "": the cluster's default
    storage_class: str = ""
    journal_access: str = "ReadWriteMany"
    #: an existing claim, for checkpoints
    checkpoint_claim: str = ""
    mount: tuple[Mount, ...] = ()
    #: the size of /dev/shm
    shm: str = "1Gi"
    #: how long a finished job stays, in seconds
    ttl: int | None = None
    cluster_domain: str = "cluster.local"
    #: TRAINER: a template for Kubeflow Trainer in place of a job
    runtime: str = ""


def read_settings(options: Mapping[str, str]) -> ClusterSettings:
    """The settings in the options; ConfigError names what is wrong."""
    for name in options:
        if name not in _READERS:
            raise ConfigError(
                f"--option {name}: kubernetes has no such option; {did_you_mean(name, _READERS)}"
            )
    if "image" not in options:
        raise ConfigError(
            "--on kubernetes needs an image with the script and Fleetlight: pass --option "
            "image=REGISTRY/NAME:TAG (docker/Dockerfile builds one)"
        )
    settings = ClusterSettings(**{name: _read(name, text) for name, text in options.items()})
    for name in ("storage_class", "journal_access"):
        if name in options and not settings.journal_size:
            raise ConfigError(
                f"--option {name}={options[name]} is for the claim that holds journals; pass "
                "--option journal_size=SIZE too, or omit it"
            )
    return settings


def _read(name: str, text: str) -> Any:
    try:
        return _READERS[name](text)
    except ValueError as error:
        raise ConfigError(f"--option {name}={text}: expected {error}") from None


def _matching(pattern: str, expected: str) -> Callable[[str], str]:
    def read(text: str) -> str:
        if not re.fullmatch(pattern, text):
            raise ValueError(expected)
        return text

    return read


_name = _matching(_NAME, "a name of lower-case letters, digits, - and .")
_size = _matching(_QUANTITY, "a size such as 10Gi")
_path = _matching(r"/[^:,]+", "an absolute path in the image")


def _one_of(*words: str) -> Callable[[str], str]:
    return _matching("|".join(words), " or ".join(words))


def _number(text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise ValueError("a number from 0")
    return int(text)


def _user(text: str) -> int:
    number = _number(text)
    if not number:
        raise ValueError("the number of a user, not of root")
    return number


def _flag(text: str) -> bool:
    return _one_of("true", "false")(text) == "true"


def _words(text: str) -> tuple[str, ...]:
    return tuple(_matching(r"[^\s=]+", "keys, separated by commas")(w) for w in text.split(","))


def _pairs(text: str) -> dict[str, str]:
    words = [_matching(r"[^=]+=[^=]*", "KEY=VALUE,KEY=VALUE")(word) for word in text.split(",")]
    return dict(word.split("=") for word in words)


def _mounts(text: str) -> tuple[Mount, ...]:
    pattern = rf"{_NAME}:/[^:]+(:ro)?"
    words = [
        _matching(pattern, "CLAIM:/PATH or CLAIM:/PATH:ro, separated by commas")(word).split(":")
        for word in text.split(",")
    ]
    return tuple(Mount(claim=w[0], path=w[1], read_only=len(w) == 3) for w in words)


#: how each option is read
_READERS: Mapping[str, Callable[[str], Any]] = {
    "image": _matching(r"\S+", "the name of an image"),
    "namespace": _name,
    "service_account": _name,
    "node_selector": _pairs,
    "tolerate": _words,
    "queue": _name,
    "priority_class": _name,
    "pull_secret": _name,
    "workdir": _path,
    "user": _user,
    "read_only_root": _flag,
    "journal_size": _size,
    "storage_class": _name,
    "journal_access": _one_of(*_ACCESS),
    "checkpoint_claim": _name,
    "mount": _mounts,
    "shm": _size,
    "ttl": _number,
    "cluster_domain": _name,
    "runtime": _one_of(TRAINER),
}
