# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="import-not-found"
"""One worker of a data-parallel job on CPU: Paddle, eager mode, Gloo."""

from __future__ import annotations

from typing import Any

import paddle
from paddle.distributed import fleet, get_rank
from paddle.nn.functional import cross_entropy

from benchmarks.peers import timed


def main() -> None:
    """Train and report."""
    options = timed.arguments()
    paddle.set_device("cpu")
    fleet.init(is_collective=True)
    plain = network(options.model)
    model = fleet.distributed_model(plain)
    optimizer = fleet.distributed_optimizer(rule(options.model, plain.parameters()))

    def step(x: Any, y: Any) -> float:
        loss = cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.clear_grad()
        return float(loss)

    data = [
        (paddle.to_tensor(x), paddle.to_tensor(y))
        for x, y in timed.batches(options.model, get_rank())
    ]
    timed.train(
        options,
        step,
        data,
        lambda: sum(float(p.abs().sum()) for p in plain.parameters() if not p.stop_gradient),
        system=f"paddle {paddle.__version__}",
        rank=get_rank(),
    )


def network(model: str) -> Any:
    """The network, from Paddle's own layers."""
    if model != "mlp":
        return paddle.vision.models.resnet50(num_classes=timed.CLASSES)
    linear, tanh = paddle.nn.Linear, paddle.nn.Tanh
    hidden = [paddle.nn.Flatten(), linear(784, 128), tanh(), linear(128, 128), tanh()]
    return paddle.nn.Sequential(*hidden, linear(128, timed.CLASSES))


def rule(model: str, parameters: Any) -> Any:
    """Adam for the MLP, momentum for ResNet-50."""
    if model == "mlp":
        return paddle.optimizer.Adam(1e-3, parameters=parameters)
    return paddle.optimizer.Momentum(0.01, 0.9, parameters=parameters)


if __name__ == "__main__":
    main()
