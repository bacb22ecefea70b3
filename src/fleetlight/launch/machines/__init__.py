# SPDX-License-Identifier: Apache-2.0
"""Connect the launchers of several machines, and exchange their states while the job runs.

A session uses the protocol `OtherMachines`. `NoOtherMachines` implements it for one machine,
`ConnectedMachines` for several.

`machines/` lets the launchers of several machines run one job, through torch's own store and
rendezvous. Launchers find each other and post their status (`connected_machines.py`;
`rendezvous_state.py` writes JSON where torch would pickle). In `exchanged/` they send heartbeats
(`heartbeats.py`) and bring what other machines record and print to node 0 (`metrics_exchange.py`,
`logs_exchange.py`). `store_connection.py` replaces a connection that was cut; an `Outage` waits
for unreachable machines and reports them. `session.py` uses them through `other_machines.py`,
which returns at once on a single machine.
"""
