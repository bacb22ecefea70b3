# SPDX-License-Identifier: Apache-2.0
"""Logs of a running job, read until its end."""

from collections.abc import Iterator, Mapping, Sequence

import pytest

from fleetlight.cli.terminal.following import follow
from fleetlight.errors import ConfigError
from fleetlight.launch.backends import MemberState


class Job:
    """A job whose processes print a little at each look."""

    def __init__(self, *rounds: dict[str, bytes]) -> None:
        #: what each process has printed, look by look
        self._rounds = list(rounds)
        self.now = 0

    def look(self) -> None:
        self.now += 1

    def status(self, job_id: str) -> Sequence[MemberState]:
        is_over = self.now == len(self._rounds) - 1
        names = ["launcher", *self._rounds[-1]]
        return [MemberState(name, "running", is_over=is_over) for name in names]

    def logs(self, job_id: str, member: str | None, start: int = 0) -> Iterator[bytes]:
        printed = self._rounds[self.now]
        if member not in printed:
            raise ConfigError(f"no log of {member}")
        yield printed[member][start:]

    def stop(self, job_id: str) -> None:
        raise AssertionError("not asked")

    def scale(self, job_id: str, counts: Mapping[str, int]) -> str:
        raise AssertionError("not asked")


def test_each_byte_is_shown_once_until_the_job_has_ended() -> None:
    job = Job(
        {"worker 0": b"one\ntw"},
        {"worker 0": b"one\ntwo\n", "worker 1": b"a\n"},
        {"worker 0": b"one\ntwo\nend", "worker 1": b"a\nb\n"},
    )
    assert b"".join(follow(job, "log", None, job.look)).splitlines() == [
        b"[worker 0] one",
        b"[worker 0] two",
        b"[worker 1] a",
        b"[worker 0] end",
        b"[worker 1] b",
    ]


def test_one_process_is_shown_without_a_prefix() -> None:
    job = Job({"worker 0": b"one\n"}, {"worker 0": b"one\n", "worker 1": b"a"})
    assert b"".join(follow(job, "log", "worker 1", job.look)) == b"a"
    with pytest.raises(ConfigError, match="no log of worker 7"):
        list(follow(job, "log", "worker 7", job.look))
