# SPDX-License-Identifier: Apache-2.0
"""How soon the live page of a running job shows figures, and a kill; in Chromium.

The browser shares the machine with the job, as on a user's own machine. It needs playwright from
pip and an installed Chromium.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks import jobs, report
from benchmarks.launch_overhead import launcher

CLAIM = (
    "While wide & deep trains on 2 servers and 2 workers, the page shows the job's figures within "
    "1 s of its opening, and a SIGKILL of a worker within 2 s. Chromium and the job share the "
    "machine; each opening has an empty cache, and a worker is killed while the page is open."
)
OPEN_S, KILL_S = 1.0, 2.0
SCRIPT = jobs.ROOT / "examples" / "wide_deep" / "train_fleet.py"
_READY = re.compile(r"epoch \d+ step [1-9]\d* loss")
_DEADLINE_S = 120.0
#: the moment at which the page says that the job runs, with a rate above 0
_LIVE = """() => new Promise((done) => {
  const look = () => {
    const rate = document.querySelector("#tiles dd"), state = document.querySelector("#state");
    if (rate && parseFloat(rate.textContent) > 0 && state.textContent === "running") {
      requestAnimationFrame(() => done(performance.now() / 1000));
    } else requestAnimationFrame(look);
  };
  look();
})"""
#: the cells of worker 1 by column
_WORKER = """() => {
  const table = document.querySelector("#process-table");
  const names = [...table.tHead.rows[0].cells].map((cell) => cell.textContent);
  const row = [...table.tBodies[0].rows].find((one) => one.cells[0].textContent === "worker 1");
  return Object.fromEntries(names.map((name, i) => [name, row.cells[i].textContent]));
}"""
_IS_BACK = f"""(pid) => {{
  const row = ({_WORKER})();
  return row.PID !== pid && parseFloat(row.Step) > 0;
}}"""
#: how many kills the list of events has
_KILLS = """() => document.querySelector("#event-list").textContent.split("SIGKILL").length - 1"""
_MORE_KILLS = f"(known) => ({_KILLS})() > known"


@contextlib.contextmanager
def running_job() -> Iterator[str]:
    """Start the job, wait until it trains, give the link of its page; in the end it is stopped."""
    size = ["--server_num", "2", "--worker_num", "2", "--max_restarts", "100"]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        folder = Path(name)
        command = [*launcher(), "--dashboard", *size, "--log_dir", str(folder / "log")]
        command += [str(SCRIPT), "--samples", "800000", "--epochs", "1000"]
        with jobs.ending_at_sigterm():
            [process] = jobs.start(jobs.Job("job", [jobs.Command(command)]), folder)
            try:
                yield _link(process, folder)
            finally:
                process.send_signal(signal.SIGTERM)
                process.wait()


def _link(process: subprocess.Popen[bytes], folder: Path) -> str:
    end = time.monotonic() + _DEADLINE_S
    while True:
        printed = (folder / "process0.log").read_text()
        link = re.search(r"page: (\S+)", printed)
        if link and _READY.search(printed):
            return link[1]
        if process.poll() is not None or time.monotonic() > end:
            raise jobs.BenchmarkError(f"the job does not train:\n{jobs.tail(folder)}")
        time.sleep(0.1)


@contextlib.contextmanager
def browser() -> Iterator[Any]:
    """Chromium without a window."""
    from playwright.sync_api import sync_playwright

    path = shutil.which("chromium") or shutil.which("google-chrome")
    if path is None:
        raise jobs.BenchmarkError("found no Chromium; install it: apt-get install chromium")
    with sync_playwright() as found:
        started = found.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield started
        started.close()


@contextlib.contextmanager
def opened(chromium: Any, link: str) -> Iterator[Any]:
    """A page with an empty cache."""
    context = chromium.new_context()
    page = context.new_page()
    page.goto(link, wait_until="commit")
    yield page
    context.close()


def opening_s(chromium: Any, link: str) -> float:
    """Seconds from the request of the link to the frame with the first figures."""
    with opened(chromium, link) as page:
        return float(page.evaluate(_LIVE))


def kill_s(chromium: Any, link: str) -> float:
    """Seconds from a SIGKILL of worker 1 until the page shows it; returns once it trains again."""
    with opened(chromium, link) as page:
        page.evaluate(_LIVE)
        known, pid = page.evaluate(_KILLS), int(page.evaluate(_WORKER)["PID"])
        began = time.perf_counter()
        os.kill(pid, signal.SIGKILL)
        page.wait_for_function(_MORE_KILLS, arg=known, polling="raf")
        shown = time.perf_counter() - began
        page.wait_for_function(_IS_BACK, arg=str(pid), timeout=1e3 * _DEADLINE_S)
        return shown


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and write the result page."""
    options = _parse(argv)
    report.page("live_page", CLAIM, _sections(options), keep=options.write)
    return 0


def _sections(options: argparse.Namespace) -> Iterator[str]:
    with running_job() as link, browser() as chromium:
        # the first page of a browser loads the browser, too
        opening_s(chromium, link)
        openings = [opening_s(chromium, link) for _ in range(options.openings)]
        kills = [kill_s(chromium, link) for _ in range(options.kills)]
    rows = [
        _row("from opening the page to its first figures", openings, OPEN_S),
        _row("from a SIGKILL until the page shows it", kills, KILL_S),
    ]
    head = ("seconds", "times", "median (min..max)", "at most")
    yield "## Seconds in Chromium\n\n" + report.table(head, rows)


def _row(what: str, seconds: Sequence[float], most: float) -> Sequence[str]:
    spread = report.Spread.of(seconds)
    verdict = "met" if spread.median <= most else "missed"
    if verdict == "met" and spread.high > most:
        late = sum(one > most for one in seconds)
        verdict = f"met by the median; {late} of {len(seconds)} later"
    return what, str(len(seconds)), str(spread), f"{most:g}: {verdict}"


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--openings", type=int, default=20)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--write", action=argparse.BooleanOptionalAction, default=True)
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
