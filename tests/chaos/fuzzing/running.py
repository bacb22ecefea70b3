# SPDX-License-Identifier: Apache-2.0
"""Many frames, in a process that may crash; reports the last frame."""

import argparse
import faulthandler
import multiprocessing
import resource
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.chaos.fuzzing.decoding import Decoding
from tests.chaos.fuzzing.serving import AT_ONCE, Serving

#: one of so many frames goes to a server that listens
SHARE = 20
#: growth in bytes after the first rounds that is too much
GROWTH = 300 << 20
_WARM = 5


def resident() -> int:
    """Bytes of memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def decode(seed: int, numbers: range, at: Any) -> int:
    """Frames for the decoder; returns how many of them were whole."""
    decoding, whole = Decoding(seed), 0
    for number in numbers:
        at.value = number
        whole += decoding.run(number)
    return whole


def serve(seed: int, frames: int, at: Any, at_once: int = AT_ONCE) -> tuple[int, int]:
    """Frames for servers; returns how many were sent, and the growth of memory."""
    serving, sent, warm, most = Serving(seed), 0, 0, 0
    while sent < frames:
        sent += serving.round(at.value, at_once)
        at.value += 1
        if at.value == _WARM:
            warm = resident()
        elif warm:
            most = max(most, resident() - warm)
            assert most < GROWTH, f"memory grew by {most >> 20} MiB in {at.value} rounds"
    return sent, most


def _all(seed: int, frames: int, at: Any, stage: Any, results: Any) -> None:
    faulthandler.enable()
    began = time.monotonic()
    try:
        served = frames // SHARE
        whole = decode(seed, range(frames - served), at)
        rate = (frames - served) / (time.monotonic() - began)
        stage.value, at.value = 1, 0
        sent, growth = serve(seed, served, at)
        results.put(
            f"fuzzing, seed {seed}: {frames - served} frames for the decoder ({whole} of them "
            f"whole, {rate:.0f} a second), {sent} for {at.value} servers (memory grew by "
            f"{growth >> 20} MiB): 0 crashes, 0 hangs"
        )
    except Exception:
        results.put(traceback.format_exc())
        sys.exit(1)


def fuzz(seed: int, frames: int) -> tuple[bool, str]:
    """True where all went well, and the report."""
    context = multiprocessing.get_context("spawn")
    at, stage, results = context.Value("q", 0), context.Value("i", 0), context.Queue()
    process = context.Process(target=_all, args=(seed, frames, at, stage, results))
    process.start()
    text = ""
    while process.is_alive() and not text:
        text = _waited(results)
    process.join()
    text = text or _waited(results) or f"the process died, exit code {process.exitcode}"
    if process.exitcode == 0:
        return True, text
    what = "--frame" if stage.value == 0 else "--round"
    once_more = f"python -m tests.chaos.fuzzing --seed {seed} {what} {at.value}"
    return False, f"{text}\nOnce more: {once_more}"


def _waited(results: Any) -> str:
    try:
        return str(results.get(timeout=0.5))
    except Exception:
        return ""


def main(argv: Sequence[str] | None = None) -> int:
    """Try as many frames as requested; returns 1 where one did harm."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.fuzzing")
    parser.add_argument("--frames", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--frame", type=int, help="only this one, for the decoder")
    parser.add_argument("--round", type=int, help="only this one, a connection at a time")
    options = parser.parse_args(argv)
    if options.frame is not None:
        print(Decoding(options.seed).made(options.frame))
        print("whole" if Decoding(options.seed).run(options.frame) else "refused")
        return 0
    if options.round is not None:
        print(Serving(options.seed).round(options.round, at_once=1), "frames did no harm")
        return 0
    well, text = fuzz(options.seed, options.frames)
    print(text)
    return 0 if well else 1
