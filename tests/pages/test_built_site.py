# SPDX-License-Identifier: Apache-2.0
"""Pages of the built site name nothing elsewhere (the theme itself gets the script that draws
diagrams), and no page overflows a wide or a narrow screen."""

from __future__ import annotations

import functools
import http.server
import importlib.util
import json
import queue
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.test_docs import ROOT

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
BROWSER = next(filter(None, map(shutil.which, BROWSERS)), None)
WIDTHS = (1280, 390)
#: parts of a page that may be too wide
PARTS = ".md-content pre, .md-content pre > code, .md-content table"
#: what a page loads when it is opened
LOADED = re.compile(
    r'<(?:script|img|iframe)[^>]* src="(https?:[^"]+)|<link[^>]* href="(https?:[^"]+)"[^>]*>'
    r'|url\(["\']?(https?:[^)"\']+)'
)
SCRIPT = """
const found = [];
async function measure() {
  const frame = document.createElement("iframe");
  frame.style.border = 0;
  document.body.append(frame);
  for (const width of WIDTHS) for (const page of PAGES) {
    frame.width = width;
    frame.height = 800;
    await new Promise(done => { frame.onload = done; frame.src = page; });
    const inner = frame.contentDocument;
    // also the tabs that are not open
    inner.head.insertAdjacentHTML("beforeend",
      "<style>.tabbed-block { display: block !important }</style>");
    const wide = inner.documentElement.scrollWidth;
    if (wide > width) found.push([page, width, "the page", wide]);
    for (const part of inner.querySelectorAll(PARTS)) {
      const right = part.getBoundingClientRect().right;
      if (part.scrollWidth > part.clientWidth + 1 || right > width + 1)
        found.push([page, width, part.tagName, part.textContent.trim().slice(0, 60)]);
    }
  }
  await fetch("/found", { method: "POST", body: JSON.stringify(found) });
}
measure();
"""

#: what the browser has found
posted: queue.Queue[bytes] = queue.Queue()

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        importlib.util.find_spec("material") is None, reason="make docs installs MkDocs"
    ),
]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir"]
    done = subprocess.run(
        [*build, str(folder)], cwd=ROOT, capture_output=True, text=True, check=False, timeout=110
    )
    assert done.returncode == 0, done.stderr
    return folder


def test_pages_load_nothing_from_elsewhere(site: Path) -> None:
    pages = sorted([*site.rglob("*.html"), *site.rglob("*.css")])
    assert len(pages) > 50
    for page in pages:
        links = [link for match in LOADED.findall(page.read_text()) for link in match if link]
        assert not links, f"{page.relative_to(site)} loads {links}"


@pytest.fixture
def address(site: Path) -> Iterator[str]:
    """A server of the site on this machine."""
    handler = functools.partial(Quiet, directory=str(site))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


class Quiet(http.server.SimpleHTTPRequestHandler):
    """Serves files without a line for each request, and takes what a page posts."""

    def do_POST(self) -> None:
        posted.put(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(204)
        self.end_headers()

    def log_message(self, *args: object) -> None:
        pass


needs_browser = pytest.mark.skipif(
    BROWSER is None, reason=f"none of {', '.join(BROWSERS)} is installed"
)


def browser(address: str, profile: Path, *more: str) -> list[str]:
    """The command that opens a page without a window."""
    assert BROWSER is not None
    flags = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}"]
    return [BROWSER, *flags, *more, address]


@needs_browser
def test_search_works_in_files_without_a_server(site: Path, tmp_path: Path) -> None:
    flags = ("--virtual-time-budget=20000", "--dump-dom")
    command = browser(f"file://{site}/index.html?q=staleness", tmp_path, *flags)
    page = subprocess.run(command, capture_output=True, text=True, check=True, timeout=100).stdout
    match = re.search(r"(\d+) matching documents", page)
    assert match
    assert int(match[1]) > 5


@pytest.mark.timeout(300)
@needs_browser
def test_no_page_overflows(site: Path, address: str, tmp_path: Path) -> None:
    pages = [str(page.relative_to(site)) for page in sorted(site.rglob("*.html"))]
    names = {"PAGES": pages, "WIDTHS": WIDTHS, "PARTS": PARTS}
    head = "".join(f"const {name} = {json.dumps(value)};" for name, value in names.items())
    (site / "measured.html").write_text(f"<body><script>{head}{SCRIPT}</script></body>")
    running = subprocess.Popen(
        browser(f"{address}/measured.html", tmp_path), stderr=subprocess.DEVNULL
    )
    try:
        found = json.loads(posted.get(timeout=280))
    finally:
        running.terminate()
        running.wait()
        (site / "measured.html").unlink()
    assert not found, "\n".join(map(str, found))
