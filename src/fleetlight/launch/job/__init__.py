# SPDX-License-Identifier: Apache-2.0
"""What to run: from flags to a `JobSpec`, and from there to the environment of each process.

Pure: nothing here starts, opens or waits for anything.
"""
