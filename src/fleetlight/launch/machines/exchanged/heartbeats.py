# SPDX-License-Identifier: Apache-2.0
"""The heartbeats of launchers, counted in the store."""

from __future__ import annotations

from typing import Protocol

#: the interval at which a launcher beats and reads the beats of the others
BEAT_S = 1.0
#: how long a launcher may send no heartbeat before it counts as unreachable
SILENT_S = 7.0


class Counters(Protocol):
    """The operations of torch's store that never block."""

    def add(self, key: str, amount: int) -> int: ...

    def set(self, key: str, value: str) -> None: ...

    def check(self, keys: list[str]) -> bool: ...

    def get(self, key: str) -> bytes: ...


class Heartbeats:
    """Each launcher counts its own beats; others compare counts, so clocks need not agree."""

    def __init__(
        self, store: Counters, host: str, now: float, patience_s: float = SILENT_S
    ) -> None:
        """A launcher that sends no heartbeat for `patience_s` is lost."""
        self._store = store
        self._patience_s = max(SILENT_S, patience_s)
        self.number = store.add("launchers", 1)
        store.set(f"launcher/{self.number}", host)
        self._hosts: dict[int, str] = {}
        self._beats: dict[int, int] = {}
        self._beat_seen_at: dict[int, float] = {}
        #: when a launcher was unreachable last
        self._reachable_since: dict[int, float] = {}
        self._next = now

    def beat(self, now: float) -> None:
        """Send a heartbeat and read those of the others, once per interval."""
        if now < self._next:
            return
        self._next = now + BEAT_S
        self._store.add(f"beat/{self.number}", 1)
        self.poll(now)

    def poll(self, now: float) -> None:
        """Read the heartbeats of all launchers that have joined."""
        for number in range(1, self._store.add("launchers", 0) + 1):
            self._poll_launcher(number, now)

    def _poll_launcher(self, number: int, now: float) -> None:
        if number not in self._hosts:
            if not self._store.check([f"launcher/{number}"]):
                return  # the launcher has counted itself, but not yet written its name
            self._hosts[number] = self._store.get(f"launcher/{number}").decode()
        beats = self._store.add(f"beat/{number}", 0)
        if beats != self._beats.get(number):
            if self.is_silent(number, now):
                self._reachable_since[number] = now
            self._beats[number] = beats
            self._beat_seen_at[number] = now

    def reachable_hosts(self, now: float) -> list[str]:
        """The hosts of all launchers that send heartbeats."""
        return [host for number, host in self._hosts.items() if not self.is_silent(number, now)]

    def leave(self) -> None:
        """Mark that this launcher no longer needs the store."""
        self._store.set(f"goodbye/{self.number}", "")

    def remaining(self, now: float) -> set[int]:
        """The launchers that have not left and are not lost."""
        here = {number for number in self._hosts if not self.is_lost(number, now)}
        return {number for number in here if not self._store.check([f"goodbye/{number}"])}

    def silence_s(self, number: int, now: float) -> float:
        """How long a launcher has sent no heartbeat."""
        return now - self._beat_seen_at.get(number, now)

    def is_silent(self, number: int, now: float) -> bool:
        """True when a launcher is unreachable; it may become reachable again."""
        return self.silence_s(number, now) > SILENT_S

    def is_lost(self, number: int, now: float) -> bool:
        """True when a launcher has been unreachable for too long."""
        return self.silence_s(number, now) > self._patience_s

    def is_late(self, number: int, since: float, now: float, longest_s: float) -> bool:
        """True when a launcher is lost, or was reachable for `longest_s` after `since`."""
        if self.is_silent(number, now):
            return self.is_lost(number, now)
        return now - max(since, self._reachable_since.get(number, since)) >= longest_s
