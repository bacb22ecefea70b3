# SPDX-License-Identifier: Apache-2.0
"""What a program is: its graph, state and feeds, the operations of our own that stand in it.

`graph/` defines programs. A `Form` (`form.py`) is graph, state, feeds and names. The state is the
live module's and optimizer's own (`state.py`), so eager steps and program runs can alternate.
Each run first reads the learning rates from the param groups. A `Variable` is a tensor with a
shape and no values. `aliases.py` finds nodes with shared memory, which limits how far a pass may
move a node. `evaluation.py` makes the form of an evaluation.
"""
