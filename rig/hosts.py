# SPDX-License-Identifier: Apache-2.0
"""Several hosts on one machine, joined by a switch.

    with hosts(3, rate="200mbit") as rig:
        running = [host.start([sys.executable, "train.py"]) for host in rig.hosts]

Each host is a network namespace with one link, `cable0`, `cable1` and so on, to a bridge in a
namespace of its own. All of it is taken away at the end of the block, at the end of the program,
after Ctrl-C and SIGTERM; after SIGKILL by the next rig.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rig import spaces
from rig.spaces import RigError

#: the hosts are .1, .2 and so on in it
NETWORK = "10.213.7."
MAX_HOSTS = 254
_SWITCH = "switch"
# what a link of a gigabit carries in two milliseconds, and more than the largest packet
_BURST = "256kb"
# how long a packet may queue until it is dropped: long enough that TCP finds the rate first
_LATENCY = "400ms"


class Host:
    """One host: a namespace with an address, where processes may be started."""

    def __init__(self, name: str, switch: str, number: int) -> None:
        self.name = name
        self.number = number
        self.address = f"{NETWORK}{number + 1}"
        #: its network interface
        self.device = f"cable{number}"
        #: what stands before a command to run it on this host
        self.prefix = ("ip", "netns", "exec", name)
        self._switch = switch
        self._port = f"port{number}"
        self._processes: list[subprocess.Popen[str]] = []

    def start(
        self, argv: Sequence[str], env: Mapping[str, str] | None = None, **how: Any
    ) -> subprocess.Popen[str]:
        """Start a process here, as leader of a group of its own.

        `env` is added to the environment of this process; `how` goes to `Popen` (cwd, stdout...).
        """
        how = {"stdin": subprocess.DEVNULL, "text": True} | how
        process: subprocess.Popen[str] = subprocess.Popen(
            [*self.prefix, *argv], env={**os.environ, **(env or {})}, start_new_session=True, **how
        )
        self._processes.append(process)
        return process

    def run(
        self,
        argv: Sequence[str],
        env: Mapping[str, str] | None = None,
        *,
        timeout_s: float = 60.0,
        **how: Any,
    ) -> subprocess.CompletedProcess[str]:
        """Run a process here to its end; what it printed, errors apart, and its exit code."""
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        process = self.start(argv, env, **(pipes | how))
        try:
            output, errors = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            with process:  # closes its pipes
                self.kill(process)
            raise
        return subprocess.CompletedProcess(argv, process.returncode, output, errors)

    def sent(self) -> int:
        """How many bytes have left this host, headers and what was sent again included."""
        return self._counted("tx")

    def received(self) -> int:
        """How many bytes have reached this host."""
        return self._counted("rx")

    def _counted(self, way: str) -> int:
        link = json.loads(
            spaces.command("ip", "-n", self.name, "-j", "-s", "link", "show", "dev", self.device)
        )
        return int(link[0]["stats64"][way]["bytes"])

    def cut(self) -> None:
        """Pull the cable at the switch: no packet passes, and nobody is told."""
        self._set_port("down")

    def mend(self) -> None:
        """Put the cable back."""
        self._set_port("up")

    def _set_port(self, state: str) -> None:
        spaces.command("ip", "-n", self._switch, "link", "set", self._port, state)

    def shape(self, rate: str | None) -> None:
        """Let no more than this pass in each direction ("200mbit"); None: as fast as it goes."""
        for space, device in ((self.name, self.device), (self._switch, self._port)):
            if rate is None:
                with contextlib.suppress(RigError):  # it was not shaped
                    spaces.command("tc", "-n", space, "qdisc", "delete", "dev", device, "root")
                continue
            shaped = ("root", "tbf", "rate", rate, "burst", _BURST, "latency", _LATENCY)
            spaces.command("tc", "-n", space, "qdisc", "replace", "dev", device, *shaped)

    def kill(self, process: subprocess.Popen[str]) -> None:
        """End a process that was started here, with its children."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def make(self) -> None:
        """Bring the host into being, and its cable to the switch."""
        spaces.make(self.name)
        end = ("name", self.device, "netns", self.name)
        port = ("name", self._port, "netns", self._switch)
        spaces.command("ip", "link", "add", *end, "type", "veth", "peer", *port)
        for space, device in ((self.name, self.device), (self._switch, self._port)):
            # addresses that look for neighbours by themselves would be counted with what is sent
            link = ("ip", "-n", space, "link", "set", "dev", device)
            spaces.command(*link, "addrgenmode", "none", "up")
        spaces.command(
            "ip", "-n", self._switch, "link", "set", "dev", self._port, "master", _SWITCH
        )
        spaces.command(
            "ip", "-n", self.name, "address", "add", f"{self.address}/24", "dev", self.device
        )

    def remove(self) -> None:
        """End what runs here, and take the host away."""
        for process in self._processes:
            # one that has been waited for has given its id back
            if process.poll() is None:
                with process:
                    self.kill(process)
        spaces.remove(self.name)


@dataclasses.dataclass(frozen=True)
class Rig:
    """Hosts and the switch between them."""

    hosts: tuple[Host, ...]
    switch: str

    @property
    def addresses(self) -> tuple[str, ...]:
        """Those of the hosts, in order."""
        return tuple(host.address for host in self.hosts)

    @property
    def ips(self) -> str:
        """The addresses as `fleetrun --ips` takes them."""
        return ",".join(self.addresses)

    def make(self, rate: str | None) -> None:
        """Bring all of it into being."""
        spaces.make(self.switch)
        bridge = ("name", _SWITCH, "type", "bridge")
        spaces.command("ip", "-n", self.switch, "link", "add", *bridge)
        up = ("dev", _SWITCH, "addrgenmode", "none", "up")
        spaces.command("ip", "-n", self.switch, "link", "set", *up)
        for host in self.hosts:
            host.make()
            if rate is not None:
                host.shape(rate)

    def remove(self) -> None:
        """Take all of it away; once more does no harm."""
        for host in self.hosts:
            host.remove()
        spaces.remove(self.switch)


@contextlib.contextmanager
def hosts(count: int, rate: str | None = None) -> Iterator[Rig]:
    """So many hosts, each with a link of this rate ("200mbit") or an unshaped one."""
    if not 1 <= count <= MAX_HOSTS:
        raise RigError(f"got {count} hosts, expected 1 to {MAX_HOSTS}, all in {NETWORK}0/24")
    if (why := spaces.obstacle()) is not None:
        raise RigError(why)
    spaces.sweep()
    start = spaces.prefix()
    switch = start + _SWITCH
    rig = Rig(tuple(Host(f"{start}{number}", switch, number) for number in range(count)), switch)
    atexit.register(rig.remove)
    try:
        with _sigterm_as_ctrl_c():
            rig.make(rate)
            yield rig
    finally:
        rig.remove()
        atexit.unregister(rig.remove)


@contextlib.contextmanager
def _sigterm_as_ctrl_c() -> Iterator[None]:
    """By itself, SIGTERM ends Python without a chance to tidy up."""
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
