# SPDX-License-Identifier: Apache-2.0
"""Forms a `Group`: joins the rendezvous, introduces this worker, opens the process group."""

from __future__ import annotations

import importlib
import os
import platform
from collections.abc import Mapping
from datetime import timedelta

import msgspec
import torch
import torch.distributed as dist

from fleetlight.collective.encrypted.links import ENCRYPTED, Links
from fleetlight.collective.group import Group
from fleetlight.collective.membership.diagnosis import first_sentence
from fleetlight.collective.membership.liveness import Liveness
from fleetlight.collective.membership.rendezvous import (
    RendezvousDeadline,
    gather,
    join,
    kept_for_readers,
    serve,
    store_errors,
)
from fleetlight.collective.membership.scheduler import register
from fleetlight.collective.routes.levels import hosts_of
from fleetlight.errors import MembershipError, RoleError, StrategyError, counted
from fleetlight.observe.log import logger
from fleetlight.roles import members
from fleetlight.roles.address import choose_interface, is_own, route_to
from fleetlight.roles.dialects import torchrun
from fleetlight.roles.members import MemberHello
from fleetlight.roles.role import Endpoint, Kind, Role, endpoint_text
from fleetlight.security.context import Contexts
from fleetlight.torch_compat.c10d import PrefixStore, Store, default_store
from fleetlight.wire.forking import keep_port_from_children, kept_from_children


def form(
    role: Role,
    version: str,
    deadline_s: float,
    tls: Contexts | None = None,
) -> tuple[Role, Group]:
    """Join the other workers; returns the complete role and the group."""
    if dist.is_initialized():
        return _adopt(role, version, deadline_s, tls)
    if role.worker_num == 1 and not role.master_is_outside:
        device = _device(role)
        return role, Group(deadline_s=deadline_s, device=device)
    deadline = RendezvousDeadline(deadline_s)
    with kept_from_children():
        is_plain = tls is not None and _keeps_plain_store(role)
        if is_plain:
            # then Gloo, too, stays on the loopback device
            role = role.replace(address=role.address or "127.0.0.1")
        store = _join_store(role, deadline, None if is_plain else tls)
        hello = hello_of(role, version)
        if role.index is None:
            role, hello = register(store, role, hello, deadline)
        liveness = Liveness(store, _index(role))
        with kept_for_readers(store, role.worker_num):
            hellos = _introduce(store, role, hello, deadline)
            role = located(role, hellos)
            _check_own_gpu(role, hello)
            if role.worker_num > 1:
                _refuse_unencrypted_nccl(hellos, hello, tls)
                if is_plain and len(hosts_of(hellos)) > 1:
                    raise _no_tls_error(role)
        device = _device(role)
        links = None
        if role.worker_num > 1:
            links = _links(store, role, hellos, tls)
            _open_process_group(store, role, hello, deadline, links)
        liveness.set_workers(hellos).start()
    carrier = hello.backend if links is None else "TLS 1.3 between hosts"
    logger.info("%s", _summary(role, hellos, carrier))
    interface = choose_interface(role.address or "127.0.0.1")
    logger.debug("own address %s, interface %s", role.address, interface)
    return role, Group(
        index=_index(role),
        hellos=hellos,
        liveness=liveness,
        deadline_s=deadline_s,
        device=device,
        backend=hello.backend,
        links=links,
    )


def own_address(role: Role) -> str:
    """The address of this machine by which the other members reach it."""
    return role.address or route_to(_master(role)[0])


def located(role: Role, hellos: Mapping[int, MemberHello]) -> Role:
    """Add local rank and number of hosts, from the addresses, where the dialect has none."""
    index = _index(role)
    addresses = [hellos[i].address for i in sorted(hellos)]
    place = members.place_of(addresses, index)
    found = {**msgspec.structs.asdict(place), "address": addresses[index]}
    return role.replace(**{k: v for k, v in found.items() if getattr(role, k) is None})


def _join_store(role: Role, deadline: RendezvousDeadline, tls: Contexts | None) -> Store:
    master = _master(role)
    keep_port_from_children(master[1])
    if role.index == 0 and not role.master_is_outside:
        store = serve(master, deadline, tls)
    else:
        store = join(master, deadline, role.master_keeper or "worker 0", tls)
    return PrefixStore(f"fleet/{role.restart}", store)


def _keeps_plain_store(role: Role) -> bool:
    """True where torchrun serves the store on this host; elsewhere a job with `ssl` refuses it."""
    if role.dialect != torchrun.NAME or not role.master_is_outside:
        return False
    if role.local_size == role.worker_num and is_own(_master(role)[0]):
        # its messages stay on this host
        return True
    raise _no_tls_error(role)


def _no_tls_error(role: Role) -> StrategyError:
    return StrategyError(
        f"strategy.ssl: torchrun keeps the rendezvous store of this job at "
        f"{endpoint_text(_master(role))} in a store of torch's, which has no TLS, and not all of "
        f"the {role.worker_num} workers are on its host; start the job with fleetrun --ssl in "
        "place of torchrun"
    )


def _master(role: Role) -> Endpoint:
    if role.master is None:
        raise RoleError(
            f"{role.dialect}: {role.worker_num} workers must meet, but nothing says where; "
            "give the endpoints of the workers or of a master"
        )
    return role.master


def hello_of(role: Role, version: str) -> MemberHello:
    """How this process introduces itself."""
    return MemberHello(
        kind=role.kind.value,
        index=role.index,
        address=own_address(role),
        hostname=platform.node(),
        pid=os.getpid(),
        node_id=role.node_id,
        torch=str(torch.__version__),
        fleetlight=version,
        backend=_backend(role),
    )


def _introduce(
    store: Store, role: Role, hello: MemberHello, deadline: RendezvousDeadline
) -> dict[int, MemberHello]:
    mine = members.encode(hello)
    with store_errors():
        held = store.compare_set(f"hello/{role.index}", "", mine.decode())
    if held != mine:
        raise MembershipError(
            f"two workers say they are worker {role.index}: {members.decode(held).where()} "
            f"and {hello.where()}; give each its own index"
        )
    endpoints = [f"{host}:{port}" for host, port in role.worker_endpoints]
    hellos = gather(store, role.worker_num, endpoints, deadline)
    members.check_same_versions(hellos)
    return hellos


def _check_own_gpu(role: Role, hello: MemberHello) -> None:
    """Refuse NCCL for workers that share a GPU: only now is it known how many this host has."""
    if hello.backend == "nccl" and _backend(role) != "nccl":
        raise MembershipError(
            f"{role.local_size} workers share the {torch.cuda.device_count()} GPU(s) of this host, "
            f"but each said that it is alone there ({role.dialect}), and NCCL needs a GPU each; "
            "start them with fleetrun, or set LOCAL_WORLD_SIZE and LOCAL_RANK, and they reduce "
            "gradients by Gloo; or start one worker a GPU"
        )


def _refuse_unencrypted_nccl(
    hellos: Mapping[int, MemberHello], hello: MemberHello, tls: Contexts | None
) -> None:
    """Refuse `ssl` where NCCL sends between hosts: it cannot encrypt."""
    if tls is not None and hello.backend == "nccl" and len(hosts_of(hellos)) > 1:
        raise StrategyError(
            f"strategy.ssl: the workers of this job reduce gradients by NCCL across "
            f"{len(hosts_of(hellos))} hosts, and NCCL cannot encrypt; leave ssl out and put the "
            "hosts into an encrypted network (WireGuard, IPsec), or train on CPUs"
        )


def _links(
    store: Store, role: Role, hellos: Mapping[int, MemberHello], tls: Contexts | None
) -> Links | None:
    """Open TLS connections, where the strategy asks for them and workers are on several hosts."""
    if tls is None or len(hosts_of(hellos)) == 1:
        return None
    from fleetlight.collective.encrypted.process_group import open_links

    index = _index(role)
    try:
        links = open_links(index, hellos[index].address, tls)
    except OSError as error:
        raise MembershipError(
            f"worker {index} cannot listen at {hellos[index].address} for TLS: {error.strerror}"
        ) from None
    store.set(f"tls/{index}", msgspec.json.encode(links.address).decode())
    with store_errors():
        said = {i: store.get(f"tls/{i}") for i in hellos}
    links.endpoints = {i: msgspec.json.decode(text, type=Endpoint) for i, text in said.items()}
    return links


def _open_process_group(
    store: Store, role: Role, hello: MemberHello, deadline: RendezvousDeadline, links: Links | None
) -> None:
    interface = choose_interface(hello.address)
    backend = "cpu:gloo,cuda:nccl" if hello.backend == "nccl" else "gloo"
    if links is not None:
        backend = ENCRYPTED
    # Defaults of its functions hold the process group of the moment of import, and so all
    # connections. torch's compiler imports it some time; import it while there is no process group.
    importlib.import_module("torch.distributed.nn.functional")
    try:
        dist.init_process_group(
            backend,
            store=PrefixStore("group", store),
            rank=_index(role),
            world_size=role.worker_num,
            timeout=timedelta(seconds=deadline.deadline_s),
        )
    except (RuntimeError, dist.DistError) as error:
        raise MembershipError(
            f"all {role.worker_num} workers joined, but their process group ({backend}, "
            f"interface {interface}) did not form: {first_sentence(error)}"
        ) from None


def _adopt(role: Role, version: str, deadline_s: float, tls: Contexts | None) -> tuple[Role, Group]:
    """Form a group over the process group that the script itself has opened."""
    size, index = dist.get_world_size(), dist.get_rank()
    if (role.worker_num, role.index) not in ((size, index), (1, 0)):
        raise MembershipError(
            f"torch.distributed was initialised as rank {index} of {size}, but {role.dialect} says "
            f"worker {role.index} of {role.worker_num}"
        )
    role = role.replace(index=index, worker_num=size, dialect="torch.distributed")
    if size == 1:
        return role, Group(deadline_s=deadline_s, device=_device(role))
    outside = default_store()
    with kept_from_children():
        store = PrefixStore("fleet", outside)
        hello = hello_of(
            role.replace(address=role.address or _address_towards_store(role, outside)), version
        )
        liveness = Liveness(store, index)
        with kept_for_readers(store, size):
            hellos = _introduce(store, role, hello, RendezvousDeadline(deadline_s))
            if tls is not None and len(hosts_of(hellos)) > 1:
                raise StrategyError(
                    "strategy.ssl: the script opened torch's process group itself, and what its "
                    f"workers send between {len(hosts_of(hellos))} hosts is not encrypted; leave "
                    "init_process_group out, so that fleet.init opens one inside TLS, or leave "
                    "ssl out and put the hosts into an encrypted network (WireGuard, IPsec)"
                )
        role = located(role, hellos)
        liveness.set_workers(hellos).start()
        control = _control(hello, deadline_s)
    group = Group(
        index=index,
        hellos=hellos,
        liveness=liveness,
        deadline_s=deadline_s,
        device=_device(role),
        backend="nccl" if _carries("cuda", "nccl") else "gloo",
        control=control,
        owned=False,
    )
    return role, group


def _address_towards_store(role: Role, store: Store | None) -> str:
    """The address by which this machine reaches the store of the process group."""
    while store is not None and not hasattr(store, "host"):
        store = getattr(store, "underlying_store", None)
    host = getattr(store, "host", None) or (role.master[0] if role.master else platform.node())
    return route_to(host)


def _control(hello: MemberHello, deadline_s: float) -> dist.ProcessGroup | None:
    """A process group for tensors in main memory, where the script's own takes none."""
    if _carries("cpu", "gloo"):
        return None
    choose_interface(hello.address)
    group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=timedelta(seconds=deadline_s))
    return group


def _carries(device: str, backend: str) -> bool:
    """True where the script's process group uses a backend for the tensors of a device."""
    return f"{device}:{backend}" in dist.get_backend_config().split(",")


def _backend(role: Role) -> str:
    """NCCL where each worker of this host can have a GPU of its own, else Gloo."""
    if role.kind is not Kind.WORKER or not torch.cuda.is_available():
        return "gloo"
    return "nccl" if (role.local_size or 1) <= torch.cuda.device_count() else "gloo"


def given_device(role: Role) -> torch.device:
    """The GPU that a launcher gave this worker, which becomes current; else the CPU."""
    if role.device is None or not torch.cuda.is_available():
        return torch.device("cpu")
    torch.cuda.set_device(role.device)
    return torch.device("cuda", role.device)


def _device(role: Role) -> torch.device:
    if _backend(role) != "nccl":
        return torch.device("cpu")
    index = role.device if role.device is not None else role.local_rank or 0
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def _index(role: Role) -> int:
    assert role.index is not None
    return role.index


def _summary(role: Role, hellos: Mapping[int, MemberHello], carrier: str) -> str:
    hosts = counted(role.node_num or 1, "host")
    return (
        f"collective: worker {role.index} of {len(hellos)} on {hosts}, {carrier} "
        f"(dialect {role.dialect})"
    )
