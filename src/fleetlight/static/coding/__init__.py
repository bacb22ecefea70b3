# SPDX-License-Identifier: Apache-2.0
"""From forms to functions that run: each keeps just what one kind of run needs.

`coding/` generates code for a set of fetches and parts of a form (`coder.py`): it removes
redundant views (`cleanup.py`), calls each torch function by its fastest entry (`python.py`,
`callables.py`), and reuses the memory of buckets (`buckets.py`). `inductor.py` compiles the
segments between calls: communication, random numbers, fused steps. An optimizer's
step is torch's fused one if it has one; `ops/marks.py` gives gradients the layout of their
parameters.
"""
