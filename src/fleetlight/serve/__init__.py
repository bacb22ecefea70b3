# SPDX-License-Identifier: Apache-2.0
"""Looks up published rows, in programs that serve a model. Imports neither torch nor a server.

`serve` looks up published rows, and never imports torch. `Reader` follows a target. `reader.py`
builds a file for each layer of a table, in one process of a machine, and all processes map it
(`layer_file.py`). A base is the lower layer, and its deltas together the upper one, so that a
delta costs no copy of the base. A `ModelView` is one publication; the reader replaces it as a
whole.
"""

from fleetlight.serve.reader import Reader
from fleetlight.serve.view import ModelView

__all__ = ["ModelView", "Reader"]
