# SPDX-License-Identifier: Apache-2.0
"""The page in Chromium: its elements, keyboard, contrast and width, with a simulated job."""

import json
import os
import random
import re
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.dashboard.clients import Site, serving
from tests.dashboard.simulated import SimulatedJob
from tests.launch.conftest import place
from tests.launch.workplace import Workplace
from tests.multiprocess.test_dashboard import SCRIPT

from fleetlight.dashboard import server
from fleetlight.static.drawing.picture import Picture, PictureArrow, PictureBox
from fleetlight.static.drawing.svg import svg_of

playwright = pytest.importorskip("playwright.sync_api")
__all__ = ["place"]
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="needs a browser: apt-get install chromium"),
]

#: texts with less contrast than WCAG's AA asks for, and elements that are wider than the page
CHECKS = """() => {
  const channel = (v) => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
  const parse = (text) => (text.match(/[\\d.]+/g) || []).map(Number);
  const light = ([r, g, b]) => 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b);
  const ground = (element) => {
    for (let one = element; one; one = one.parentElement) {
      const colour = parse(getComputedStyle(one).backgroundColor);
      if (colour.length === 3 || colour[3] > 0.99) return colour;
    }
    return [255, 255, 255];
  };
  const faint = [];
  for (const element of document.querySelectorAll("body *")) {
    const own = [...element.childNodes].some((n) => n.nodeType === 3 && n.data.trim());
    const box = element.getBoundingClientRect();
    if (!own || !box.width || !box.height) continue;
    const style = getComputedStyle(element);
    const text = element.closest("svg") ? style.fill : style.color;
    const [a, b] = [light(parse(text)), light(ground(element))];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < 4.5) faint.push(`${element.tagName} ${element.textContent.slice(0, 30)} ${ratio}`);
  }
  const wide = [...document.querySelectorAll("body *")].filter((element) =>
    !element.closest(".scroll, .uplot, .skip, svg")
    && element.getBoundingClientRect().right > innerWidth + 1).map((e) => e.outerHTML.slice(0, 80));
  return { faint, wide, scroll: document.documentElement.scrollWidth };
}"""


#: the picture of a static program
PROGRAM = Picture(
    "Training step of Net",
    (),
    (PictureBox("f0", "forward", ("<b>layer</b>",)), PictureBox("b0", "backward", ("∂ layer",))),
    (PictureArrow("f0", "b0", "1 kept", "kept"),),
    (),
    (),
)
#: a picture that would run scripts, if it were part of the page
HARMFUL = """<svg xmlns="http://www.w3.org/2000/svg" width="30" height="20"
 onload="alert('onload')"><script>alert("script")</script><script href="main.js"/>
<image href="/logs/workerlog.0"/></svg>"""


#: the ids of processes by name
_PIDS = """() => {
  const { tHead, tBodies } = document.querySelector("#process-table");
  const at = [...tHead.rows[0].cells].findIndex((cell) => cell.textContent === "PID");
  const pid = (row) => [row.cells[0].textContent, Number(row.cells[at].textContent)];
  return Object.fromEntries([...tBodies[0].rows].map(pid));
}"""


#: charts that are wider than their places
_OVERLAPS = """() => [...document.querySelectorAll("#logged-charts figure")]
  .filter((one) => one.querySelector(".uplot").getBoundingClientRect().right
    > one.getBoundingClientRect().right + 1).map((one) => one.dataset.name)"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as found:
        browser = found.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> SimulatedJob:
    return _job(tmp_path_factory.mktemp("log"), workers=4)


@pytest.fixture(scope="module")
def site(job: SimulatedJob) -> Iterator[Site]:
    with serving(job) as site:
        yield site


def _job(folder: Path, workers: int) -> SimulatedJob:
    job = SimulatedJob(folder, workers, servers=2)
    job.workers[1].parts["data"] = 0.1
    for worker in job.workers:
        worker.logged["loss"] = 0.5
    job.run(30, random.Random(0))
    job.event("worker 1", "exit", "worker 1 (pid 7) was killed by SIGKILL")
    job.run(30, random.Random(1))
    job.launcher()
    (folder / "workerlog.0").write_text("step 1 <b>loss</b> 0.5\nValueError: a bad row\n")
    said = {"explain": "a_sync takes effect: ...", "svg": svg_of(PROGRAM)}
    (folder / "metrics" / "job.json").write_text(json.dumps(said))
    return job


@pytest.fixture
def page(browser: Any, site: Site) -> Iterator[Any]:
    with _opened(browser, site.link) as page:
        yield page


class _opened:
    """A page that has drawn its first metrics; errors of its scripts fail the test."""

    def __init__(self, browser: Any, link: str, **options: Any) -> None:
        self._context = browser.new_context(**options)
        self._link = link
        self._errors: list[str] = []

    def __enter__(self) -> Any:
        page = self._context.new_page()
        page.on("console", lambda message: self._errors.append(message.text))
        page.on("pageerror", lambda error: self._errors.append(str(error)))
        page.on("requestfailed", self._keep)
        page.goto(self._link)
        page.wait_for_selector("#process-table tbody tr")
        return page

    def _keep(self, request: Any) -> None:
        # the page closes the stream of a job that has ended
        if not request.url.endswith("/feed"):
            self._errors.append(request.url)

    def __exit__(self, *raised: Any) -> None:
        errors = list(self._errors)
        self._context.close()
        assert errors == []


def test_the_token_leaves_the_address(page: Any, site: Site) -> None:
    assert page.url == f"http://127.0.0.1:{site.port}/"


def test_each_section_has_its_content(page: Any) -> None:
    text = page.inner_text("main")
    for part in ("worker 1 takes", "data", "users", "killed by SIGKILL", "a_sync takes effect"):
        assert part in text
    assert page.locator("#topology .node").count() == 6
    assert page.locator("#topology path").count() == 8
    assert page.locator("#splits .split").count() == 4
    assert page.locator("#bars div").count() == 4
    assert page.locator("#chart-rate canvas").count() == 1
    assert page.locator("#logged-charts figure").count() == 1
    assert "worker 1" in page.locator("tr.slow").inner_text()


def test_the_program_is_shown(page: Any) -> None:
    page.wait_for_function("() => document.querySelector('#picture img').naturalWidth > 100")
    assert page.locator("#picture img").is_visible()
    assert page.locator("#picture svg").count() == 0, "an image, not a part of the page"


def test_a_picture_runs_no_script(browser: Any, tmp_path: Path) -> None:
    job = _job(tmp_path, workers=2)
    (tmp_path / "metrics" / "job.json").write_text(json.dumps({"svg": HARMFUL}))
    with serving(job) as site:
        ran: list[str] = []
        with _opened(browser, site.link) as page:
            page.on("dialog", lambda dialog: (ran.append(dialog.message), dialog.dismiss()))
            page.wait_for_function("() => document.querySelector('#picture img').naturalWidth")
            # on its own, it is a document: its policy has to hold
            alone = page.context.new_page()
            alone.on("dialog", lambda dialog: (ran.append(dialog.message), dialog.dismiss()))
            assert alone.goto(f"http://127.0.0.1:{site.port}/program.svg").status == 200
            alone.wait_for_load_state()
        assert ran == []


def test_logs_are_text_and_can_be_searched(page: Any) -> None:
    page.wait_for_function(
        "() => document.querySelector('#log-text').textContent.includes('<b>loss')"
    )
    page.fill("#log-find", "valueerror")
    page.wait_for_selector("#log-text mark")
    assert page.inner_text("#log-text").strip() == "ValueError: a bad row"


def test_everything_is_reached_by_the_keyboard(page: Any) -> None:
    reached = []
    for _ in range(40):
        page.keyboard.press("Tab")
        reached.append(
            page.evaluate(
                "document.activeElement.id || document.activeElement.getAttribute('href') || ''"
            )
        )
        if reached[-1] == "log-text":
            break
    wanted = [
        "#main",
        "#processes",
        "range",
        "theme",
        "topology",
        "log-name",
        "log-find",
        "log-text",
    ]
    places = [reached.index(name) for name in wanted]
    assert places == sorted(places)
    page.focus("#theme")
    before = page.evaluate("document.documentElement.dataset.theme")
    page.keyboard.press("Enter")
    assert page.evaluate("document.documentElement.dataset.theme") != before


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_contrast_and_width(browser: Any, site: Site, scheme: str, width: int) -> None:
    options = {"viewport": {"width": width, "height": 900}, "color_scheme": scheme}
    with _opened(browser, site.link, **options) as page:
        assert page.evaluate("document.documentElement.dataset.theme") == scheme
        found = page.evaluate(CHECKS)
    assert found == {"faint": [], "wide": [], "scroll": width}


def test_a_kill_shows_without_a_reload(browser: Any, tmp_path: Path) -> None:
    job = _job(tmp_path, workers=3)
    with serving(job) as site, _opened(browser, site.link) as page:
        job.statuses["worker 2"] = -9
        job.launcher()
        page.wait_for_selector("#topology .node.failed")
        assert "worker 2: killed by SIGKILL" in page.inner_text("#state")


#: the state line has a text
_SAYS = "(text) => document.querySelector('#state').innerText.includes(text)"


def test_a_page_without_a_connection_says_so(browser: Any, site: Site) -> None:
    with browser.new_page() as page:
        page.route("**/feed", lambda route: route.abort("connectionrefused"))
        page.goto(site.link)
        page.wait_for_function(_SAYS, arg="out of reach")
        page.unroute("**/feed")
        page.wait_for_function(_SAYS, arg="running")
        assert page.locator("#process-table tbody tr").count() == 6


def test_a_page_too_many_says_so_until_another_closes(
    browser: Any, job: SimulatedJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "_MAX_CLIENTS", 1)
    with serving(job) as site, browser.new_page() as page:
        with site.events() as events:
            next(events)
            page.goto(site.link)
            page.wait_for_function(_SAYS, arg="1 pages are open; close one")
        page.wait_for_function(_SAYS, arg="running")
        assert page.locator("#process-table tbody tr").count() == 6


def test_charts_of_new_values_overlap_no_other(browser: Any, tmp_path: Path) -> None:
    job = _job(tmp_path, workers=2)
    with serving(job) as site, _opened(browser, site.link) as page:
        # sections out of sight are not drawn again
        page.locator("#logged").scroll_into_view_if_needed()
        for name in ("auc", "norm"):
            for worker in job.workers:
                worker.logged[name] = 0.5
            job.run(2)
            page.wait_for_selector(f"#logged-charts figure[data-name={name}] .u-over")
            assert page.evaluate(_OVERLAPS) == []


@pytest.mark.multiprocess
def test_a_real_job_and_its_kill_are_shown(browser: Any, place: Workplace) -> None:
    job = place.start("--dashboard", "--nproc_per_node", "2", place.script(SCRIPT))
    job.wait_for_line("page: ")
    link = re.search(r"page: (\S+)", job.printed)
    assert link is not None
    with _opened(browser, link[1]) as page:
        page.wait_for_function("() => document.querySelectorAll('#splits .split').length === 2")
        assert page.inner_text("#state") == "running"
        pid = page.evaluate(_PIDS)["worker 1"]
        assert pid > 1
        os.kill(pid, signal.SIGKILL)
        page.wait_for_selector("#topology .node.failed")
        # the feed ends with the job
        page.wait_for_function("() => document.querySelector('#state').innerText.includes('137')")
        assert "worker 1\nexit\nwas killed by SIGKILL" in page.inner_text("#event-list")
    code, printed = job.end()
    assert code == 137, printed


def test_64_workers_are_drawn_fast(browser: Any, tmp_path: Path) -> None:
    """The time of a frame is printed; the test only bounds what is drawn."""
    job = _job(tmp_path, workers=64)
    with serving(job) as site, _opened(browser, site.link) as page:
        for _ in range(5):
            before = page.inner_text("#tiles")
            job.run(1)
            page.wait_for_function(
                "(old) => document.querySelector('#tiles').innerText !== old", arg=before
            )
        assert page.locator("#process-table tbody tr").count() == 66
        assert page.locator("#chart-step .u-series").count() == 5
        assert page.locator("#topology path").count() <= 256
