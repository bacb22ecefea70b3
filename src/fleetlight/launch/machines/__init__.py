# SPDX-License-Identifier: Apache-2.0
"""Several machines: how their launchers meet, and what they tell each other while the job runs.

`Peers` is what the local backend asks of the other machines: `Alone` answers when there are none,
`Together` when there are.
"""
