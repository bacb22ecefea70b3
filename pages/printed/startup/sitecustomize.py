# SPDX-License-Identifier: Apache-2.0
"""Lets a process write whole lines into a pipe, as into a terminal."""

import io
import sys

if isinstance(sys.stdout, io.TextIOWrapper):
    sys.stdout.reconfigure(line_buffering=True)
