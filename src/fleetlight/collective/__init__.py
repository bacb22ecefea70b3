# SPDX-License-Identifier: Apache-2.0
"""Workers that train one model together: membership, liveness, the gradient reducer.

`collective` trains one model on many workers. Each of its rooms uses only those below it:

    forming           joins the workers of a job into a `Group`
    local_training    local SGD and DiLoCo: when workers synchronise, and how the outer optimizer
                      steps
    data_parallel     `Replica`: one module on all workers, its gradients reduced during backward
    reduction         torch's C++ reducer fills buckets; the one `Reducer` scales them and chooses
                      a route
    routes            ways to sum: process groups, shared memory, or level by level
    codecs            the form in which gradients cross a slow link; tensors in, tensors out
    group             `Group`: the collective operations; each wait has a name and a deadline
    encrypted         a process group inside TLS, where Gloo and NCCL cannot encrypt
    membership        rendezvous, ranks, heartbeats, and the diagnosis of an expired wait
    buckets | stamp   which gradients travel together; the data that a worker sends with them

Four files are pure: `buckets.py`, `stamp.py`, `membership/diagnosis.py` (which worker caused a
failed wait) and `local_training/schedule.py`. `membership/rendezvous.py` serves or joins a
TCPStore on one chosen address; `membership/scheduler.py` assigns indices where a job without
servers has a scheduler; `forming.py` joins these steps. `data_parallel/replica.py` hands each
bucket of `reduction/ddp.py` to `reduction/reducer.py`. `routes/routing.py` chooses the route:
torch's process groups, `shared_memory.py` when all workers share a host (`local_peers.py`
connects them), or `hierarchy.py`. `levels.py` decides which workers sum together. Inside a host a
level is a `memory_level.py` where possible; between hosts an `exchange.py` sums the values of the
leaders. Only there do gradients pass through a codec: a file of `codecs/forms/` encodes a segment
of a bucket as bytes. `error_feedback.py` keeps what the codec drops, by parameter, so that
buckets may change and checkpoints store it. `compression.py` says which parameters are
compressed; a bucket has only compressed parameters, or none. `local_training/engine.py` is local
SGD, adaptive local SGD and DiLoCo in one; a `Means` averages through the one reducer.
`data_parallel/consistency.py` compares the models and the first batches of the workers.
`batch_norm.py` normalises over all workers. `sink.py` is the node around a model's forward that
scales gradients and shows unused outputs to backward. `communication_cost.py` counts steps, bytes
and the time that a worker waits for the others.
"""
