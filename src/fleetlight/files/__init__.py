# SPDX-License-Identifier: Apache-2.0
"""Lock files, and files that are replaced as a whole.

`files` has what keeps files whole in a crash. `atomic.py` replaces a file as a whole and flushes
folders; `lock.py` has a lock file that one process holds, and that names its holder.
"""
