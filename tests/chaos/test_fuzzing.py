# SPDX-License-Identifier: Apache-2.0
"""Some of the frames of `make chaos`, and tests that fuzzing detects failures."""

import multiprocessing
import os
import random
import re
import signal
import threading
from typing import Any

import pytest
from tests.chaos.fuzzing import running, serving
from tests.chaos.fuzzing.decoding import Decoding
from tests.chaos.fuzzing.making import MESSAGES, any_value
from tests.chaos.fuzzing.running import decode, fuzz, main, serve
from tests.chaos.fuzzing.serving import Serving

from fleetlight.errors import ProtocolError
from fleetlight.ps.server.server import Server
from fleetlight.ps.transport.listener import Listener
from fleetlight.ps.transport.protocol import MessageCodec
from fleetlight.ps.transport.session import Session

pytestmark = pytest.mark.timeout(240)


def test_frames_are_read_or_refused() -> None:
    whole = decode(5, range(3000), multiprocessing.Value("q", 0))
    # some are still valid
    assert 100 < whole < 2000


@pytest.mark.slow
def test_servers_reply_or_close() -> None:
    sent, growth = serve(5, 600, multiprocessing.Value("q", 0))
    assert sent > 600
    assert growth < running.GROWTH


def test_every_message_is_generated() -> None:
    chance = random.Random(1)
    assert {type(any_value(chance, kind)) for kind in MESSAGES} == set(MESSAGES)


@pytest.mark.slow
def test_unforeseen_error_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    def metrics(self: Server) -> Any:
        raise KeyError("unforeseen")

    monkeypatch.setattr(Server, "metrics", metrics)
    with pytest.raises(AssertionError, match=r"did not foresee(.|\n)*unforeseen"):
        [Serving(5).round(number) for number in range(4)]


@pytest.mark.slow
def test_missing_reply_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    end = threading.Event()
    monkeypatch.setattr(serving, "_ANSWER_S", 0.2)
    monkeypatch.setattr(serving, "CONNECTIONS", 4)
    monkeypatch.setattr(Session, "_serve", lambda self: end.wait(20))
    stop = Listener.stop

    def stop_all(self: Listener, within_s: float = 5.0) -> None:
        end.set()
        stop(self, within_s)

    monkeypatch.setattr(Listener, "stop", stop_all)
    with pytest.raises(AssertionError, match=r"connection \d of round 0 got neither"):
        Serving(5).round(0)


def test_growing_memory_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Serving, "round", lambda *_: 1)
    sizes = iter(range(1 << 28, 1 << 40, 1 << 28))
    monkeypatch.setattr(running, "resident", lambda: next(sizes))
    with pytest.raises(AssertionError, match="memory grew by 512 MiB in 7 rounds"):
        serve(5, 100, multiprocessing.Value("q", 0))


@pytest.mark.long
@pytest.mark.slow
def test_program_reports_the_number_of_frames(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["--frames", "400", "--seed", "2"]) == 0
    assert re.fullmatch(
        r"fuzzing, seed 2: 380 frames for the decoder \(\d+ of them whole, \d+ a second\), \d+ for "
        r"1 servers \(memory grew by \d+ MiB\): 0 crashes, 0 hangs\n",
        capfd.readouterr().out,
    )


def _dies(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


@pytest.mark.slow
def test_dead_process_is_reported_with_its_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "_all", _dies)
    well, text = fuzz(3, 100)
    assert not well
    assert text == (
        "the process died, exit code -11\n"
        "Once more: python -m tests.chaos.fuzzing --seed 3 --frame 0"
    )


@pytest.mark.slow
def test_frame_is_reproduced_from_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Decoding(3).made(17) == Decoding(3).made(17)
    assert Decoding(3).made(17) != Decoding(4).made(17)

    def decode_header(*_: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(MessageCodec, "decode_header", decode_header)
    with pytest.raises(ZeroDivisionError):
        decode(3, range(100), multiprocessing.Value("q", 0))
    monkeypatch.setattr(MessageCodec, "decode_header", _refuses)
    assert decode(3, range(100), multiprocessing.Value("q", 0)) == 0


def _refuses(*_: Any) -> None:
    raise ProtocolError("no")
