# SPDX-License-Identifier: Apache-2.0
"""Looks up published rows, in programs that serve a model. Imports neither torch nor a server."""

from fleetlight.serve.reader import Reader
from fleetlight.serve.view import ModelView

__all__ = ["ModelView", "Reader"]
