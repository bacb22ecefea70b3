# SPDX-License-Identifier: Apache-2.0
"""Jobs forked from a template, beside the same jobs without one; `torch` is a small stand-in."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from tests.launch.workplace import Workplace, is_running, wait_until

pytestmark = pytest.mark.slow

TORCH = "import os\nLOADED_IN = os.getpid()\n"
#: everything of a process that a script can see and that must not depend on a template
FACTS = """
'''A script.'''
from __future__ import annotations

import gc, json, multiprocessing, os, signal, stat, sys, threading

import torch

main = sys.modules["__main__"]
open_files = []
for number in range(64):
    try:
        open_files.append([number, oct(stat.S_IFMT(os.fstat(number).st_mode))])
    except OSError:
        pass
facts = {
    "argv": sys.argv, "original": sys.orig_argv, "path": sys.path, "name": __name__,
    "file": __file__, "spec": str(__spec__), "names": sorted(vars(main)),
    "doc": __doc__, "loader": type(__loader__).__name__, "hook": "sitecustomize" in sys.modules,
    "environment": dict(os.environ), "open": open_files, "flags": str(sys.flags),
    "leads": [os.getpid() == os.getpgid(0) == os.getsid(0)], "collects": gc.isenabled(),
    "signals": [str(signal.getsignal(n)) for n in sorted(signal.valid_signals())],
    "blocked": str(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
    "streams": [[s.line_buffering, s.write_through, s.encoding, s.errors]
                for s in (sys.stdout, sys.stderr)],
    "command": open("/proc/self/cmdline").read(), "depth": len(__import__("inspect").stack()),
    "start": multiprocessing.get_start_method(), "threads": threading.active_count(),
    "parent": open(f"/proc/{os.getppid()}/cmdline").read().split("\\0")[1:4],
}
print(json.dumps(facts))
print(json.dumps({"pid": os.getpid(), "torch": torch.LOADED_IN, "key":
    multiprocessing.current_process().authkey.hex()}))
"""
VARIES = (
    "FLEET_TOKEN",
    "FLEET_MASTER",
    "FLEET_WORKER_ENDPOINTS",
    "FLEET_JOB",
    "FLEET_ERROR_FILE",
    "MASTER_PORT",
)


@pytest.fixture
def torch(place: Workplace) -> Workplace:
    """A workplace where `import torch` finds the stand-in."""
    place.script(TORCH, "torch.py")
    return place


def told(place: Workplace, worker: int) -> list[dict[str, Any]]:
    return [json.loads(line) for line in place.log(f"workerlog.{worker}").splitlines()]


def run(place: Workplace, *flags: str, **environment: str) -> list[list[dict[str, Any]]]:
    code, shown = place.run("--nproc_per_node", "2", *flags, "train.py", "--lr", "1", **environment)
    assert code == 0, shown
    return [told(place, worker) for worker in (0, 1)]


@pytest.mark.parametrize("unbuffered", ["1", ""])
def test_script_sees_the_same_process(torch: Workplace, unbuffered: str) -> None:
    torch.script(FACTS)
    forked = run(torch, PYTHONUNBUFFERED=unbuffered)
    alone = run(torch, "--no_preload", PYTHONUNBUFFERED=unbuffered)
    for (one, ids), (other, own) in zip(forked, alone, strict=True):
        assert ids["torch"] != ids["pid"]
        assert own["torch"] == own["pid"]
        for facts in (one, other):
            for name in VARIES:
                facts["environment"].pop(name)
        assert one == other
    assert forked[0][1]["torch"] == forked[1][1]["torch"]
    assert forked[0][1]["key"] != forked[1][1]["key"]


def is_forked(place: Workplace) -> bool:
    """Whether the last job came from a template; its script prints where torch was loaded."""
    pids = [place.log(f"workerlog.{worker}").split()[-2:] for worker in (0, 1)]
    return all(own != loaded for own, loaded in pids)


SAY = "import torch, os\nprint(os.getpid(), torch.LOADED_IN)\n"


@pytest.mark.parametrize(
    "addition",
    [
        "print('a message')",
        "import threading; t = threading.Timer(9, print); t.daemon = True; t.start()",
        "os._exit(0) if 'FLEET_INDEX' not in os.environ else None",
        "1 / 0 if 'FLEET_INDEX' not in os.environ else None",
    ],
)
def test_job_starts_without_a_template_that_cannot_fork(torch: Workplace, addition: str) -> None:
    torch.script(SAY)
    torch.run("--nproc_per_node", "2", "train.py")
    assert is_forked(torch)
    torch.script(TORCH + addition, "torch.py")
    code, shown = torch.run("--nproc_per_node", "2", "train.py")
    assert code == 0, shown
    assert not is_forked(torch)


@pytest.mark.parametrize(
    ("ending", "code"),
    [
        ("sys.exit(3)", 3),
        ("raise SystemExit('why')", 1),
        ("raise ValueError('bad')", 1),
        ("os.kill(os.getpid(), signal.SIGTERM)", 143),
        ("raise KeyboardInterrupt", 130),
    ],
)
def test_end_and_traceback_are_the_same(torch: Workplace, ending: str, code: int) -> None:
    torch.script(f"import os, sys, signal\nimport torch\nif os.environ['RANK'] == '0': {ending}\n")
    ends = []
    for flags in ((), ("--no_preload",)):
        found, shown = torch.run("--nproc_per_node", "2", *flags, "train.py")
        ends.append((found, torch.log("workerlog.0")))
        assert found == code, shown
    assert ends[0] == ends[1]


def test_random_numbers_differ(torch: Workplace) -> None:
    torch.script(TORCH + "import numpy.random, random\n", "torch.py")
    draw = "import random\nimport torch, numpy\nprint(random.random(), numpy.random.rand())\n"
    torch.script(draw + "import os\nprint(os.getpid(), torch.LOADED_IN)\n")
    torch.run("--nproc_per_node", "2", "train.py")
    assert is_forked(torch)
    first, second = (torch.log(f"workerlog.{worker}").split()[:2] for worker in (0, 1))
    assert first[0] != second[0]
    assert first[1] != second[1]


def test_processes_of_multiprocessing_import_the_script(torch: Workplace) -> None:
    torch.script(
        """
        import multiprocessing, os, sys
        import torch

        def where(queue):
            queue.put([__name__, sys.path[0], torch.LOADED_IN == os.getpid()])

        if __name__ == "__main__":
            context = multiprocessing.get_context("spawn")
            queue = context.Queue()
            child = context.Process(target=where, args=(queue,))
            child.start()
            print(queue.get(), child.join(), child.exitcode)
            print(os.getpid(), torch.LOADED_IN)
        """
    )
    code, shown = torch.run("--nproc_per_node", "2", "train.py")
    assert code == 0, shown
    assert is_forked(torch)
    assert f"['__mp_main__', '{torch.path}', True] None 0" in shown


LOADS_LONG = """
import os, pathlib, time
pathlib.Path("template").write_text(f"{os.getpid()}\\n")
while True:
    time.sleep(1)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_signal_while_the_template_loads_ends_it(torch: Workplace, number: signal.Signals) -> None:
    torch.script(LOADS_LONG, "torch.py")
    torch.script(SAY)
    job = torch.start("--nproc_per_node", "2", "train.py")
    template = int(torch.wait_for("template"))
    job.process.send_signal(number)
    code, _ = job.end()
    assert code == (-number if number is signal.SIGKILL else 128 + number)
    wait_until(lambda: not is_running(template), "the template to end")


def test_forked_processes_end_with_fleetrun(torch: Workplace) -> None:
    torch.script(
        """
        import os, pathlib, subprocess, time
        import torch
        child = subprocess.Popen(["sleep", "1000"])
        own = pathlib.Path(f"pids{os.environ['RANK']}")
        own.write_text(f"{os.getpid()} {child.pid} {torch.LOADED_IN}\\n")
        time.sleep(1000)
        """
    )
    job = torch.start("--nproc_per_node", "2", "train.py")
    pids = [int(pid) for worker in (0, 1) for pid in torch.wait_for(f"pids{worker}").split()]
    assert not is_running(pids[2]), "the template has ended"
    job.process.kill()
    wait_until(lambda: not any(map(is_running, pids)), "all processes to end")


def test_own_sitecustomize_runs_in_each_process(
    torch: Workplace, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder: Path = tmp_path_factory.mktemp("site")
    (folder / "sitecustomize.py").write_text("import os, sys\nsys.seen_by = os.getpid()\n")
    torch.script(
        "import sys, os\nimport torch\n"
        "print(sys.seen_by == os.getpid(), sys.modules['sitecustomize'].__file__)\n"
        "print(os.getpid(), torch.LOADED_IN)\n"
    )
    path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    torch.run("--nproc_per_node", "2", "train.py", PYTHONPATH=path)
    assert is_forked(torch)
    for worker in (0, 1):
        assert torch.log(f"workerlog.{worker}").startswith(f"True {folder}/sitecustomize.py")
