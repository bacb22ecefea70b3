# SPDX-License-Identifier: Apache-2.0
"""Format results as text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fleetlight.launch.doctor.findings import Finding, bits
from fleetlight.launch.doctor.messages import Exam, Facts
from fleetlight.observe.console import Tone, aligned, fitted, painted
from fleetlight.roles.address import Addresses


def exam_table(exam: Exam, columns: int | None = None) -> str:
    """A table of the machines, and one of the links between them, for a terminal's width."""
    heads = ["machine", "name", "fleetlight", "torch", "python", "cores", "memory", "GPUs"]
    machines = [[*heads, "interface", "MTU", "clock"]]
    for number, facts in sorted(exam.facts.items()):
        ahead = exam.clocks.get(number)
        clock = "" if ahead is None else f"{round(ahead, 3) + 0.0:+.3f} s"
        interface = [facts.interface or "?", str(facts.mtu or "?")]
        machines.append([exam.asked.hosts[number], *_machine(facts), *interface, clock])
    if not exam.links:
        return aligned(machines, columns)
    links = [["from", "to", "round trip", "bandwidth", "ports"]]
    for link in exam.links:
        ends = [exam.asked.hosts[link.sender], exam.asked.hosts[link.receiver]]
        trip = "-" if link.round_trip_s is None else f"{1000 * link.round_trip_s:.3g} ms"
        rate = "-" if link.bytes_per_s is None else bits(link.bytes_per_s)
        ports = "-" if link.error else "closed" if link.closed else "open"
        links.append([*ends, trip, rate, ports])
    return f"{aligned(machines, columns)}\n\n{aligned(links, columns)}"


def machine_table(
    facts: Facts,
    addresses: Addresses,
    mtus: Sequence[int | None],
    columns: int | None = None,
) -> str:
    """The facts about one machine, one line each."""
    rows = [
        ("name", f"{facts.name} ({facts.name_address or 'resolves to no address'})"),
        ("system", facts.system),
        ("fleetlight", facts.fleetlight),
        ("torch", facts.torch),
        ("python", facts.python),
        ("cores", str(facts.cores)),
        ("memory", _gib(facts.memory)),
        ("GPUs", str(facts.gpus)),
        ("shared memory", _gib(facts.shared_memory) + " (/dev/shm)"),
        ("open files", "no limit" if facts.files is None else str(facts.files)),
        ("OMP_NUM_THREADS", facts.threads or "not set: fleetrun divides the cores"),
    ]
    for (interface, address), mtu in zip(addresses, mtus, strict=True):
        size = f", MTU {mtu}" if mtu else ""
        rows.append(("address", f"{address} ({interface or 'interface unknown'}{size})"))
    return fitted(aligned(rows), columns)


def finding_lines(
    found: Iterable[Finding], columns: int | None = None, *, colour: bool = False
) -> str:
    """Two lines for each finding: the state, and what to do."""
    lines = []
    for finding in found:
        kind, tone = ("problem", Tone.BAD) if finding.is_problem else ("advice", Tone.WARNING)
        what = fitted(f"{kind}: {finding.what}", columns)
        lines.append(painted(kind, tone, colour) + what.removeprefix(kind))
        lines.append(fitted(f"    {finding.remedy}", columns))
    return "\n".join(lines)


def _machine(facts: Facts) -> list[str]:
    versions = [facts.name, facts.fleetlight, facts.torch, facts.python]
    return [*versions, str(facts.cores), _gib(facts.memory), str(facts.gpus)]


def _gib(size: int | None) -> str:
    return "none" if size is None else f"{size / 2**30:.3g} GiB"
