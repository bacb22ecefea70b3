# SPDX-License-Identifier: Apache-2.0
"""Which processes belong to the job: how they introduce themselves, and their indices. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import msgspec

from fleetlight.errors import MembershipError
from fleetlight.roles.address import is_loopback


class MemberHello(msgspec.Struct, frozen=True, kw_only=True):
    """The first message of a member: who it is, and what it runs."""

    kind: str
    #: None where a scheduler assigns the indices
    index: int | None
    address: str
    hostname: str
    pid: int
    node_id: str | None = None
    torch: str = ""
    fleetlight: str = ""
    backend: str = "gloo"

    def where(self) -> str:
        """The process and host of the member, for error texts."""
        return f"pid {self.pid} on {self.hostname} ({self.address})"


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """Where a member is among the others of its kind."""

    local_rank: int
    local_size: int
    node_rank: int
    node_num: int


def place_of(addresses: Sequence[str], index: int) -> Place:
    """The place of member `index`; members with one address share a host."""
    own, order = addresses[index], list(dict.fromkeys(addresses))
    return Place(
        local_rank=list(addresses[:index]).count(own),
        local_size=list(addresses).count(own),
        node_rank=order.index(own),
        node_num=len(order),
    )


def encode(hello: MemberHello) -> bytes:
    """Encode a hello for the store."""
    return msgspec.json.encode(hello)


def decode(data: bytes) -> MemberHello:
    """Decode a hello from the store."""
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


def check_same_versions(hellos: Mapping[int, MemberHello]) -> None:
    """Raise unless all members run the same torch, Fleetlight and backend.

    Two versions of torch may disagree on their messages, and a worker without a GPU has none of the
    process groups of a worker with one.
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
    """The indices of members that have not arrived."""
    return [index for index in range(expected) if index not in present]


def missing_text(
    expected: int, present: Mapping[int, MemberHello], endpoints: Sequence[str], deadline_s: float
) -> str:
    """The error text where workers are missing at the deadline."""
    gone = absent(expected, present)
    names = ", ".join(
        f"worker {index}" + (f" ({endpoints[index]})" if index < len(endpoints) else "")
        for index in gone
    )
    return (
        f"{expected - len(gone)} of {expected} workers joined within {deadline_s:g} s; "
        f"missing: {names}. Start them with the same number of workers and the same master, "
        "or look at why they did not start"
    )


def assign_indices(hellos: Sequence[MemberHello]) -> list[int]:
    """The index of each arrival: one that it knows itself, or a numeric node id.

    The others fill the gaps.

    Members of one host get consecutive indices, hosts in the order of their first arrival.
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
    """The arrivals that know their index themselves."""
    claims: dict[int, int] = {}
    for n, hello in enumerate(hellos):
        index = claimed_index(hello)
        if index is None or (hello.index is None and index >= len(hellos)):
            continue
        if index in claims.values():
            raise MembershipError(_twice(hellos, claims, n, index))
        claims[n] = index
    return claims


def claimed_index(hello: MemberHello) -> int | None:
    """The index that a member brings along, or its numeric node id."""
    if hello.index is not None:
        return hello.index
    if hello.node_id is None or not _is_number(hello.node_id):
        return None
    return int(hello.node_id)


def _twice(hellos: Sequence[MemberHello], claims: Mapping[int, int], n: int, index: int) -> str:
    first = hellos[next(arrival for arrival, claimed in claims.items() if claimed == index)]
    hello = hellos[n]
    if hello.node_id == str(index):
        return (
            f"two {hello.kind}s call themselves MS_NODE_ID={index}; the second is {hello.where()}"
        )
    return (
        f"two {hello.kind}s say they are {hello.kind} {index}: {first.where()} and "
        f"{hello.where()}; give each its own index"
    )


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit()


def arrived_text(kind: str, expected: int, hellos: Iterable[MemberHello], deadline_s: float) -> str:
    """The error text of a scheduler where members are missing at the deadline."""
    came = list(hellos)
    who = "; ".join(_name(hello) for hello in came) or "none"
    return (
        f"{len(came)} of {expected} {kind}s joined within {deadline_s:g} s, "
        f"{expected - len(came)} missing{_missing_ids(expected, came)}. Here: {who}. "
        f"Start {expected} {kind}s, or set their number to what you start"
    )


def check_reachable(servers: Iterable[MemberHello], workers: Iterable[MemberHello]) -> None:
    """Raise for a server with a loopback address where workers may be on other machines."""
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
    # ids that are only unique in the cluster are not indices
    if not came or len(ids) != len(came) or max(ids) >= expected:
        return ""
    return " (MS_NODE_ID " + ", ".join(map(str, absent(expected, ids))) + ")"
