# SPDX-License-Identifier: Apache-2.0
"""The page over real connections: who may read it, and what clients get that read slowly."""

import asyncio
import itertools
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.dashboard.clients import TOKEN, Site, serving
from tests.dashboard.simulated import SimulatedJob

from fleetlight.dashboard import feed as feed_module
from fleetlight.dashboard.feed import JobFeed

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> SimulatedJob:
    job = SimulatedJob(tmp_path_factory.mktemp("log"), 2, 1)
    job.launcher()
    job.run(10)
    (job.folder / "workerlog.0").write_text("first line\nsecond line\n")
    (job.folder / "secret.txt").write_text("a secret")
    return job


@pytest.fixture(scope="module")
def site(job: SimulatedJob) -> Iterator[Site]:
    with serving(job) as site:
        yield site


def test_the_link_sets_a_cookie_and_leaves_the_token_out(site: Site) -> None:
    status, headers, _ = site.ask(f"/?token={TOKEN}", {})
    assert (status, headers["location"]) == (303, "/")
    cookie = headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert TOKEN not in cookie
    value = cookie.partition(";")[0]
    assert value.startswith(f"fleetlight_{site.port}=")
    for path in ("/", "/main.js", "/logs", "/metrics"):
        assert site.ask(path, {"Cookie": value})[0] == 200
    assert site.ask("/", {"Cookie": value + "x"})[0] == 401
    # those of other ports of this machine may have any form
    for other in ('prefs={"a": 1}', "a=x y", "a", "[x]=1"):
        assert site.ask("/", {"Cookie": f"{other}; {value}"})[0] == 200


@pytest.mark.sampled(18)
@pytest.mark.parametrize("path", ["/", "/main.js", "/feed", "/logs", "/metrics", "/nothing"])
@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer wrong"}, {"Cookie": "a=b"}])
def test_nothing_is_read_without_the_token(site: Site, path: str, headers: dict[str, str]) -> None:
    status, _, body = site.ask(path, headers)
    assert status == 401
    assert b"open the link that fleetrun printed" in body
    assert TOKEN.encode() not in body


@pytest.mark.sampled(4)
@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", ""])
def test_a_forged_host_is_refused(site: Site, host: str) -> None:
    status, _, body = site.get("/feed", {"Host": host})
    assert status == 403
    assert b"expected 127.0.0.1 or localhost" in body


def test_a_tunnel_has_another_port(site: Site) -> None:
    assert site.get("/logs", {"Host": "localhost:9999"})[0] == 200


@pytest.mark.sampled(3)
@pytest.mark.parametrize("origin", ["http://evil.example", "null", "http://127.0.0.1:1"])
def test_another_origin_is_refused(site: Site, origin: str) -> None:
    assert site.get("/feed", {"Origin": origin})[0] == 403


def test_the_own_origin_is_accepted(site: Site) -> None:
    host = f"127.0.0.1:{site.port}"
    assert site.get("/logs", {"Host": host, "Origin": f"http://{host}"})[0] == 200


def test_the_headers_of_the_feed_end_at_once(site: Site) -> None:
    assert site.get("/feed", method="HEAD")[0] == 200


@pytest.mark.sampled(4)
@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS"])
def test_the_page_is_read_only(site: Site, method: str) -> None:
    assert site.get("/", method=method)[0] == 405


def test_headers_of_every_answer(site: Site) -> None:
    for path, status in (("/", 200), ("/uplot.js", 200), ("/nothing", 404)):
        found, headers, _ = site.get(path)
        assert found == status
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert headers["x-content-type-options"] == "nosniff"
        assert "access-control-allow-origin" not in headers


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    "path",
    ["/logs/secret.txt", "/logs/..%2fsecret.txt", "/logs/%2e%2e", "/..%2fserver.py", "/server.py"],
)
def test_no_other_file_is_read(site: Site, path: str) -> None:
    status, _, body = site.get(path)
    assert status == 404
    assert b"secret" not in body


def test_logs_and_their_search(site: Site) -> None:
    assert site.get("/logs")[2] == b'["workerlog.0"]'
    assert b'"lines":["second line"]' in site.get("/logs/workerlog.0?find=SECOND")[2]


def test_a_picture_is_there_once_the_job_has_one(site: Site, job: SimulatedJob) -> None:
    assert site.get("/program.svg")[0] == 404
    (job.folder / "metrics/job.json").write_text('{"svg": "<svg/>", "explain": "a_sync: on"}')
    status, headers, body = site.get("/program.svg")
    assert (status, headers["content-type"], body) == (200, "image/svg+xml", b"<svg/>")
    # no script of it runs, also where it is opened as a page
    [policy] = headers.get_all("content-security-policy") or []
    assert policy.split("; ") == ["default-src 'none'", "frame-ancestors 'none'", "sandbox"]
    assert headers["x-content-type-options"] == "nosniff"


def test_the_feed_sends_everything_and_then_news(site: Site, job: SimulatedJob) -> None:
    with site.events() as events:
        kind, whole = next(events)
        assert kind == "whole"
        assert {row["name"] for row in whole["processes"]} == {"server 0", "worker 0", "worker 1"}
        job.run(1)
        kind, news = next(events)
        assert kind == "news"
        assert news["processes"][1]["step"] > whole["processes"][1]["step"]
        assert len(news["lines"]["times"]) < len(whole["lines"]["times"]) + 3


def test_news_of_another_poll_wake_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = SimulatedJob(tmp_path, 1, 0)
    job.run(1)
    polled = threading.Event()

    def poll(feed: JobFeed, read: Callable[[JobFeed], bool] = JobFeed.poll) -> bool:
        found = read(feed)
        polled.set()
        return found

    async def scenario() -> None:
        feed = JobFeed(job.folder, lambda: 0.0)
        feed.poll()
        last = feed.message(None)
        assert last is not None
        monkeypatch.setattr(JobFeed, "poll", poll)
        with feed.client():
            following = asyncio.create_task(feed.run())
            waiting = asyncio.create_task(feed.wait(last.version, 60))
            await asyncio.to_thread(polled.wait)
            job.run(1)
            feed.newest()
            await asyncio.wait_for(waiting, 20)
            following.cancel()

    asyncio.run(scenario())


@pytest.mark.long
def test_a_client_not_reading_has_no_queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its messages are made when it can take them, so their number does not grow."""
    made: list[int] = []
    message = JobFeed.message

    def counted(self: JobFeed, last: feed_module.Message | None) -> feed_module.Message | None:
        found = message(self, last)
        if found is not None:
            made.append(len(found.data))
        return found

    monkeypatch.setattr(JobFeed, "message", counted)
    monkeypatch.setattr(feed_module, "EVERY_S", 0.01)
    job = SimulatedJob(tmp_path, workers=96, servers=1)
    job.run(20)
    with serving(job) as site, site.events() as events:
        next(events)
        made.clear()
        stalled = site.stalled()
        # the other client shows that the server goes through 50 changes meanwhile
        for _ in range(50):
            job.run(1)
            next(events)
        # what the socket holds, and no more
        assert len(made) < 50 + 25
        stalled.close()


def test_too_many_pages_are_refused(site: Site) -> None:
    with_feed = [site.events() for _ in range(32)]
    try:
        for one in with_feed:
            next(one.__enter__())
        status, _, body = site.get("/feed")
        assert (status, body) == (503, b"32 pages are open; close one\n")
    finally:
        for one in with_feed:
            one.__exit__(None, None, None)


def test_a_process_that_dies_is_down_in_metrics(tmp_path: Path) -> None:
    job = SimulatedJob(tmp_path, 2, 1)
    job.launcher()
    job.run(10)
    with serving(job) as site:
        text = site.get("/metrics")[2].decode()
        assert 'fleetlight_up{index="0",role="server"} 1.0' in text
        assert 'fleetlight_table_rows{index="0",role="server",table="users"}' in text
        job.statuses["server 0"] = -9
        job.launcher()
        text = site.get("/metrics")[2].decode()
    assert 'fleetlight_up{index="0",role="server"} 0.0' in text
    assert 'table="users"' not in text
    assert 'fleetlight_steps_total{index="1",role="worker"}' in text


def test_concurrent_scrapes_while_the_job_runs(site: Site, job: SimulatedJob) -> None:
    for _ in itertools.repeat(None, 5):
        job.run(1)
        assert site.get("/metrics")[0] == 200
