# SPDX-License-Identifier: Apache-2.0
"""Handles the messages of workers: state machines decide, and `PresenceMonitor` waits.

`server/` handles messages. `server.py` chooses a method for each message; `membership.py` records
which workers join, wait, leave or are lost. State machines without clock and threads decide:
`steps/step_groups.py` (when the pushes of all workers make one step), `steps/progress.py` (the
progress of each worker, and staleness), `workers/barriers.py`, `workers/roster.py`, and on server
0 `shard_queue/` (which records of a loader are free, leased or done; `admissions.py`: at which
turn a worker joins). Threads wait in one place, `workers/presence.py`, whose errors name the
missing worker; steps, barriers and pulls have a condition each. `steps/` applies pushes:
`pushes.py`, in sync mode `sync_steps.py`, each once (`request_dedup.py`). `running_joins.py` has
the requests of workers that join while the job runs. All members change at one place, the start
of a turn of the queue: server 0 cuts the turn, so that its free records are the next one; holds
that one until worker 0 has sent its state and all servers know the newcomer (server 0 first and
last: `Enter`, then `EnteredAll`); and lets it begin. The next turn is another phase, so steps,
clocks and barriers count from there for all workers. `write_ahead_log.py` makes a change
(`ps/changes.py`) and writes it to the journal; no reply leaves before the record is on disk.
`durability/` takes snapshots, and recovers by the functions that made the changes
(`persistent_state.py`). `checkpoints/` saves and loads, and `publications.py` there writes the
rows that changed since a publication (`tables/publishing/` marks them, only where a table is
published); with `shared_exclusive_lock.py` a cut waits for pushes in progress.
"""
