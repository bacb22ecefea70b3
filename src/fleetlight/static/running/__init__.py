# SPDX-License-Identifier: Apache-2.0
"""Who runs programs, on what, and with whom.

`running/` makes the steps: `runners.py` in one process, `fleet/collective/programs.py` with other
workers, `fleet/served/programs.py` with servers (`pulling.py` computes the ids of a run, and
pulls its rows). One loop of the executor makes the steps of a call, one or several: a runner says
how many later batches it wants to know, and gets their feeds before a run. With servers it
announces their ids, and hands gradients to `ServedSteps.step_with` unless torch's own step is
needed.
"""
