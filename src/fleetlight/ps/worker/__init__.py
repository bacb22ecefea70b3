# SPDX-License-Identifier: Apache-2.0
"""A worker's side: splitting requests among the servers, and when to ask.

`worker/` is the client. `connections.py` has one connection to each server per lane, and sends
heartbeats, which a hung server does not delay, `client.py` splits a request among the servers and
merges their replies (`push_request.py`, `reply_values.py`; `chunks.py`: the differences of
GeoSGD, in chunks). `lookahead/` reads the rows of announced batches: on one host by the pushes
themselves (`pull_in_push.py`), between hosts on a lane of its own (`prefetcher.py`).
`expected_rows.py` tells servers with rows in files which they will read, so that the disks begin.
`joint_reads.py` lets the lookups of several tables share a request. If a layer has a cache,
`cached_rows.py` is the layers' source of rows. It pulls what a device lacks, and a sync step
outdates rows there: those of the push, and those of other workers in its reply
(`Pushed.outdated`). `communicator/` decides when to pull and push (`sync`, `async_`, `geo`: one
interface; an async worker steps its dense parameters itself). An async worker sends by a `Pusher`
(`pusher.py`): one push in flight on one host, a thread with a queue between hosts (`async_.py`).
`served_group.py` has barriers and collectives through server 0, with the methods of a collective
`Group`. `replay/` is the log from which a killed worker resumes: `commit_log.py` (the next push,
before it leaves, and the `ResumePoint` in the script), `replay_log.py` (results of calls that run
once in a job, so that the script can run again from its beginning), `worker_journal.py` (the
folder, its owner, and large tensors that seldom change), `step_journal.py` (the protocol that
`Client` uses, and `NoJournal`, for a job without durability). After all processes were killed,
each reports to server 0 what it has left. `ps/resume.py` decides how the job resumes (pure),
`server/server.py` collects the reports, and `fleet/served/durable/whole_resume.py` carries the
decision out.
"""
