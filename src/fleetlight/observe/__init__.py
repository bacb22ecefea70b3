# SPDX-License-Identifier: Apache-2.0
"""What a job lets its people see: log lines, progress, telemetry, the evaluation of a model.

`observe` has the log handler (one line, prefixed with the worker), metrics as pure functions of a
`reduce` and a `gather`, and the progress display. `grouped_evaluation.py` brings all records of a
group to one worker. `console.py` (pure) decides about colours, and fits lines and tables into
narrow terminals. `telemetry/` is what processes count. `catalogue.py` owns every name, unit and
kind. `registry.py` asks the sources of a process for a `Snapshot`; code that runs in every step
only adds to counters of its own. `step_times.py` gives each moment of the training thread to one
part of a step. A `MetricRecorder` appends a snapshot each second to a file of the log folder,
whose older lines it thins out; `fleet/recording/` starts it, and `launch/processes/record.py`
records starts and ends of processes as events. `history.py` reads all of that back, and has the
rates of metrics; `process_events.py` has the last start and exit of each process.
`job_metrics.py` (pure) sums up a job, and `sinks/` sends that to services from a thread of worker
0. There `otlp.py` sends events to OpenTelemetry through a bounded queue, which drops an item that
the service refuses alone. `tracing/` records spans while `fleetlight trace` asks for them:
`request.py` is how it asks, by a file, `fleet/recording/tracing.py` what a process does then,
`merged.py` (pure) makes one trace of all, and `clocks.py` compares the clocks of hosts.
"""
