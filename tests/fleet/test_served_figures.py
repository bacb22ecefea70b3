# SPDX-License-Identifier: Apache-2.0
"""What is said at the end of a job with parameter servers."""

from __future__ import annotations

from fleetlight.fleet.served_figures import of_server, of_servers, of_worker, too_late
from fleetlight.ps.messages import Counted

MIB = 2**20


def test_a_worker_tells_its_counts_and_times() -> None:
    figures = {"steps": 1200.0, "rows ahead": 7.0, "waited s": 0.04}
    assert of_worker(figures) == "done: steps 1,200, rows ahead 7, waited 0.0 s"


def test_a_server_tells_its_pushes_and_tables() -> None:
    counted = Counted(1200, {"wide": 3000, "deep": 5}, {"wide": 3 * MIB, "deep": 0}, {})
    assert of_server(counted) == (
        "all workers have left after 1,200 pushes; "
        "tables: wide 3,000 rows, 3.0 MiB; deep 5 rows, 0.0 MiB"
    )


def test_servers_are_summed_and_staleness_is_averaged_over_pushes() -> None:
    one = Counted(4, {"deep": 1000}, {"deep": MIB}, {0: 3, 2: 1})
    other = Counted(4, {"deep": 500}, {"deep": MIB}, {0: 1, 4: 1})
    assert of_servers([one, other]) == (
        "servers: 4 pushes, staleness 1.00 on average, 4 at most; tables: deep 1,500 rows, 2.0 MiB"
    )


def test_without_pushes_and_tables_that_is_said() -> None:
    told = of_servers([Counted(0, {}, {}, {})])
    assert told == "servers: 0 pushes, staleness not counted; no tables"


def test_a_delay_beyond_what_workers_make_is_warned_of() -> None:
    usual, late = Counted(9, {}, {}, {3: 8, 9: 1}), Counted(9, {}, {}, {4: 1, 6: 3})
    assert too_late([usual], 2) is None
    told = too_late([usual, late], 2)
    assert told is not None
    assert told.startswith("gradients were 5.5 changes late on average, expected 4 at most")
    assert "leave out send_queue_size" in told
    assert too_late([], 2) is None
