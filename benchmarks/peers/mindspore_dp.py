# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="import-not-found,misc"
"""One worker (or the scheduler) of a data-parallel job on CPU: MindSpore, graph mode."""

from __future__ import annotations

import os
from typing import Any

import mindspore as ms
from mindspore import nn, ops
from mindspore.communication import get_rank, init

from benchmarks.peers import timed


def main() -> None:
    """Train and report; the scheduler only forms the cluster and waits for its end."""
    options = timed.arguments()
    ms.set_context(mode=ms.GRAPH_MODE)
    ms.set_device("CPU")
    ms.set_auto_parallel_context(parallel_mode=ms.ParallelMode.DATA_PARALLEL, gradients_mean=True)
    init()
    if os.environ["MS_ROLE"] != "MS_SCHED":
        train(options)


def train(options: Any) -> None:
    """What a worker does."""
    ms.set_seed(1)
    net = mlp() if options.model == "mlp" else resnet50()
    weights = net.trainable_params()
    adam = options.model == "mlp"
    rule = nn.Adam(weights, 1e-3) if adam else nn.Momentum(weights, 0.01, 0.9)
    loss = nn.SoftmaxCrossEntropyWithLogits(sparse=True, reduction="mean")
    one_step = nn.TrainOneStepCell(nn.WithLossCell(net, loss), rule)
    one_step.set_train()
    data = [
        (ms.Tensor(x), ms.Tensor(y.astype("int32")))
        for x, y in timed.batches(options.model, get_rank())
    ]
    timed.train(
        options,
        lambda x, y: float(one_step(x, y).asnumpy()),
        data,
        lambda: float(sum(abs(w.asnumpy()).sum() for w in weights)),
        system=f"mindspore {ms.__version__}",
        rank=get_rank(),
    )


def mlp() -> Any:
    """784-128-128-10 with tanh."""
    hidden = [nn.Flatten(), nn.Dense(784, 128), nn.Tanh(), nn.Dense(128, 128), nn.Tanh()]
    return nn.SequentialCell(*hidden, nn.Dense(128, timed.CLASSES))


def resnet50() -> Any:
    """ResNet-50 with the stride on the 3x3 convolutions."""
    layers = [*convolution(3, 64, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, pad_mode="same")]
    channels = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            layers.append(Bottleneck(channels, width, 2 if block == 0 and width > 64 else 1))
            channels = 4 * width
    return nn.SequentialCell(*layers, Pool(), nn.Dense(channels, timed.CLASSES))


class Bottleneck(nn.Cell):
    """1x1, 3x3, 1x1 convolutions beside a shortcut."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        narrow = [*convolution(channels, width, 1), nn.ReLU()]
        middle = [*convolution(width, width, 3, stride), nn.ReLU()]
        self.body = nn.SequentialCell(*narrow, *middle, *convolution(width, 4 * width, 1))
        same = channels == 4 * width and stride == 1
        shortcut = [nn.Identity()] if same else convolution(channels, 4 * width, 1, stride)
        self.shortcut = nn.SequentialCell(*shortcut)
        self.relu = nn.ReLU()

    def construct(self, x: Any) -> Any:
        """The block's output."""
        return self.relu(self.body(x) + self.shortcut(x))


class Pool(nn.Cell):
    """The mean over the image."""

    def construct(self, x: Any) -> Any:
        """One number per channel."""
        return ops.mean(x, (2, 3))


def convolution(fan_in: int, fan_out: int, size: int, stride: int = 1) -> list[Any]:
    """A convolution and its normalisation."""
    weights = nn.Conv2d(fan_in, fan_out, size, stride, pad_mode="pad", padding=size // 2)
    return [weights, nn.BatchNorm2d(fan_out)]


if __name__ == "__main__":
    main()
