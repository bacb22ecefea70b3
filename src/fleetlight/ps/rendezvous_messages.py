# SPDX-License-Identifier: Apache-2.0
"""Messages to the rendezvous of a job, where its members find each other."""

from __future__ import annotations

from typing import Annotated, ClassVar

import msgspec

from fleetlight.ps.message_base import MessageBase
from fleetlight.roles.members import MemberHello, Place

_Index = Annotated[int, msgspec.Meta(ge=0)]
_Port = Annotated[int, msgspec.Meta(ge=1, le=65535)]
#: ranges of buckets of ids; the second number of each is exclusive
Buckets = list[tuple[int, int]]


class Attend(MessageBase, frozen=True):
    """The first message on a connection to the rendezvous. Reply: Done."""

    #: the id of the job; "" if the caller has none
    job: str
    worker_num: int
    server_num: int
    #: a random name of the process
    process: str
    hello: MemberHello
    #: True for a worker that joins the running job, and has its index from server 0
    joins: bool = False


class Enrol(MessageBase, frozen=True):
    """Wait until all members of the caller's kind have arrived. Reply: Enrolled."""

    repeatable: ClassVar[bool] = True


class Enrolled(MessageBase, frozen=True):
    """The index of the caller, and its place among the hosts of its kind."""

    index: int
    place: Place


class Announce(MessageBase, frozen=True):
    """A server says where it listens, and repeats that as long as it runs. Reply: Announced."""

    repeatable: ClassVar[bool] = True
    server: _Index
    #: 0: the rendezvous has given the process no incarnation yet
    incarnation: _Index
    host: str
    port: _Port
    #: whose rows this server stores
    buckets: Buckets = msgspec.field(default_factory=list)


class Announced(MessageBase, frozen=True):
    """The incarnation of the server; that of its successor is higher."""

    incarnation: int


class ServerEntry(msgspec.Struct, frozen=True):
    """Where a server listens."""

    server: int
    incarnation: int
    #: the random name of its process
    process: str
    host: str
    port: int
    #: whose rows it stores: the entry says who owns a bucket, and in which incarnation
    buckets: Buckets = msgspec.field(default_factory=list)


class Locate(MessageBase, frozen=True):
    """Ask where the servers listen. Reply: Located."""

    repeatable: ClassVar[bool] = True
    #: the newest processes that the caller knows
    known: list[ServerEntry]
    #: until all servers have announced themselves; otherwise the reply has those that have
    waits: bool = True


class Located(MessageBase, frozen=True):
    """The servers, in the order of their indices."""

    servers: list[ServerEntry]


class Depart(MessageBase, frozen=True):
    """The caller ends; `error` is set after a failure. Reply: Done."""

    repeatable: ClassVar[bool] = True
    index: int
    error: str = ""
