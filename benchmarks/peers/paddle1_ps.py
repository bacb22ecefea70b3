# SPDX-License-Identifier: Apache-2.0
# mypy: ignore-errors
"""A server or worker of Paddle 1.8.5, started by its launcher: sync, async and geo."""

from __future__ import annotations

import numpy as np
import paddle
from paddle import fluid
from paddle.fluid.incubate.fleet.base import role_maker
from paddle.fluid.incubate.fleet.parameter_server.distribute_transpiler import (
    distributed_strategy as strategies,
)
from paddle.fluid.incubate.fleet.parameter_server.distribute_transpiler import fleet

from benchmarks.peers import ps_timed
from benchmarks.peers.ps_timed import DIM, NEGATIVES, NUMBERS, ROWS, SLOTS, WIDTH

layers = fluid.layers


def rows(name, model, ids):
    """The rows of ids: [batch, ids, dim]."""
    drawn = fluid.initializer.Uniform(-0.05, 0.05)
    attributes = fluid.ParamAttr(name=name, initializer=drawn)
    size = [ROWS[model], DIM[model]]
    return fluid.embedding(ids, size=size, is_sparse=True, param_attr=attributes)


def wide_deep():
    """The loss of a click model, and the names its batches are fed by."""
    slots = [fluid.data("slot%d" % n, [None, 1], "int64") for n in range(SLOTS)]  # noqa: UP031
    numbers = fluid.data("numbers", [None, NUMBERS], "float32")
    vectors = [layers.reshape(rows("rows", "wide_deep", s), [-1, DIM["wide_deep"]]) for s in slots]
    hidden = layers.concat([*vectors, numbers], axis=1)
    for _ in range(3):
        hidden = layers.fc(hidden, WIDTH, act="relu")
    return loss(layers.fc(hidden, 1) + layers.fc(numbers, 1), 1)


def word2vec():
    """The loss of skip-gram with negative samples."""
    centers = fluid.data("centers", [None, 1], "int64")
    targets = fluid.data("targets", [None, 1 + NEGATIVES], "int64")
    width = DIM["word2vec"]
    # the server's rows come as a list of all ids
    left = layers.reshape(rows("centers_w", "word2vec", centers), [-1, 1, width])
    right = layers.reshape(rows("targets_w", "word2vec", targets), [-1, 1 + NEGATIVES, width])
    products = layers.matmul(right, left, transpose_y=True)
    return loss(layers.reshape(products, [-1, 1 + NEGATIVES]), 1 + NEGATIVES)


def loss(logits, width):
    """The mean cross entropy."""
    labels = fluid.data("labels", [None, width], "float32")
    return layers.mean(layers.sigmoid_cross_entropy_with_logits(logits, labels))


def feed(model, batch):
    """A batch by the names of its parts."""
    first, second, labels = batch
    if model == "word2vec":
        return {"centers": first, "targets": second, "labels": labels}
    made = {"slot%d" % n: np.ascontiguousarray(first[:, n : n + 1]) for n in range(SLOTS)}  # noqa: UP031
    made.update(numbers=second, labels=labels)
    return made


def strategy(options):
    """What this system calls the mode."""
    factory = strategies.StrategyFactory
    if options.mode == "geo":
        return factory.create_geo_strategy(options.k_steps)
    return {"sync": factory.create_sync_strategy, "async": factory.create_async_strategy}[
        options.mode
    ]()


def main():
    """Serve or train."""
    options = ps_timed.parser().parse_args()
    fleet.init(role_maker.PaddleCloudRoleMaker())
    cost = {"wide_deep": wide_deep, "word2vec": word2vec}[options.model]()
    optimizer = fluid.optimizer.SGD(ps_timed.LR)
    fleet.distributed_optimizer(optimizer, strategy(options)).minimize(cost)
    if fleet.is_server():
        ps_timed.announce_server()
        fleet.init_server()
        fleet.run_server()
    else:
        train(options, cost)


def train(options, cost):
    """What is measured."""
    executor = fluid.Executor(fluid.CPUPlace())
    fleet.init_worker()
    executor.run(fleet.startup_program)
    rank = fleet.worker_index()
    feeds = [feed(options.model, batch) for batch in ps_timed.batches(options.model, rank)]

    def step(number):
        batch = feeds[number % len(feeds)]
        return executor.run(fleet.main_program, feed=batch, fetch_list=[cost])[0]

    for number in range(options.warmup):
        step(number)
    with ps_timed.Window() as window:
        for number in range(options.warmup, options.warmup + options.steps):
            last = float(np.mean(step(number)))
    # before the goodbye, in which it may fail
    window.report(options, rank, loss=last, system="paddle " + paddle.__version__)
    fleet.stop_worker()


if __name__ == "__main__":
    main()
