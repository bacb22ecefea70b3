# SPDX-License-Identifier: Apache-2.0
"""A codec is one file; the strategy, its effects and the workers find it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fleetlight
from fleetlight.collective.codecs.codec import Codec, CodecSegment, Span, make_codec
from fleetlight.strategy import CompressionConfigs
from fleetlight.strategy.features.reduction.compression import CODECS

#: sends the sign of each value and the mean magnitude
TOY = """
import torch

from fleetlight.collective.codecs.codec import CodecRecord


class Sign:
    name = "sign"
    divisible = False
    has_velocity = False

    def message_bytes(self, spans):
        return 4 + (spans[-1].stop if spans else 0)

    def encode(self, values, segment, message):
        residual = segment.residual
        if residual is not None:
            values = values + residual
        size = values.abs().mean()
        message[:4].view(torch.float32).copy_(size)
        message[4:].view(torch.int8).copy_(values.sign())
        if residual is not None:
            residual.copy_(values - size * values.sign())

    def add(self, message, spans, total):
        total.add_(message[4:].view(torch.int8) * message[:4].view(torch.float32))


def _make(configs):
    return Sign()


RECORD = CodecRecord("sign", _make)
"""

SCRIPT = """
import torch
import fleetlight as fleet

strategy = fleet.DistributedStrategy(
    compression="sign", shared_memory=False, compression_configs={"min_size": 1}
)
fleet.init(is_collective=True, strategy=strategy)
assert " * compression = 'sign': gradients cross between workers as sign" in strategy.explain()
model = fleet.distributed_model(torch.nn.Linear(4, 1, bias=False))
torch.nn.init.zeros_(model.weight)
optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=1.0), strategy)
signs = torch.tensor([1.0, -1.0, 1.0, -1.0])
model((1 + fleet.worker_index()) * signs).sum().backward()
optimizer.step()
print("weight", model.weight.tolist())
"""


@pytest.mark.multiprocess
@pytest.mark.slow
def test_workers_reduce_with_a_toy_codec(tmp_path: Path) -> None:
    package = tmp_path / "src" / "fleetlight"
    shutil.copytree(
        Path(fleetlight.__file__).parent,
        package,
        ignore=shutil.ignore_patterns("__pycache__"),
        copy_function=os.symlink,
    )
    (package / "collective" / "codecs" / "forms" / "sign.py").write_text(TOY)
    (tmp_path / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "fleetlight.launch", "--nproc_per_node", "2", "train.py"]
    environment = {**os.environ, "PYTHONPATH": str(package.parent), "PYTHONWARNINGS": ""}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    logs = [path.read_text() for path in sorted((tmp_path / "log").glob("workerlog.*"))]
    assert done.returncode == 0, done.stdout + done.stderr + "\n".join(logs)
    # the mean of signs of size 1 and 2, halved
    assert sum("weight [[-1.5, 1.5, -1.5, 1.5]]" in log for log in logs) == 2


@pytest.mark.parametrize("name", CODECS)
def test_a_codec_has_the_name_of_its_file(name: str) -> None:
    codec: Codec = make_codec(name, CompressionConfigs())
    assert codec.name == name
    values = torch.randn(8)
    spans = [Span("weight", 0, 0, 8)]
    message = torch.zeros(codec.message_bytes(spans), dtype=torch.uint8)
    total = torch.zeros(8)
    codec.encode(values.clone(), CodecSegment(spans), message)
    codec.add(message, spans, total)
    largest = int(values.abs().argmax())
    torch.testing.assert_close(total[largest], values[largest], rtol=0.01, atol=0)
