# SPDX-License-Identifier: Apache-2.0
"""Several machines, simulated by loopback addresses of 127.0.0.0/8."""

import signal
import sys

import pytest
from tests.launch.workplace import Job, Workplace, free_ports, outcome, wait_until

pytestmark = [
    pytest.mark.long,
    pytest.mark.multiprocess,
    pytest.mark.skipif(sys.platform != "linux", reason="only Linux owns all of 127.0.0.0/8"),
]

FIRST, SECOND = "127.0.0.1", "127.0.0.2"

#: prints its rank, then runs the code that its machine names
WORK = """
    import os, pathlib, sys, time
    index, node = os.environ["FLEET_INDEX"], os.environ["FLEET_NODE_RANK"]
    names = ("FLEET_ROLE", "FLEET_INDEX", "FLEET_WORKER_ENDPOINTS", "MASTER_ADDR", "FLEET_RESTART",
             "GLOO_SOCKET_IFNAME", "FLEET_NODE_NUM")
    facts = " ".join(os.environ.get(name, "-") for name in names)
    print(facts)
    pathlib.Path(f"pid.{node}").write_text(f"{os.getpid()}\\n")
    what = sys.argv[1 + int(node)]
    if what == "fail" and os.environ["FLEET_RESTART"] == "0":
        raise ValueError("bad batch")
    if what == "stay":
        time.sleep(600)
"""


def both(place: Workplace, flags: list[str], script: list[str]) -> tuple[Job, Job]:
    """The same command on two machines; each has its own log folder."""
    first, second = (
        place.start(*flags, "--host", host, "--log_dir", f"log{host[-1]}", *script)
        for host in (FIRST, SECOND)
    )
    return first, second


def listed(port: int) -> list[str]:
    return ["--ips", f"{FIRST},{SECOND}", "--start_port", str(port)]


def test_two_machines_form_one_job(place: Workplace) -> None:
    port = free_ports((FIRST, SECOND), 8)
    flags = ["--host", SECOND, "--log_dir", "log2", "--nproc_per_node", "2"]
    second = place.start(*listed(port), *flags, place.script(WORK), "go", "go")
    wait_until(lambda: "not ready endpoints" in line_of(second), "the second to miss the first")
    other = place.script(WORK + "\n    # not the same bytes\n", "other.py")
    flags = ["--host", FIRST, "--log_dir", "log1"]
    first = place.start(*listed(port), *flags, other, "go", "go")
    (code, output), (other_code, _) = first.end(), second.end()
    assert (code, other_code) == (0, 0), output
    assert "node 0 (127.0.0.1), node 1 (127.0.0.2); this is node 0" in output
    assert "warning: the script differs between the machines (127.0.0.1: " in output
    assert "done: all 3 workers on 2 machines exited with code 0" in output
    endpoints = f"{FIRST}:{port + 1},{SECOND}:{port + 1},{SECOND}:{port + 2}"
    assert place.log("workerlog.0", "log1") == f"worker 0 {endpoints} {FIRST} 0 lo 2\n"
    assert place.log("workerlog.2", "log2") == f"worker 2 {endpoints} {FIRST} 0 lo 2\n"


def line_of(job: Job) -> str:
    assert job.process.stdout is not None
    return job.process.stdout.readline()


def test_failure_on_one_machine_restarts_both(place: Workplace) -> None:
    flags = [*listed(free_ports((FIRST, SECOND), 8)), "--max_restarts", "1"]
    jobs = both(place, flags, [place.script(WORK), "go", "fail"])
    for job in jobs:
        code, output = job.end()
        assert code == 0, output
        assert "failed: node 1 (127.0.0.2): worker 1 of 2 exited with code 1 after" in output, (
            output
        )
        assert "ValueError: bad batch" in output
        assert "restarting all processes (restart 1, 0 left)" in output
    assert "--- restart 1 ---" in place.log("workerlog.0", "log1")


def test_servers_on_one_machine_and_workers_on_the_other(place: Workplace) -> None:
    port = free_ports((FIRST, SECOND), 8)
    flags = ["--nnodes", "2", "--master", f"{FIRST}:{port}"]
    script = [place.script(WORK), "go", "go"]
    servers = place.start(*flags, "--server_num", "1", "--worker_num", "0", *script)
    workers = place.start(
        *flags, "--rank", "1", "--host", SECOND, "--server_num", "0", "--worker_num", "2", *script
    )
    for job in (servers, workers):
        code, output = job.end()
        assert code == 0, output
        assert "servers ended by themselves" in output
    # both launchers share the folder; neither moves the other's logs
    assert place.log("serverlog.0").startswith("server 0 ")
    assert f" {SECOND} " in place.log("workerlog.1")


def test_machine_that_never_joins_is_named(place: Workplace) -> None:
    flags = [*listed(free_ports((FIRST, SECOND), 8)), "--host", FIRST, "--deadline_s", "0.5"]
    code, output = place.run(*flags, place.script(WORK), "go", "go")
    assert code == 1
    last = outcome(output)
    assert "the job did not form within 0.5 s" in last
    assert "not ready endpoints: ['127.0.0.2:" in last
    assert "start the same command there" in last


def test_vanished_master_is_named(place: Workplace) -> None:
    first, second = both(
        place, listed(free_ports((FIRST, SECOND), 8)), [place.script(WORK), "stay", "stay"]
    )
    place.wait_for("pid.1")
    place.wait_for("pid.0")
    first.process.kill()
    code, output = second.end()
    assert code == 1
    assert "node 0, which serves 127.0.0.1:" in outcome(output)


def test_machine_that_cannot_continue_reports_why_to_all(place: Workplace) -> None:
    flags = [*listed(free_ports((FIRST, SECOND), 8)), "--host"]
    script = place.script(WORK)
    first = place.start(*flags, FIRST, script, "stay", "stay")
    second = place.start(*flags, SECOND, "--log_dir", f"{script}/log", script, "stay", "stay")
    code, output = first.end()
    assert code == 1
    assert "node 1 (127.0.0.2): fleetrun gave up: cannot write logs to" in outcome(output)
    assert second.end()[0] == 1


def test_interrupt_on_one_machine_ends_both(place: Workplace) -> None:
    jobs = both(place, listed(free_ports((FIRST, SECOND), 8)), [place.script(WORK), "stay", "stay"])
    place.wait_for("pid.0")
    place.wait_for("pid.1")
    jobs[1].process.send_signal(signal.SIGINT)
    for job in jobs:
        code, output = job.end()
        assert code == 130
        assert "node 1 (127.0.0.2): stopped by you after" in outcome(output)


def test_machines_join_and_leave_an_elastic_job(place: Workplace) -> None:
    port = free_ports((FIRST, SECOND), 8)
    flags = ["--nnodes", "1:2", "--master", f"{FIRST}:{port}", "--deadline_s", "15"]
    script = [
        place.script("""
        import os, pathlib, time
        number = os.environ["FLEET_NODE_NUM"] + os.environ["FLEET_RESTART"]
        pathlib.Path("seen." + number).write_text("\\n")
        while not os.path.exists("enough"):
            time.sleep(0.01)
    """)
    ]
    first = place.start(*flags, *script)
    place.wait_for("seen.10")
    second = place.start(*flags, "--rank", "1", "--host", SECOND, "--log_dir", "log2", *script)
    place.wait_for("seen.21")
    second.process.send_signal(signal.SIGSTOP)
    place.wait_for("seen.12")
    second.process.kill()
    place.script("", "enough")
    code, output = first.end()
    assert code == 0, output
    assert "another machine joined; restarting" in output
    assert "node 1 (127.0.0.2) was lost: no heartbeat; restarting" in output
