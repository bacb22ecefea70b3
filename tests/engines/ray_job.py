# SPDX-License-Identifier: Apache-2.0
"""Runs a job on a Ray cluster of four nodes in this machine, each with an address of its own.

Arguments: the folder of the job, a harm or "none", and the script with its arguments.
"""

import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import ray
from ray.cluster_utils import Cluster
from ray.util.state import get_actor
from tests.engines.ray_nodes import nodes

import fleetlight.ray
from fleetlight.launch.job.spec import JobSpec, RoleSpec
from fleetlight.roles.role import Kind

LIMIT_S = 100.0


def wait_for(path: Path, former: str = "") -> str:
    """The content of a file, once there is one that differs from the former."""
    end = time.monotonic() + LIMIT_S
    while time.monotonic() < end:
        if path.exists() and (text := path.read_text()) != former:
            return text
        time.sleep(0.02)
    raise TimeoutError(path)


def kill_actor(name: str) -> None:
    """Kill the actor of a process; Ray starts it again."""
    before = Path("pid.1").read_text()
    ray.kill(ray.get_actor(f"{os.environ['FLEET_JOB']} {name}"), no_restart=False)
    wait_for(Path("pid.1"), before)


def remove_node(cluster: Cluster, name: str) -> None:
    """Kill the node on which an actor runs; Ray notices later, and calls of its actors fail."""
    actor = ray.get_actor(f"{os.environ['FLEET_JOB']} {name}")
    found: Any = get_actor(actor._actor_id.hex())
    [node] = [one for one in cluster.worker_nodes if one.node_id == found.node_id]
    cluster.remove_node(node, allow_graceful=False)


def harm(cluster: Cluster, which: str) -> None:
    """Wait until worker 1 dies in the middle of the job, and add a harm of our own."""
    if which == "actor":
        wait_for(Path("died.1.3.forward"), "-")
        kill_actor("server 1")
    if which == "node":
        wait_for(Path("died.1.3.forward"), "-")
        remove_node(cluster, "server 0")


def main(folder: str, which: str, script: str, *arguments: str) -> int:
    """Run the job; returns its exit code."""
    os.chdir(folder)
    os.environ["FLEET_JOB"] = "job"
    job = JobSpec(
        script=script,
        arguments=arguments,
        collective=False,
        worker=RoleSpec(kind=Kind.WORKER, count=2),
        server=RoleSpec(kind=Kind.SERVER, count=2),
        max_restarts=3,
    )
    with nodes(4) as cluster:
        threading.Thread(target=harm, args=(cluster, which), daemon=True).start()
        return fleetlight.ray.run(job)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
