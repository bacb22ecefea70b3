# SPDX-License-Identifier: Apache-2.0
"""The live page of a job: what its processes do, read from its log folder.

`dashboard` is the live page, a process of its own that reads the log folder only; it never
imports torch. `view/` is pure: `process_view.py` follows the metrics of one process,
`timeline.py` keeps all on one axis with a maximum of moments, and `job_view.py` makes the content
of the page: once as a whole, then what is new. It finds the worker that slows the others, and
joins records and events, since the records of launchers on other machines stay there. `feed.py`
polls the files. A client has a cursor and no queue, so that a browser that reads nothing costs no
memory (`server.py`). A `Guard` there checks token, Host and Origin of every request, and no
script of a picture runs; `prometheus.py` exports the metrics. `page/` has the scripts of the
browser, without a build step, and uPlot; `feed.js` there opens the stream before the other
scripts are loaded. `launch/processes/followers/dashboard.py` binds the port, so that a port that
is taken is an error before the job starts. `text_view.py` (pure) is the same for `fleetlight
top`.
"""
