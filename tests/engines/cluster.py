# SPDX-License-Identifier: Apache-2.0
"""A real Slurm on one machine: a controller and nodes in network namespaces of a rig."""

import contextlib
import os
import secrets
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from rig.hosts import Host, Rig, hosts

from rig import spaces

_PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol")
#: the names of hosts are those of Slurm's nodes; names resolve without DNS
_ENTER = """
hostname "$1"
mount --bind "$2/hosts" /etc/hosts
shift 2
exec "$@"
"""
_CONFIG = """
ClusterName=rig
SlurmctldHost=n0({controller})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
EnforcePartLimits=ALL
MpiDefault=none
SlurmdParameters=config_overrides
ReturnToService=2
SlurmdTimeout=10
SchedulerParameters=batch_sched_delay=0,sched_min_interval=0,bf_interval=5
NodeName=n[1-{nodes}] NodeAddr={addresses} CPUs=4 RealMemory=4000 State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=60 State=UP
PartitionName=closed Nodes=ALL State=DRAIN
PartitionName=down Nodes=ALL State=DOWN
"""
_POLL_S = 0.1


def obstacle() -> str | None:
    """Why no Slurm can be started here; None where one can."""
    missing = [program for program in _PROGRAMS if _found(program) is None]
    if missing:
        return f"{' and '.join(missing)} not found: apt-get install slurm-wlm"
    return spaces.obstacle()


def _found(program: str) -> str | None:
    return shutil.which(program, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")


class Cluster:
    """The controller is host 0 of the rig, and node `n1` host 1."""

    def __init__(self, rig: Rig, folder: Path) -> None:
        self.folder, self._rig = folder, rig
        self._environment = {"SLURM_CONF": str(folder / "slurm.conf")}
        self._daemons: dict[str, subprocess.Popen[str]] = {}
        for number, host in enumerate(rig.hosts):
            # `ip netns exec` would hide the control groups from slurmd
            enter = ("unshare", "--uts", "--mount", "sh", "-c", _ENTER, "enter")
            network = ("nsenter", f"--net=/run/netns/{host.name}")
            host.prefix = (*network, *enter, f"n{number}", str(folder))  # type: ignore[assignment]

    @property
    def controller(self) -> Host:
        """Where users log in."""
        return self._rig.hosts[0]

    @property
    def nodes(self) -> Sequence[Host]:
        """The hosts of Slurm's nodes."""
        return self._rig.hosts[1:]

    def start(self) -> None:
        """Start all daemons, and wait for the nodes."""
        self._write_files()
        munge = self.folder / "munge"
        self._start(
            "munge",
            self.controller,
            "munged",
            "--foreground",
            "--force",
            f"--socket={munge}.socket",
            f"--key-file={munge}.key",
            f"--pid-file={munge}.pid",
            f"--log-file={munge}.log",
            f"--seed-file={munge}.seed",
        )
        wait_until(lambda: Path(f"{munge}.socket").exists(), "munged listens")
        self._start("n0", self.controller, "slurmctld", "-D", "-f", str(self.folder / "slurm.conf"))
        for number in range(1, len(self._rig.hosts)):
            self.start_node(number)
        wait_until(lambda: self.states() == {"idle"}, "all nodes are idle")

    def start_node(self, number: int) -> None:
        """Start the daemon of a node."""
        config = str(self.folder / "slurm.conf")
        name, host = f"n{number}", self._rig.hosts[number]
        self._start(name, host, "slurmd", "-D", "-f", config, "-N", name)

    def lose_node(self, number: int) -> None:
        """Kill all that runs on a node."""
        host = self._rig.hosts[number]
        for pid in spaces.inhabitants(host.name):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, 9)
        self._daemons.pop(f"n{number}").wait()

    def states(self) -> set[str]:
        """The states of all nodes."""
        done = self.run("sinfo", "--noheader", "-N", "-o", "%t")
        return set(done.stdout.split()) if not done.returncode else {"unknown"}

    def run(
        self,
        *command: str,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        timeout_s: float = 120.0,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command as a user does who is logged in at the controller."""
        return self.controller.run(
            command, {**self._environment, **(env or {})}, timeout_s=timeout_s, cwd=cwd
        )

    def ask(self, *command: str) -> str:
        """What a command of Slurm prints."""
        done = self.run(*command)
        assert not done.returncode, done.stderr
        return done.stdout.strip()

    def job(self, job_id: str) -> dict[str, str]:
        """What Slurm knows of a job."""
        words = self.ask("scontrol", "--oneliner", "show", "job", job_id).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def _write_files(self) -> None:
        addresses = self._rig.addresses
        names = "".join(f"{address} n{n}\n" for n, address in enumerate(addresses))
        (self.folder / "hosts").write_text(f"127.0.0.1 localhost\n{names}")
        (self.folder / "state").mkdir()
        key = self.folder / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(secrets.token_bytes(128))
        config = _CONFIG.format(
            folder=self.folder,
            controller=addresses[0],
            nodes=len(addresses) - 1,
            addresses=",".join(addresses[1:]),
        )
        (self.folder / "slurm.conf").write_text(config)

    def _start(self, name: str, host: Host, program: str, *arguments: str) -> None:
        with open(self.folder / f"{name}.out", "a") as output:
            self._daemons[name] = host.start(
                [str(_found(program)), *arguments], self._environment, stdout=output, stderr=output
            )


@contextlib.contextmanager
def cluster(folder: Path, nodes: int = 4) -> Iterator[Cluster]:
    """A running Slurm; the rig ends all its processes."""
    with hosts(nodes + 1) as rig:
        found = Cluster(rig, folder)
        found.start()
        yield found


def wait_until(reached: Callable[[], bool], what: str, within_s: float = 60.0) -> None:
    """Poll until a state is reached."""
    end = time.monotonic() + within_s
    while not reached():
        assert time.monotonic() < end, f"not within {within_s:g} s: {what}"
        time.sleep(_POLL_S)
