# SPDX-License-Identifier: Apache-2.0
"""`fleetlight doctor`: check machines and the network between them before training.

The doctor of each machine serves requests. The first doctor calls the others and sends all of
them the results (`joint_examination.py`). `facts.py` inspects one machine, `probe.py` measures
between two, `channel.py` carries the messages of `messages.py`. `findings.py` derives problems
and advice, `table.py` formats text; both are pure. `examination.py` is the entry point.
"""
