# SPDX-License-Identifier: Apache-2.0
"""Who belongs to the job: what members say when they arrive, and what follows. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import msgspec

from fleetlight.errors import MembershipError
from fleetlight.roles.address import is_loopback


class MemberHello(msgspec.Struct, frozen=True, kw_only=True):
    """What a member says when it arrives."""

    kind: str
    #: None where a scheduler hands out the indices
    index: int | None
    address: str
    #: where a parameter server listens, at that address
    port: int | None = None
    hostname: str
    pid: int
    node_id: str | None = None
    torch: str = ""
    fleetlight: str = ""
    backend: str = "gloo"

    def where(self) -> str:
        """The member's place, for error texts."""
        return f"pid {self.pid} on {self.hostname} ({self.address})"


def encode(hello: MemberHello) -> bytes:
    """The wire form of a hello."""
    return msgspec.json.encode(hello)


def decode(data: bytes) -> MemberHello:
    """A hello from its wire form."""
    try:
        return msgspec.json.decode(data, type=MemberHello)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        if isinstance(error, msgspec.ValidationError):
            cause = "a member has another version of Fleetlight; install the same one everywhere"
        else:
            cause = "another program uses this port; give the job another one by FLEET_MASTER"
        raise MembershipError(
            "a member introduced itself with something that is no hello "
            f"({error}), expected one of this version: {cause}"
        ) from None


def check_alike(hellos: Mapping[int, MemberHello]) -> None:
    """All members must run the same torch, Fleetlight and backend; names the first two that differ.

    Two versions of torch may disagree on what travels between them, and a worker without a GPU
    cannot answer one that has one.
    """
    for fact in ("torch", "fleetlight", "backend"):
        first = hellos[min(hellos)]
        for index, hello in sorted(hellos.items()):
            if getattr(hello, fact) != getattr(first, fact):
                raise MembershipError(
                    f"worker {min(hellos)} ({first.where()}) runs {fact} "
                    f"{getattr(first, fact)}, but worker {index} ({hello.where()}) runs "
                    f"{fact} {getattr(hello, fact)}; use the same on every machine"
                )


def absent(expected: int, present: Collection[int]) -> list[int]:
    """The indices that have not arrived."""
    return [index for index in range(expected) if index not in present]


def missing_text(
    expected: int, present: Mapping[int, MemberHello], endpoints: Sequence[str], deadline_s: float
) -> str:
    """What to say when the deadline has passed and somebody is missing."""
    gone = absent(expected, present)
    names = ", ".join(
        f"worker {index}" + (f" ({endpoints[index]})" if index < len(endpoints) else "")
        for index in gone
    )
    return (
        f"{expected - len(gone)} of {expected} workers came within {deadline_s:g} s; "
        f"missing: {names}. Start them with the same number of workers and the same master, "
        "or look at why they did not start"
    )


def hand_out(hellos: Sequence[MemberHello]) -> list[int]:
    """The index of each arrival: a numeric node id is the index; the others fill the gaps.

    Members of one host get neighbouring indices, hosts in the order of their first arrival.
    """
    total = len(hellos)
    claimed = _claims(hellos)
    free = iter(index for index in range(total) if index not in claimed.values())
    hosts = list(dict.fromkeys(hello.address for hello in hellos))
    order = sorted(
        (n for n in range(total) if n not in claimed),
        key=lambda n: (hosts.index(hellos[n].address), n),
    )
    given = claimed | dict(zip(order, free, strict=False))
    return [given[n] for n in range(total)]


def _claims(hellos: Sequence[MemberHello]) -> dict[int, int]:
    """Arrivals whose node id is a number that can serve as their index."""
    claims: dict[int, int] = {}
    for n, hello in enumerate(hellos):
        if hello.node_id is None or not _is_number(hello.node_id):
            continue
        index = int(hello.node_id)
        if index in claims.values():
            raise MembershipError(
                f"two {hello.kind}s call themselves MS_NODE_ID={index}; the second is "
                f"{hello.where()}"
            )
        if index < len(hellos):
            claims[n] = index
    return claims


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit()


def arrived_text(kind: str, expected: int, hellos: Iterable[MemberHello], deadline_s: float) -> str:
    """What a scheduler says when too few members have come."""
    came = list(hellos)
    who = "; ".join(_name(hello) for hello in came) or "nobody"
    return (
        f"{len(came)} of {expected} {kind}s came within {deadline_s:g} s, "
        f"{expected - len(came)} missing{_missing_ids(expected, came)}. Here: {who}. "
        f"Start {expected} {kind}s, or set their number to what you start"
    )


def check_reachable(servers: Iterable[MemberHello], workers: Iterable[MemberHello]) -> None:
    """Workers on other machines cannot call a server at a loopback address."""
    far = next((worker for worker in workers if not is_loopback(worker.address)), None)
    near = next((server for server in servers if is_loopback(server.address)), None)
    if far is not None and near is not None:
        raise MembershipError(
            f"the server {near.where()} has an address that only its own machine can reach, but "
            f"worker {far.where()} may be on another; give the server its address in the network "
            "(MS_WORKER_IP), or MS_SCHED_HOST one that is no loopback on the scheduler's machine"
        )


def _name(hello: MemberHello) -> str:
    return (f"node {hello.node_id}, " if hello.node_id else "") + hello.where()


def _missing_ids(expected: int, came: Sequence[MemberHello]) -> str:
    ids = {int(h.node_id) for h in came if h.node_id and _is_number(h.node_id)}
    # ids that are only unique in the cluster are no indices
    if not came or len(ids) != len(came) or max(ids) >= expected:
        return ""
    return " (MS_NODE_ID " + ", ".join(map(str, absent(expected, ids))) + ")"
