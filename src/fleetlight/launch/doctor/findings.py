# SPDX-License-Identifier: Apache-2.0
"""Derive problems, which make a machine unfit, and advice from the facts. Pure."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping

from fleetlight.launch.doctor.messages import Exam, Facts, Link
from fleetlight.roles.address import is_loopback

#: the size of gradients that times are estimated for: 25 million float32 values
MEGABYTES = 100
#: seconds per step for those at which a network counts as slow, and as not fast
_SLOW_S, _MODEST_S = 0.5, 0.2
_LATE_S, _CLOCK_S = 0.02, 1.0
_LITTLE_SHARED, _FEW_FILES = 64 << 20, 1024
_AGAIN = "read the output of its doctor, and restart all doctors"
_FIREWALLS = "let the firewalls pass TCP in both directions, and restart the doctors"


@dataclasses.dataclass(frozen=True)
class Finding:
    """A sentence about the state, and one about what to do."""

    is_problem: bool
    what: str
    remedy: str


def machine_findings(facts: Facts, where: str = "this machine") -> Iterator[Finding]:
    """The findings about one machine."""
    if facts.torch == "not installed":
        yield _problem(f"torch is not installed on {where}", "pip install torch")
    if facts.shared_memory is None or facts.shared_memory <= _LITTLE_SHARED:
        size = "no" if facts.shared_memory is None else f"{facts.shared_memory >> 20} MiB of"
        yield _advice(
            f"{where} has {size} shared memory (/dev/shm), which its workers use to sum gradients",
            "start the container with --shm-size=1g, or more for larger models",
        )
    if facts.files is not None and facts.files < _FEW_FILES:
        yield _advice(
            f"a process on {where} may open only {facts.files} files, sockets included",
            "ulimit -n 65536",
        )
    yield from _thread_findings(facts, where)


def _thread_findings(facts: Facts, where: str) -> Iterator[Finding]:
    workers = facts.asked.workers
    if workers > facts.cores and not facts.gpus:
        yield _advice(
            f"{workers} workers would share the {facts.cores} cores of {where}",
            "start at most as many workers as there are cores",
        )
    threads = facts.threads or ""
    if threads.isdecimal() and workers > 1 and int(threads) * workers > facts.cores:
        yield _advice(
            f"OMP_NUM_THREADS={threads} for each of {workers} workers is more than the "
            f"{facts.cores} cores of {where}",
            "unset it: fleetrun then divides the cores among the workers",
        )


def exam_findings(exam: Exam) -> list[Finding]:
    """The findings about all machines and their links; problems first."""
    found = [
        *_absence_findings(exam),
        *_difference_findings(exam),
        *_name_findings(exam),
        *_port_findings(exam),
        *itertools.chain(
            *(machine_findings(f, exam.asked.hosts[n]) for n, f in exam.facts.items())
        ),
        *_link_findings(exam),
        *_clock_findings(exam),
        *_bandwidth_findings(exam),
    ]
    return sorted(found, key=lambda finding: not finding.is_problem)


def _absence_findings(exam: Exam) -> Iterator[Finding]:
    asked = exam.asked
    for number, why in exam.absent.items():
        yield _problem(f"{asked.hosts[number]} is absent: {why}", _how_to_join(exam, number))
    for number, why in exam.uninformed.items():
        yield _problem(
            f"{asked.hosts[number]} did not receive the results: {why}",
            "read the output of its doctor; if only long messages get lost, try "
            f"`ip link set dev {exam.facts[number].interface or 'INTERFACE'} mtu 1400` on both",
        )


def _how_to_join(exam: Exam, number: int) -> str:
    asked, why = exam.asked, exam.absent[number]
    command = f"fleetlight doctor --ips {','.join(asked.names)} --port {asked.port}"
    if _is_gone(why):
        return _AGAIN
    if "did not reply" in why:
        return (
            "the process that listens there is not a doctor: find it with "
            f"`ss -ltnp 'sport = {asked.port}'`, or choose another --port on all machines"
        )
    if "refused" in why:
        return f"start `{command}` there"
    if "no reply" in why or "unreachable" in why or "no route" in why:
        return (
            f"check that it runs (ping {asked.hosts[number]}), and let its firewall pass TCP port "
            f"{asked.port}"
        )
    return f"start `{command}` on every machine, with the same list in the same order"


def _is_gone(why: str) -> bool:
    """True when a doctor was reachable and has ended."""
    return "disconnected" in why or why.startswith("lost ")


def _difference_findings(exam: Exam) -> Iterator[Finding]:
    for what, must in (("fleetlight", True), ("torch", True), ("python", False)):
        kind = _problem if must else _advice
        if listed := _differing(exam, {n: getattr(f, what) for n, f in exam.facts.items()}):
            yield kind(
                f"{what} differs between the machines: {listed}",
                f"install one {what} on all machines",
            )
    if listed := _differing(exam, {n: f.mtu for n, f in exam.facts.items() if f.mtu}):
        yield _advice(
            f"the MTU differs between the machines: {listed}",
            "set one MTU on all interfaces, or large packets may be lost",
        )
    options = {
        n: f"--nproc {f.asked.workers}, --port {f.asked.port}" for n, f in exam.facts.items()
    }
    if listed := _differing(exam, options):
        yield _advice(
            f"the doctors have different options: {listed}", "start all with the same options"
        )


def _differing(exam: Exam, values: Mapping[int, object]) -> str:
    """Each value with the machines that have it, "" if all values are equal."""
    kinds = dict.fromkeys(values.values())
    if len(kinds) < 2:
        return ""
    listed = []
    for kind in kinds:
        hosts = [exam.asked.hosts[number] for number, value in values.items() if value == kind]
        listed.append(f"{kind} on {', '.join(hosts)}")
    return "; ".join(listed)


def _name_findings(exam: Exam) -> Iterator[Finding]:
    listed = [
        f"{facts.name} for {facts.name_address} on {exam.asked.hosts[number]}"
        for number, facts in exam.facts.items()
        if is_loopback(facts.name_address or "") and not is_loopback(exam.asked.hosts[number])
    ]
    if listed:
        yield _advice(
            f"names of machines resolve to loopback addresses: {', '.join(listed)}",
            "fleetlight uses the routing table instead; for other programs, correct /etc/hosts",
        )


def _port_findings(exam: Exam) -> Iterator[Finding]:
    for facts in exam.facts.values():
        for why in facts.taken.values():
            # after the semicolon follows the advice of fleetrun
            yield _problem(
                why.partition(";")[0],
                "end that process, or choose another --port here and --start_port for fleetrun: "
                "the ports of a job begin one after it",
            )


def _link_findings(exam: Exam) -> Iterator[Finding]:
    hosts = exam.asked.hosts
    for link in exam.links:
        way = f"{hosts[link.sender]} -> {hosts[link.receiver]}"
        if link.error:
            yield _problem(
                f"{way} could not be measured: {link.error}",
                _AGAIN if _is_gone(link.error) else _FIREWALLS,
            )
        elif not link.bytes_per_s:
            yield _problem(
                f"{way}: small messages arrive, large ones do not",
                "the path has a smaller MTU: try `ip link set dev "
                f"{_interface(exam, link)} mtu 1400` on both",
            )
        if link.closed:
            yield _closed(exam, link, way)
        if (link.round_trip_s or 0.0) > _LATE_S:
            yield _advice(
                f"{way} and back takes {1000 * (link.round_trip_s or 0.0):.0f} ms",
                "send fewer, larger messages: a larger fuse_grad_size_in_MB, or localsgd",
            )


def _interface(exam: Exam, link: Link) -> str:
    return exam.facts[link.sender].interface or "INTERFACE"


def _closed(exam: Exam, link: Link, way: str) -> Finding:
    """A finding about ports at which a doctor listens and no connection arrives."""
    fixed = [port for port in link.closed if port in exam.asked.ports]
    host = exam.asked.hosts[link.receiver]
    listed = ", ".join(f"{port} ({why})" for port, why in link.closed.items())
    last = exam.asked.ports[-1]
    remedy = f"let the firewall of {host} pass TCP ports {exam.asked.port}-{last}"
    if len(fixed) < len(link.closed):
        remedy += (
            " and all above 1024 from the other machines: Gloo and NCCL choose among them"
            if fixed
            else " and all above 1024, among which Gloo and NCCL choose"
        )
    return _problem(f"{way}: no connection to ports {listed}", remedy)


def _clock_findings(exam: Exam) -> Iterator[Finding]:
    for number, ahead in exam.clocks.items():
        if abs(ahead) > _CLOCK_S:
            yield _advice(
                f"the clock of {exam.asked.hosts[number]} is {abs(ahead):.1f} s "
                f"{'ahead of' if ahead > 0 else 'behind'} that of {exam.asked.hosts[0]}",
                "run NTP (timedatectl set-ntp true): logs and certificates depend on the clock",
            )


def _bandwidth_findings(exam: Exam) -> Iterator[Finding]:
    measured = [link for link in exam.links if link.bytes_per_s]
    if not measured:
        return
    slowest = min(measured, key=lambda link: link.bytes_per_s or 0.0)
    hosts, rate = exam.asked.hosts, slowest.bytes_per_s or 0.0
    step = seconds_a_step(rate, len(hosts))
    what = (
        f"{bits(rate)} from {hosts[slowest.sender]} to {hosts[slowest.receiver]}: {MEGABYTES} MB "
        f"of gradients take {seconds(step)} a step by hierarchical all-reduce"
    )
    if step >= _SLOW_S:
        yield _advice(what, _for_slow(step))
    elif step >= _MODEST_S:
        yield _advice(
            what,
            "use_hierarchical_allreduce=True keeps this time with several workers per host; "
            f"compression='bf16' reduces it to {seconds(step / 2)}",
        )


def _for_slow(step: float) -> str:
    return (
        "use_hierarchical_allreduce=True keeps this time for any number of workers; "
        f"compression='int8' reduces it to about {seconds(step / 4)}, localsgd with k_steps=4 "
        f"{seconds(step / 4)} on average, diloco with k_steps=500 {seconds(step / 500)}"
    )


def seconds_a_step(bytes_per_s: float, hosts: int) -> float:
    """The time that each host sends per step of hierarchical all-reduce."""
    return 2 * (hosts - 1) / hosts * MEGABYTES * 1e6 / bytes_per_s


def bits(bytes_per_s: float) -> str:
    """`940 Mbit/s`."""
    rate = 8 * bytes_per_s
    return f"{rate / 1e9:.3g} Gbit/s" if rate >= 1e9 else f"{rate / 1e6:.3g} Mbit/s"


def seconds(value: float) -> str:
    """`4.1 s`, `12 ms`."""
    return f"{value:.2g} s" if 0.1 <= value < 10 else _plain(value)


def _plain(value: float) -> str:
    return f"{value:.0f} s" if value >= 10 else f"{1000 * value:.2g} ms"


def _problem(what: str, remedy: str) -> Finding:
    return Finding(True, what, remedy)


def _advice(what: str, remedy: str) -> Finding:
    return Finding(False, what, remedy)
