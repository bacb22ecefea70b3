# SPDX-License-Identifier: Apache-2.0
"""The public functions, and the jobs that implement them; it may import every other package.

Each room uses those below it:

    api.py           the public names
    lifecycle.py     from `fleet.init` to the end; with bootstrap.py (joins servers),
                     rendezvous.py, reinit.py
    public/          identity, collectives, metrics, sharding, stepping, inference, rows, perf,
                     util: functions over `current()`
    server/          the job of a parameter server
    served/          the job of a worker with servers: session, steps, programs, replay, shard
                     queue; tables/
    collective/      the job of a worker without servers: steps, programs, and the reducer of
                     their gradients
    checkpoints/     save, load, resume, stop: iterate over the parts of a worker's state
    training/        `ManagedModel`, `ManagedOptimizer`; merge, local training, compression,
                     consistency
    plan/            what the servers of a job store: `bound_plan.py`; embeddings whose rows move
                     there
    exit/            reports the end of a process to the launcher
    job.py           `Job`, and `current()`
    protocols.py     the interfaces between these rooms; parts/: components that do not depend on
                     the job

`fleet.init` chooses one of three jobs: `CollectiveJob`, `ServedJob` (a worker of a job with
servers, or one process with a server inside) and `ServerJob`. No other code asks for the mode:
differences are methods of `Job`, and methods that do nothing in `Job` are hooks. Leaving the job
runs the callbacks on `closers`, the last one first. `Peers` is the protocol of collective
operations, between workers (`collective/group.py`) or through servers
(`ps/worker/served_group.py`). `Stateful` is a part of a worker's state;
`checkpoints/worker_state.py` lists these parts, and saving, loading, resuming and the replay of a
killed worker all iterate over that list. A registered model is a `ManagedModel` with a
`ModelPolicy`: `ReplicaPolicy`, `ServedPolicy`, `IdlePolicy` (in a server), or `ProgramPolicy`
once a program trains it. A registered optimizer is a `ManagedOptimizer` with a `StepPolicy`:
`ReducedSteps`, `ServedSteps` or `IdleSteps`. `distributed_model` and `distributed_optimizer` only
record, so their order does not matter. The workers compare the model at its first forward.
`served/durable/` returns a restarted worker to its last step: `WorkerReplay` records the batch of
each step and finds the steps that the servers have applied; `ReplayedJob` and `ReplayedSteps` add
it to a `ServedJob`, which does not depend on it. `served/elastic/` has what a worker that joins
takes over from worker 0 (`JoinState`); `WorkerDeparture` in `stop_agreement.py` lets a worker
leave, and `JoiningJob` is the job of a newcomer until its first loop. `served/shard_queue.py`
asks server 0 for the records of a loader with `deal="queue"`.
"""

from fleetlight.torch_compat.version import check_torch

check_torch()
