# SPDX-License-Identifier: Apache-2.0
"""Starts the processes of a job as forks of one process that has loaded torch.

`processes/preloading/` starts processes that have torch already: `template.py` starts a template
and adopts its forks, and `hook/sitecustomize.py` is the program of the template. `job/preload.py`
(pure) decides which jobs may use it.
"""
