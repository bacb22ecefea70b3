# SPDX-License-Identifier: Apache-2.0
# mypy: ignore-errors
"""A server or worker of Paddle 2.6, started by its launcher: async and geo.

Async wide & deep is fed from files, since this system exchanges dense layers on that path only.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import paddle
from paddle import static
from paddle.distributed import fleet

from benchmarks.peers import ps_timed
from benchmarks.peers.ps_timed import BATCH, DIM, NEGATIVES, NUMBERS, ROWS, SLOTS, WIDTH


def rows(name, model, ids, mode):
    """The rows of ids: [batch, ids, dim]. Geo trains a copy of its own, async has none."""
    drawn = paddle.nn.initializer.Uniform(-0.05, 0.05)
    attributes = paddle.ParamAttr(name=name, initializer=drawn)
    size = [ROWS[model], DIM[model]]
    if mode == "async":
        return static.nn.sparse_embedding(input=ids, size=size, param_attr=attributes)
    return static.nn.embedding(ids, size=size, is_sparse=True, param_attr=attributes)


def wide_deep(mode):
    """The loss of a click model, and its inputs in the order of the files."""
    numbers = static.data("numbers", [None, NUMBERS], "float32")
    slots = [static.data(f"slot{n}", [None, 1], "int64") for n in range(SLOTS)]
    width = DIM["wide_deep"]
    vectors = [paddle.reshape(rows("rows", "wide_deep", s, mode), [-1, width]) for s in slots]
    hidden = paddle.concat([*vectors, numbers], axis=1)
    for _ in range(3):
        hidden = static.nn.fc(hidden, WIDTH, activation="relu")
    logits = static.nn.fc(hidden, 1) + static.nn.fc(numbers, 1)
    cost, labels = loss(logits, 1)
    return cost, [numbers, *slots, labels]


def word2vec(mode):
    """The loss of skip-gram with negative samples."""
    centers = static.data("centers", [None, 1], "int64")
    # one column: its sparse layer takes no other shape
    targets = static.data("targets", [None, 1], "int64")
    width = DIM["word2vec"]
    left = paddle.reshape(rows("centers_w", "word2vec", centers, mode), [-1, 1, width])
    right = rows("targets_w", "word2vec", targets, mode)
    right = paddle.reshape(right, [-1, 1 + NEGATIVES, width])
    cost, _ = loss(paddle.sum(left * right, axis=2), 1 + NEGATIVES)
    return cost, []


def loss(logits, width):
    """The mean cross entropy, and the labels it is to."""
    labels = static.data("labels", [None, width], "float32")
    of_each = paddle.nn.functional.binary_cross_entropy_with_logits(logits, labels)
    return paddle.mean(of_each), labels


def feed(model, batch):
    """A batch by the names of its parts."""
    first, second, labels = batch
    if model == "word2vec":
        return {"centers": first, "targets": second.reshape(-1, 1), "labels": labels}
    slots = {f"slot{n}": np.ascontiguousarray(first[:, n : n + 1]) for n in range(SLOTS)}
    return {**slots, "numbers": second, "labels": labels}


def main():
    """Serve or train."""
    options = ps_timed.parser().parse_args()
    paddle.enable_static()
    fleet.init(is_collective=False)
    cost, inputs = {"wide_deep": wide_deep, "word2vec": word2vec}[options.model](options.mode)
    strategy = fleet.DistributedStrategy()
    strategy.a_sync = True
    if options.mode == "geo":
        strategy.a_sync_configs = {"k_steps": options.k_steps}
    optimizer = paddle.optimizer.SGD(ps_timed.LR)
    fleet.distributed_optimizer(optimizer, strategy).minimize(cost)
    if fleet.is_server():
        ps_timed.announce_server()
        fleet.init_server()
        fleet.run_server()
        return
    executor = static.Executor(paddle.CPUPlace())
    executor.run(static.default_startup_program())
    fleet.init_worker()
    from_files = options.mode == "async" and options.model == "wide_deep"
    window = (
        train_on_files(options, executor, inputs) if from_files else train(options, executor, cost)
    )
    # before the goodbye, in which it may fail
    window.report(options, fleet.worker_index(), system=f"paddle {paddle.__version__}")
    fleet.stop_worker()


def train(options, executor, cost):
    """Batches given to each step."""
    found = ps_timed.batches(options.model, fleet.worker_index())
    feeds = [feed(options.model, batch) for batch in found]
    program = static.default_main_program()

    def steps(numbers):
        for number in numbers:
            batch = feeds[number % len(feeds)]
            executor.run(program, feed=batch, fetch_list=[cost])

    steps(range(options.warmup))
    with ps_timed.Window() as window:
        steps(range(options.warmup, options.warmup + options.steps))
    return window


def train_on_files(options, executor, inputs):
    """The same batches, read into memory before the clock starts."""
    rank = fleet.worker_index()
    found = ps_timed.batches(options.model, rank)
    endless = [found[n % len(found)] for n in range(options.warmup + options.steps)]
    first = loaded(f"first{rank}.txt", endless[: options.warmup], inputs)
    timed = loaded(f"timed{rank}.txt", endless[options.warmup :], inputs)
    program = static.default_main_program()
    executor.train_from_dataset(program, first)
    with ps_timed.Window() as window:
        executor.train_from_dataset(program, timed)
    return window


def loaded(name, found, inputs):
    """A data set of batches, by way of a file."""
    with Path(name).open("w") as file:
        for batch in found:
            file.writelines(map(line, *batch))
    dataset = paddle.distributed.InMemoryDataset()
    dataset.init(batch_size=BATCH, thread_num=1, use_var=inputs, pipe_command="cat")
    dataset.set_filelist([name])
    dataset.load_into_memory()
    return dataset


def line(ids, numbers, labels):
    """A record: how many values each input has, and the values."""
    dense = " ".join(f"{number:.4f}" for number in numbers)
    sparse = " ".join(f"1 {one}" for one in ids)
    return f"{NUMBERS} {dense} {sparse} 1 {labels[0]:g}\n"


if __name__ == "__main__":
    main()
