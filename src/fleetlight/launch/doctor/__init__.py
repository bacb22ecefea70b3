# SPDX-License-Identifier: Apache-2.0
"""`fleetlight doctor`: whether machines and the network between them are fit, before training.

The doctors of all machines listen (`service.py`). The first asks the others in turn, and tells all
of them what was found (`meeting.py`). `facts.py` looks at one machine, `probe.py` measures between
two, `channel.py` carries messages (`messages.py`). `findings.py` makes problems and advice of them,
`table.py` text; these two are pure. `examination.py` is where the command line comes in.
"""
