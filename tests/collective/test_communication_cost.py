# SPDX-License-Identifier: Apache-2.0
"""The communication meter of a worker: steps, waits, bytes, and the log line."""

from pathlib import Path

import pytest
from tests.workers import descend, run_workers

import fleetlight as fleet
from fleetlight.collective.communication_cost import (
    MIB,
    CommunicationCost,
    CommunicationMeter,
    meter_of,
)
from fleetlight.collective.group import Group
from fleetlight.errors import ConfigError
from fleetlight.fleet.job import current
from fleetlight.roles.members import MemberHello


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def write_counters(path: Path, sent: int) -> None:
    path.write_text(
        "Inter-|   Receive    |  Transmit\n face |bytes    packets |bytes\n"
        f"    lo: 5 1 0 0 0 0 0 0 5 1 0 0 0 0 0 0\n  eth0:7 1 0 0 0 0 0 0 {sent} 1 0 0 0 0 0 0\n"
    )


def test_counting_starts_after_the_first_step(tmp_path: Path) -> None:
    clock, counters = Clock(), tmp_path / "dev"
    write_counters(counters, 100)
    meter = CommunicationMeter("eth0", clock=clock, counters=counters)
    assert meter.cost() == CommunicationCost(interface="eth0")
    for step in range(3):
        clock.now += 1
        with meter.waiting(), meter.waiting():
            clock.now += 2 + step
        write_counters(counters, 100 + 10 * (step + 1) * MIB)
        meter.count_step()
    assert meter.cost() == CommunicationCost(
        steps=2, seconds=9.0, waited_s=7.0, sent_bytes=20 * MIB, interface="eth0"
    )


def test_a_failed_wait_is_counted(tmp_path: Path) -> None:
    clock = Clock()
    meter = CommunicationMeter(clock=clock)
    meter.count_step()

    def fail() -> None:
        with meter.waiting():
            clock.now += 3
            raise ConfigError("gone")

    with pytest.raises(ConfigError):
        fail()
    clock.now += 1
    meter.count_step()
    assert meter.cost() == CommunicationCost(steps=1, seconds=4.0, waited_s=3.0)


@pytest.mark.parametrize("content", [None, "", "eth0: 1 2\n", "eth0: a b c d e f g h i j\n"])
def test_an_unknown_interface_is_omitted(content: str | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "dev").write_text(content)
    cost = CommunicationMeter("eth0", counters=tmp_path / "dev").cost()
    assert (cost.interface, cost.sent_bytes) == (None, None)


def test_the_log_line_reports_bytes_and_waits() -> None:
    cost = CommunicationCost(
        steps=2, seconds=2.4, waited_s=1.62, sent_bytes=int(48.2 * MIB), interface="veth0"
    )
    bytes_part = "24.1 MiB a step left this host (veth0)"
    assert (
        cost.sentence()
        == f"communication: {bytes_part}, waiting for the other workers took 0.81 of 1.20 s a step"
    )
    assert cost.sentence(waits=False) == f"communication: {bytes_part}"
    quick = CommunicationCost(steps=10, seconds=0.09, waited_s=0.031)
    assert quick.sentence() == (
        "communication: waiting for the other workers took 3.1 of 9.0 ms a step"
    )
    assert quick.sentence(waits=False) == ""
    assert CommunicationCost().sentence() == ""


def hellos(*addresses: str) -> dict[int, MemberHello]:
    return {
        index: MemberHello(kind="worker", index=index, address=address, hostname="h", pid=1)
        for index, address in enumerate(addresses)
    }


def test_bytes_are_counted_between_hosts_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    two = hellos("192.0.2.1", "192.0.2.2")
    assert meter_of(two, 0).cost().interface == "lo"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "none0")
    assert meter_of(two, 0).cost().interface is None
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    for one in (hellos("192.0.2.1", "192.0.2.1"), hellos("127.0.0.1", "127.0.0.2"), {}):
        assert meter_of(one, 0).cost().interface is None


def test_a_single_worker_logs_nothing(caplog: pytest.LogCaptureFixture) -> None:
    group = Group()
    for step in range(3):
        group.report_step(step)
        group.meter.count_step()
    assert group.meter.cost().steps == 2
    group.leave()
    assert not caplog.records


def trained() -> tuple[CommunicationCost, list[str]]:
    import logging

    import torch

    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("fleetlight").addHandler(handler)
    model = fleet.distributed_model(torch.nn.Linear(3, 1))
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), 0.1))
    for _ in range(4):
        descend(optimizer, model(torch.ones(2, 3)).sum())
    cost = fleet.account()
    current().group.leave()
    return cost, [text for text in records if text.startswith("communication: ")]


@pytest.mark.multiprocess
def test_worker_0_logs_the_cost_at_the_end() -> None:
    (first, logged), (other, other_logged) = run_workers(trained)
    for cost in (first, other):
        assert cost.steps == 3
        assert 0 < cost.waited_s < cost.seconds
        assert cost.sent_bytes is None
    assert logged == [first.sentence()]
    assert other_logged == []


def test_the_cost_before_init_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"call fleet\.init"):
        fleet.account()
