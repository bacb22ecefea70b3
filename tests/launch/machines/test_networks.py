# SPDX-License-Identifier: Apache-2.0
"""Machines connected by a network (network namespaces)."""

from rig.hosts import Rig, hosts
from tests.launch.workplace import Job, Workplace, outcome
from tests.rig.needed import NEEDED

pytestmark = NEEDED

WORK = """
    import os, pathlib, sys, time
    from fleetlight.observe.telemetry.recorder import MetricRecorder
    from fleetlight.observe.telemetry.registry import registry
    from fleetlight.roles import RoleMaker
    names = ("FLEET_HOST", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "MASTER_ADDR")
    node = os.environ["FLEET_NODE_RANK"]
    seen = [os.environ[name] for name in names]
    role = RoleMaker().role
    seen += [f"worker {role.index} of {role.worker_num} on {role.node_num} hosts"]
    folder = pathlib.Path(os.environ["FLEET_LOG_DIR"])
    MetricRecorder(folder, "worker", role.index, registry).close()
    pathlib.Path("seen." + node).write_text(" ".join(seen) + "\\n")
    time.sleep(float(sys.argv[1]))
"""


def start(place: Workplace, rig: Rig, *flags: str, seconds: str) -> list[Job]:
    script = place.script(WORK)
    jobs = []
    for number, host in enumerate(rig.hosts):
        place.prefix = host.prefix
        jobs.append(place.start(*flags, "--log_dir", f"log{number}", script, seconds))
    return jobs


def test_addresses_and_interfaces_are_found(place: Workplace) -> None:
    with hosts(3) as rig:
        first = rig.addresses[0]
        flags = ["-v", "--nnodes", "3", "--master", f"{first}:6170"]
        ended = [job.end() for job in start(place, rig, *flags, seconds="0")]
    for node in range(3):
        seen = place.wait_for(f"seen.{node}").split()
        own, cable = seen[:2]
        assert seen == [own, cable, cable, first, *f"worker {node} of 3 on 3 hosts".split()]
        # the other ranks vary, but address and interface belong together
        number = rig.addresses.index(own)
        assert cable == f"cable{number}"
        code, output = ended[number]
        assert code == 0, output
        assert f"this machine's address: {own}" in output
        assert f"GLOO_SOCKET_IFNAME={cable}: the interface of {own}" in output
    # the metrics of all workers are on node 0
    found = [len(list(place.path.glob(f"log{n}/metrics/worker.*.jsonl"))) for n in range(3)]
    assert sorted(found) == [1, 1, 3]


def test_cut_link_ends_the_job_on_both_sides(place: Workplace) -> None:
    with hosts(2) as rig:
        jobs = start(place, rig, "--ips", rig.ips, "--deadline_s", "15", seconds="600")
        for node in (0, 1):
            place.wait_for(f"seen.{node}")
        rig.hosts[0].cut()
        (code, first), (other_code, second) = (job.end() for job in jobs)
    assert (code, other_code) == (1, 1)
    master, other = rig.addresses
    assert f"failed: node 1 ({other}) was lost: no heartbeat" in outcome(first)
    assert "sends no heartbeats; waiting up to 15 s for it (--deadline_s)" in first
    assert f"failed: node 0, which serves {master}:6170, was lost" in outcome(second)
