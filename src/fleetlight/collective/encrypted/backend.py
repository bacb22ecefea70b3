# SPDX-License-Identifier: Apache-2.0
"""Registers encrypted groups as a backend of torch, and gives them their connections."""

from __future__ import annotations

import socket
from typing import Any

import torch.distributed as dist

from fleetlight.collective.encrypted.links import ENCRYPTED, Links
from fleetlight.collective.encrypted.process_group import EncryptedGroup
from fleetlight.security.context import Contexts

#: those of the job this process is in; torch makes groups by a function without arguments of ours
_open: list[Links] = []


def open_links(index: int, address: str, tls: Contexts) -> Links:
    """Listen at this worker's address, and let torch's groups use these connections."""
    if ENCRYPTED not in dist.Backend.backend_list:
        dist.Backend.register_backend(ENCRYPTED, _made, extended_api=True, devices="cpu")
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.create_server((address, 0), family=family, backlog=1024)
    links = Links(index, listener, as_server=tls.as_server, as_client=tls.as_client)
    _open[:] = [links]
    return links


def _made(options: Any, _: Any) -> EncryptedGroup:
    members = list(options.global_ranks_in_group) or list(range(options.group_size))
    limit_s = options.timeout.total_seconds()
    return EncryptedGroup(_open[0], options.group_id, options.group_rank, members, limit_s)
