# SPDX-License-Identifier: Apache-2.0
"""Logs of other machines arrive on node 0, each byte once, or a line says what is missing."""

from __future__ import annotations

import random
import re
from pathlib import Path

import msgspec
import pytest
from tests.launch.machines.doubles import Store

from fleetlight.launch.machines.exchanged.logs_exchange import LogsExchange
from fleetlight.observe.log import logger

LOG = "workerlog.1"


class Machine:
    """One machine with a log folder of its own."""

    def __init__(self, store: Store, own: int, folder: Path) -> None:
        self.own, self.folder = own, folder / f"node{own}"
        self.folder.mkdir()
        self.exchange = LogsExchange(store, (own, 2), (own + 5, "10.0.0.2"), self.folder)

    def start_again(self, store: Store) -> None:
        copied = self.exchange.copied
        launcher = (self.own + 5, "10.0.0.2")
        self.exchange = LogsExchange(store, (self.own, 2), launcher, self.folder, copied)

    def write(self, data: bytes, name: str = LOG) -> None:
        with (self.folder / name).open("ab") as file:
            file.write(data)

    def read(self, name: str = LOG) -> bytes:
        """A log without the line that says where it is from."""
        first, _, rest = (self.folder / name).read_bytes().partition(b"\n")
        assert first.startswith(b"--- copied from 10.0.0.2:")
        assert first.endswith(f"node1/{name} ---".encode())
        return rest


@pytest.fixture
def machines(tmp_path: Path) -> tuple[Machine, Machine]:
    store = Store()
    return Machine(store, 0, tmp_path), Machine(store, 1, tmp_path)


def test_each_byte_arrives_once_whatever_is_missed(tmp_path: Path) -> None:
    """Messages that node 0 has not read, restarts of the job, lines without an end."""
    draw = random.Random(0)
    store = Store()
    first, second = (Machine(store, own, tmp_path) for own in range(2))
    written = b""
    for number in range(300):
        what = draw.random()
        if what < 0.4:
            data = b"line %d\n" % number if what < 0.3 else b"."
            second.write(data)
            written += data
        elif what < 0.7:
            second.exchange.bring()
        elif what < 0.95:
            first.exchange.bring()
        else:
            store = Store()
            second.start_again(store)
            # node 0 has not confirmed yet what it has
            second.exchange.bring()
            first.start_again(store)
    for machine in (second, first):
        machine.exchange.bring(is_last=True)
    assert first.read() == written


def test_a_log_that_grows_for_a_while_arrives_as_a_whole(
    machines: tuple[Machine, Machine],
) -> None:
    first, second = machines
    text = b"".join(b"%d\n" % number for number in range(40_000))
    second.write(text)
    for _ in range(6):
        second.exchange.bring()
        first.exchange.bring()
    assert first.read() == text


def test_logs_share_what_is_sent_at_a_time(machines: tuple[Machine, Machine]) -> None:
    first, second = machines
    for number in range(8):
        second.write(b"x" * 100_000, f"serverlog.{number}")
    second.exchange.bring()
    first.exchange.bring()
    sizes = [len(first.read(f"serverlog.{number}")) for number in range(8)]
    assert sizes == [8 << 10] * 8


@pytest.mark.parametrize("is_last", [False, True])
def test_what_is_left_out_is_named(machines: tuple[Machine, Machine], *, is_last: bool) -> None:
    """In the middle of a log that grows too fast, and at the end of the job."""
    first, second = machines
    second.write(b"begin\n")
    second.exchange.bring()
    first.exchange.bring()
    second.write(b"y" * (200_000 if is_last else 2_000_000) + b"\nend\n")
    for machine in (second, first):
        machine.exchange.bring(is_last=is_last)
    copy = first.read()
    assert copy.startswith(b"begin\n\n--- ")
    found = re.search(rb"--- ([\d,]+) bytes are only in 10\.0\.0\.2:.*/workerlog\.1 ---\n", copy)
    assert found is not None
    missing = int(found[1].replace(b",", b""))
    assert missing + len(copy) - len(found[0]) - 1 == (second.folder / LOG).stat().st_size
    assert copy.endswith(b"\nend\n")


def test_another_launcher_of_the_same_machine_begins_anew(tmp_path: Path) -> None:
    """A machine of an elastic job leaves and returns; its old logs have moved."""
    store = Store()
    first, second = (Machine(store, own, tmp_path) for own in range(2))
    second.write(b"a long first log\n")
    second.exchange.bring()
    first.exchange.bring()
    (second.folder / LOG).write_bytes(b"second\n")
    second.exchange = LogsExchange(store, (1, 2), (9, "10.0.0.2"), second.folder)
    second.exchange.bring()
    first.exchange.bring()
    assert first.read().startswith(b"a long first log\n--- copied from 10.0.0.2:")
    assert first.read().endswith(b" ---\nsecond\n")


def test_only_logs_are_sent_and_received(machines: tuple[Machine, Machine], tmp_path: Path) -> None:
    first, second = machines
    second.write(b"token", "dashboard.token")
    second.exchange.bring()
    first.exchange.bring()
    assert not list(first.folder.iterdir())
    piece = {"start": 0, "data": "eA=="}
    logs = dict.fromkeys(["../workerlog.1", "dashboard.token", "workerlog.1\n"], piece)
    store = Store()
    store.set("logs/1", msgspec.json.encode({"launcher": 1, "place": "", "logs": logs}).decode())
    first.start_again(store)
    first.exchange.bring()
    assert not list(first.folder.iterdir())
    assert {path.name for path in tmp_path.iterdir()} == {"node0", "node1"}


def test_a_copy_that_cannot_be_written_is_reported_once(
    machines: tuple[Machine, Machine], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = machines
    (first.folder / LOG).symlink_to(second.folder / "elsewhere")
    said: list[str] = []
    monkeypatch.setattr(logger, "warning", lambda text, *args: said.append(text % args))
    for _ in range(2):
        second.write(b"line\n")
        second.exchange.bring()
        first.exchange.bring()
    [line] = said
    assert line.startswith(f"logs of other machines are not copied to {LOG}: ")
    assert not (second.folder / "elsewhere").exists()
