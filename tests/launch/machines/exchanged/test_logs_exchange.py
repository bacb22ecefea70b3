# SPDX-License-Identifier: Apache-2.0
"""Logs of other machines arrive on node 0, each byte once, or a line says what is missing."""

import itertools
import random
import re
import resource
import time
from pathlib import Path

import msgspec
import pytest
from tests.launch.machines.doubles import Store

from fleetlight.launch.machines.exchanged.logs_exchange import LogsExchange
from fleetlight.observe.log import logger

LOG = "workerlog.1"


class Machine:
    """One machine with a log folder of its own; the launcher of node N has number N + 5."""

    def __init__(self, store: Store, own: int, folder: Path, count: int = 2) -> None:
        self.own, self.folder = own, folder / f"node{own}"
        self.folder.mkdir()
        self._launchers = [node + 5 for node in range(count)]
        self._exchange = LogsExchange(store, own + 5, f"10.0.0.{own}", self.folder, sends=True)

    def bring(self, *, first: int = 0, is_last: bool = False) -> None:
        """Send, or receive where this is node 0."""
        self._exchange.bring(self._launchers, receives=self.own == first, is_last=is_last)

    def write(self, data: bytes, name: str = LOG) -> None:
        with (self.folder / name).open("ab") as file:
            file.write(data)

    def read(self, name: str = LOG, origin: int = 1) -> bytes:
        """A copy without the line that says where it is from."""
        first, _, rest = (self.folder / name).read_bytes().partition(b"\n")
        place = self.folder.with_name(f"node{origin}") / name
        assert first.decode() == f"--- copied from 10.0.0.{origin}:{place} ---"
        return rest


@pytest.fixture
def store() -> Store:
    return Store()


@pytest.fixture
def machines(store: Store, tmp_path: Path) -> tuple[Machine, Machine]:
    return Machine(store, 0, tmp_path), Machine(store, 1, tmp_path)


@pytest.fixture
def warnings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    said: list[str] = []
    monkeypatch.setattr(logger, "warning", lambda text, *args: said.append(text % args))
    return said


def exchange(first: Machine, *others: Machine, is_last: bool = False) -> None:
    for machine in (*others, first):
        machine.bring(is_last=is_last)


def test_each_byte_arrives_once_whatever_is_missed(machines: tuple[Machine, Machine]) -> None:
    """Messages that node 0 has not read or not confirmed, and lines without an end."""
    draw = random.Random(0)
    first, second = machines
    written = b""
    for number in range(300):
        what = draw.random()
        if what < 0.4:
            data = b"line %d\n" % number if what < 0.3 else b"."
            second.write(data)
            written += data
        elif what < 0.7:
            second.bring()
        else:
            first.bring()
    exchange(first, second, is_last=True)
    assert first.read() == written


def test_a_part_sent_again_is_copied_once(machines: tuple[Machine, Machine], store: Store) -> None:
    first, second = machines
    second.write(b"one\n")
    exchange(first, second)
    # the machine has not seen yet what node 0 confirms
    del store.values["logs_copied/6"]
    second.write(b"two\n")
    exchange(first, second)
    assert first.read() == b"one\ntwo\n"


def test_a_log_that_grows_for_a_while_arrives_as_a_whole(
    machines: tuple[Machine, Machine], store: Store
) -> None:
    first, second = machines
    text = b"".join(b"%d\n" % number for number in range(40_000))
    second.write(text)
    for _ in range(6):
        exchange(first, second)
    assert first.read() == text
    # the store keeps nothing of it
    assert store.get("logs/6") == b""


def test_a_slow_link_gets_less_at_a_time(
    machines: tuple[Machine, Machine], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = machines
    second.write(b"x" * 500_000)
    seconds = itertools.count()
    monkeypatch.setattr(time, "monotonic", lambda: float(next(seconds)))
    sizes = []
    for _ in range(6):
        exchange(first, second)
        sizes.append(len(first.read()))
    assert [b - a for a, b in itertools.pairwise(sizes)] == [
        32 << 10,
        16 << 10,
        8 << 10,
        4 << 10,
        4 << 10,
    ]


def test_logs_share_what_is_sent_at_a_time(machines: tuple[Machine, Machine]) -> None:
    first, second = machines
    for number in range(40):
        second.write(b"x" * 100_000, f"serverlog.{number}")
    exchange(first, second)
    copies = sorted(path.name for path in first.folder.iterdir())
    assert [len(first.read(name)) for name in copies] == [4 << 10] * 16
    for _ in range(2):
        exchange(first, second)
    assert len(list(first.folder.iterdir())) == 40


@pytest.mark.parametrize("is_last", [False, True])
def test_what_is_left_out_is_named(machines: tuple[Machine, Machine], *, is_last: bool) -> None:
    """In the middle of a log that grows too fast, and at the end of the job."""
    first, second = machines
    second.write(b"begin")
    exchange(first, second)
    second.write(b"y" * (200_000 if is_last else 2_000_000) + b"\nend\n")
    exchange(first, second, is_last=is_last)
    copy = first.read()
    assert copy.startswith(b"begin\n--- ")
    found = re.search(rb"\n--- ([\d,]+) bytes are only in 10\.0\.0\.1:.*/workerlog\.1 ---\n", copy)
    assert found is not None
    missing = int(found[1].replace(b",", b""))
    assert missing + len(copy) - len(found[0]) == (second.folder / LOG).stat().st_size
    assert copy.endswith(b"\nend\n")


def test_an_empty_log_is_copied(machines: tuple[Machine, Machine]) -> None:
    """The process printed nothing, which is not the same as a log that is elsewhere."""
    first, second = machines
    second.write(b"")
    exchange(first, second)
    exchange(first, second)
    assert first.read() == b""


def test_a_log_that_was_made_shorter_begins_anew(machines: tuple[Machine, Machine]) -> None:
    first, second = machines
    second.write(b"a long first part\n")
    exchange(first, second)
    (second.folder / LOG).write_bytes(b"second\n")
    # node 0 reads the same part twice
    second.bring()
    exchange(first, second)
    second.write(b"third\n")
    exchange(first, second)
    place = f"10.0.0.1:{second.folder / LOG}"
    note = f"--- {place} was made shorter ---\n"
    assert first.read().decode() == f"a long first part\n{note}second\nthird\n"


def test_lines_of_another_machine_have_its_name(store: Store, tmp_path: Path) -> None:
    """Machines of an elastic job leave and return, and with them the place of worker 1."""
    first, second, third = (Machine(store, own, tmp_path, 3) for own in range(3))
    for machine, text in ((second, b"one"), (third, b"two\n"), (second, b" three\n")):
        machine.write(text)
        exchange(first, machine)
    places = [f"--- copied from 10.0.0.{n}:{tmp_path}/node{n}/{LOG} ---\n" for n in (1, 2, 1)]
    expected = f"{places[0]}one\n{places[1]}two\n{places[2]} three\n"
    assert (first.folder / LOG).read_text() == expected


def test_copies_are_not_sent_once_another_machine_is_node_0(store: Store, tmp_path: Path) -> None:
    first, second, third = (Machine(store, own, tmp_path, 3) for own in range(3))
    second.write(b"worker 1\n")
    first.write(b"worker 0\n", "workerlog.0")
    exchange(first, second)
    third.write(b"worker 2\n", "workerlog.2")
    for machine in (first, third, second):
        machine.bring(first=1)
    assert (second.folder / LOG).read_bytes() == b"worker 1\n"
    assert second.read("workerlog.0", origin=0) == b"worker 0\n"
    assert second.read("workerlog.2", origin=2) == b"worker 2\n"


def test_only_logs_are_sent_and_received(
    machines: tuple[Machine, Machine], store: Store, tmp_path: Path
) -> None:
    first, second = machines
    second.write(b"token", "dashboard.token")
    (tmp_path / "secret").write_text("secret")
    (second.folder / "workerlog.2").symlink_to(tmp_path / "secret")
    (second.folder / "workerlog.3").symlink_to(tmp_path / "nothing")
    (second.folder / "workerlog.4").mkdir()
    second.write(b"line\n")
    exchange(first, second)
    assert [path.name for path in first.folder.iterdir()] == [LOG]
    part = {"start": 0, "data": "eA=="}
    logs = dict.fromkeys(["../workerlog.1", "dashboard.token", "workerlog.9\n"], part)
    store.set("logs/6", msgspec.json.encode({"place": "", "logs": logs}).decode())
    store.add("logs_sent/6", 1)
    first.bring()
    assert [path.name for path in first.folder.iterdir()] == [LOG]
    assert {path.name for path in tmp_path.iterdir()} == {"node0", "node1", "secret"}


def test_damaged_messages_end_nothing(
    machines: tuple[Machine, Machine], store: Store, warnings: list[str]
) -> None:
    first, second = machines
    for _ in range(2):
        store.set("logs/6", '{"place": ')
        store.add("logs_sent/6", 1)
        first.bring()
    assert [line.partition(":")[0] for line in warnings] == ["logs of launcher 6 cannot be read"]
    store.set("logs_copied/6", "[")
    second.write(b"line\n")
    exchange(first, second)
    assert first.read() == b"line\n"


def test_a_link_in_the_place_of_a_copy_is_not_followed(
    machines: tuple[Machine, Machine], warnings: list[str]
) -> None:
    first, second = machines
    (first.folder / LOG).symlink_to(second.folder / "elsewhere")
    for _ in range(2):
        second.write(b"line\n")
        exchange(first, second)
    [line] = warnings
    assert line.startswith(f"logs of other machines are not copied to {first.folder / LOG}: ")
    assert not (second.folder / "elsewhere").exists()


def test_a_full_disk_loses_nothing(machines: tuple[Machine, Machine], warnings: list[str]) -> None:
    first, second = machines
    second.write(b"begin\n")
    exchange(first, second)
    second.write(b"x" * 5_000 + b"\n")
    second.bring()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        first.bring()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert len(warnings) == 1
    assert first.read() == b"begin\n"
    exchange(first, second)
    assert first.read() == b"begin\n" + b"x" * 5_000 + b"\n"
