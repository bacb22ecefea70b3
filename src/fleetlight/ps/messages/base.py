# SPDX-License-Identifier: Apache-2.0
"""`Words`: what every message is."""

from __future__ import annotations

from typing import ClassVar

import msgspec


class Words(msgspec.Struct, frozen=True, tag=True):
    """One message. Its class is told by its name."""

    #: True when the same request may be sent again after a lost connection
    repeatable: ClassVar[bool] = False
