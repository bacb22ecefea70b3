# SPDX-License-Identifier: Apache-2.0
"""Interrupts are recorded."""

import signal

import pytest

from fleetlight.launch.processes.interrupts import Interrupted, Interrupts


def test_signals_are_recorded_in_order_and_handlers_restored() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with Interrupts() as interrupts:
        interrupts.check()
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
        assert interrupts.seen == [signal.SIGTERM, signal.SIGINT]
        with pytest.raises(Interrupted, match="interrupted by SIGTERM"):
            interrupts.check()
    assert signal.getsignal(signal.SIGTERM) is before


def test_ctrl_c_asks_newcomers_to_leave() -> None:
    with Interrupts(asks_to_end=True) as interrupts:
        signal.raise_signal(signal.SIGINT)
        assert interrupts.seen == [signal.SIGTERM]


def test_sighup_stays_ignored_under_nohup() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Interrupts() as interrupts:
            signal.raise_signal(signal.SIGHUP)
            assert interrupts.seen == []
    finally:
        signal.signal(signal.SIGHUP, before)
