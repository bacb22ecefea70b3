# SPDX-License-Identifier: Apache-2.0
"""Several machines: how their launchers meet, and what they tell each other while the job runs.

`OtherMachines` is what the local backend asks of them; `NoOtherMachines` answers where there are
none, `ConnectedMachines` where there are.
"""
