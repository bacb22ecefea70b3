# SPDX-License-Identifier: Apache-2.0
"""`fleetlight doctor`: check machines and the network between them before training.

The doctor of each machine serves requests (`service.py`). The first doctor calls the others and
sends all of them the results (`meeting.py`). `facts.py` inspects one machine, `probe.py` measures
between two, `channel.py` carries the messages of `messages.py`. `findings.py` derives problems
and advice, `table.py` formats text; both are pure. `examination.py` is the entry point.

`doctor/` examines machines and the network between them before a job starts. Each doctor is a
`service.py`, and the first one asks all (`joint_examination.py`). `findings.py` turns their
replies into problems and advice, and is pure.
"""
