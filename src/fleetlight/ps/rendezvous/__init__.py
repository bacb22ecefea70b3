# SPDX-License-Identifier: Apache-2.0
"""The rendezvous of a job: who belongs to it, and where its servers listen.

`rendezvous/` is where the processes of a job find each other: role, index and one address are
enough to join. A server binds any free port and announces it, again and again (`client.py`).
Workers ask where a server listens before each attempt to connect (`addresses.py`), so a server
may return at another address. Two pure state machines decide: `directory.py` (the newest process
of each server; an older one is refused) and `enrolment.py` (who is which member, and where).
`service.py` answers members by them. Server 0 keeps the rendezvous, or a scheduler does
(`scheduler.py`). Its memory may be lost: servers announce themselves to its successor, and
workers report the incarnations that they know.
"""
