# SPDX-License-Identifier: Apache-2.0
"""What is done with tensors without values becomes a graph.

`writing/` makes graphs. A `Recorder` records the operations on variables, above autograd (`call`:
variables replace live parameters) and below it (`operation`: adds nodes). `calls.py` calls
modules with variables instead of their state, and finds the module that names the state.
`training.py` writes backward and torch's own step, which runs on a copy of the optimizer
(`optimizers.py`, only classes with a parity test). `source.py` sorts the recorder's graph into a
form.
"""
