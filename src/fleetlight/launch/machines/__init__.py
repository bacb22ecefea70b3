# SPDX-License-Identifier: Apache-2.0
"""Connect the launchers of several machines, and exchange their states while the job runs.

A session uses the protocol `OtherMachines`. `NoOtherMachines` implements it for one machine,
`ConnectedMachines` for several.
"""
