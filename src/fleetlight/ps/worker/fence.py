# SPDX-License-Identifier: Apache-2.0
"""`Fence`: a server in whose place another one was started is called no more. Pure."""

from __future__ import annotations

from fleetlight.errors import PeerLostError
from fleetlight.ps import messages as m


class Fence:
    """The newest life of each server that this worker has met, on whichever lane."""

    def __init__(self) -> None:
        self._newest: dict[int, int] = {}

    def check(self, welcome: m.Message) -> None:
        """Refuse an earlier life; it is tried again, since the later one may answer then."""
        if not isinstance(welcome, m.Welcome) or not welcome.life:
            return
        newest = self._newest.get(welcome.server, 1)
        if welcome.life < newest:
            raise PeerLostError(
                f"server {welcome.server} answers in its life {welcome.life}, but its life "
                f"{newest} has been met before; end the older process"
            )
        self._newest[welcome.server] = welcome.life
