# SPDX-License-Identifier: Apache-2.0
"""What a user of Slurm does at the login node."""

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.engines.cluster import Cluster, wait_until
from tests.multiprocess.test_dialects import BIN, ROLES

ROOT = Path(__file__).parents[2]
COUNTS = ("--server_num", "2", "--worker_num", "2")
_ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")


class Login:
    """What a user does at the login node, in one folder."""

    def __init__(self, slurm: Cluster, folder: Path) -> None:
        self.slurm, self.folder = slurm, folder
        self._variables: dict[str, str] = {}
        folder.mkdir(exist_ok=True)

    @contextlib.contextmanager
    def with_token(self, token: str) -> Iterator[None]:
        """Inside the block, jobs have this token."""
        self._variables["FLEET_TOKEN"] = token
        yield
        del self._variables["FLEET_TOKEN"]

    def run(self, *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run a command, without the variables of other jobs."""
        environment = {name: "" for name in os.environ if name.startswith(ROLES)}
        own = {"PYTHONPATH": f"{ROOT}/src:{ROOT}", "OMP_NUM_THREADS": "1", **variables}
        own |= self._variables
        return self.slurm.run(*command, env={**environment, **own}, cwd=self.folder)

    def submit(
        self,
        script: str,
        *arguments: str,
        counts: tuple[str, ...] = COUNTS,
        flags: tuple[str, ...] = (),
    ) -> str:
        """Submit a script by fleetrun; returns the id of the job."""
        words = (str(BIN / "fleetrun"), "--on", "slurm", *counts, *flags, script, *arguments)
        done = self.run(sys.executable, *words)
        found = re.search(r"submitted slurm:(\d+);", done.stdout)
        assert found, done.stdout + done.stderr
        return found[1]

    def tool(self, verb: str, job: str, *words: str) -> str:
        """What `fleetlight` prints about a job."""
        done = self.run(sys.executable, str(BIN / "fleetlight"), verb, f"slurm:{job}", *words)
        assert not done.returncode, done.stdout + done.stderr
        return done.stdout

    def wait_for_gate(self) -> None:
        """Wait until worker 0 waits."""
        wait_until((self.folder / "reached").exists, "worker 0 waits at its step")

    def open_gate(self) -> None:
        """Let worker 0 continue."""
        (self.folder / "go").touch()

    def wait_for_end(self, job: str, state: str = "COMPLETED") -> str:
        """Wait until the job has ended; returns its logs."""
        wait_until(lambda: self.slurm.job(job)["JobState"] in _ENDED, f"job {job} ends")
        text = self.tool("logs", job)
        assert self.slurm.job(job)["JobState"] == state, text
        return text

    def start_again(self, job: str) -> None:
        """Start a job that Slurm has put back into the queue, where it would wait two minutes."""
        wait_until(lambda: self.slurm.job(job)["JobState"] == "PENDING", f"job {job} is put back")
        # nodes refuse a job that they have ended within the same second
        self.slurm.ask("scontrol", "update", f"JobId={job}", "StartTime=now+3")
