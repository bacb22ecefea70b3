# SPDX-License-Identifier: Apache-2.0
"""A delivery keeps order, bounds what waits, and ends in time."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from fleetlight.observe.sinks.otlp import Delivery, DeliveryOutcome

FAR_S = 60.0


def until(seconds: float = FAR_S) -> float:
    return time.monotonic() + seconds


class Service:
    """Takes items once `opens` is set; fails the first attempts."""

    def __init__(self, failures: int = 0) -> None:
        self.taken: list[int] = []
        self.failures = failures
        self.was_called, self.opens = threading.Event(), threading.Event()

    def send(self, batch: Sequence[int]) -> DeliveryOutcome:
        self.was_called.set()
        assert self.opens.wait(FAR_S)
        if self.failures:
            self.failures -= 1
            return DeliveryOutcome.LOST
        self.taken += batch
        return DeliveryOutcome.ARRIVED


def test_all_items_arrive_in_their_order() -> None:
    service = Service()
    service.opens.set()
    delivery = Delivery(service.send)
    for number in range(2000):
        delivery.add(number)
    assert delivery.close(until()) == 0
    assert service.taken == list(range(2000))


def test_a_service_that_comes_back_gets_what_it_lacks() -> None:
    service = Service(failures=2)
    service.opens.set()
    delivery = Delivery(service.send, retry_s=0.001)
    delivery.add(1)
    while service.failures:
        assert service.was_called.wait(FAR_S)
        service.was_called.clear()
    delivery.add(2)
    assert delivery.close(until()) == 0
    assert service.taken == [1, 2]


def test_the_oldest_are_dropped_and_counted() -> None:
    service = Service()
    delivery = Delivery(service.send, most=3)
    delivery.add(0)
    assert service.was_called.wait(FAR_S)
    # the first is on its way: it arrives, although its place is given away
    for number in range(1, 6):
        delivery.add(number)
    service.opens.set()
    assert delivery.close(until()) == 2
    assert service.taken == [0, 3, 4, 5]


def test_the_end_makes_one_last_attempt() -> None:
    service = Service(failures=1)
    service.opens.set()
    delivery = Delivery(service.send, retry_s=FAR_S)
    delivery.add(1)
    assert service.was_called.wait(FAR_S)
    assert delivery.close(until()) == 0
    assert service.taken == [1]


def test_a_service_that_fails_at_the_end_lacks_the_rest() -> None:
    service = Service(failures=9)
    service.opens.set()
    delivery = Delivery(service.send, retry_s=FAR_S)
    delivery.add(1)
    delivery.add(2)
    assert delivery.close(until()) == 2
    assert service.failures >= 7


def test_a_service_that_does_not_answer_delays_the_end_by_no_more_than_asked() -> None:
    service = Service()
    delivery = Delivery(service.send)
    delivery.add(1)
    assert service.was_called.wait(FAR_S)
    assert delivery.close(until(0.0)) == 1
    service.opens.set()


def test_an_item_that_the_service_refuses_does_not_delay_the_others_for_ever() -> None:
    arrived: list[int] = []
    is_done = threading.Event()

    def send(batch: Sequence[int]) -> DeliveryOutcome:
        if 7 in batch or len(batch) > 100:
            return DeliveryOutcome.REFUSED
        arrived.extend(batch)
        if len(arrived) == 299:
            is_done.set()
        return DeliveryOutcome.ARRIVED

    delivery = Delivery(send, retry_s=0.0)
    for number in range(300):
        delivery.add(number)
    assert is_done.wait(30)
    assert sorted(arrived) == [number for number in range(300) if number != 7]
    assert delivery.close(time.monotonic() + 5) == 1


def test_an_item_that_is_refused_at_the_end_keeps_no_other_back() -> None:
    arrived: list[int] = []

    def send(batch: Sequence[int]) -> DeliveryOutcome:
        if 700 in batch:
            return DeliveryOutcome.REFUSED
        arrived.extend(batch)
        return DeliveryOutcome.ARRIVED

    delivery = Delivery(send, retry_s=FAR_S)
    for number in range(2000):
        delivery.add(number)
    assert delivery.close(until()) == 1
    assert sorted(arrived) == [number for number in range(2000) if number != 700]


def test_a_service_that_refuses_all_ends_the_attempts() -> None:
    asked: list[int] = []

    def send(batch: Sequence[int]) -> DeliveryOutcome:
        asked.append(len(batch))
        return DeliveryOutcome.REFUSED

    delivery = Delivery(send, retry_s=FAR_S)
    for number in range(2000):
        delivery.add(number)
    assert delivery.close(until()) == 2000
    assert len(asked) < 30
