# SPDX-License-Identifier: Apache-2.0
"""A script for parameter servers as a user may write it: the optimizer first, no stop_worker."""

import os
import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fleetlight as fleet
from fleetlight.errors import MembershipError
from fleetlight.ps.messages import MetricsRequest
from fleetlight.ps.transport import SocketChannel
from fleetlight.roles import endpoint_text, parse_endpoint

GLOBAL_BATCH, IDS = 8, 40


def refusal(endpoint: str) -> str:
    """The reply of a server to a client without TLS."""
    address = parse_endpoint(endpoint, "the test")
    channel = SocketChannel.connect(address, endpoint_text(address), deadline_s=20.0)
    try:
        channel.call(MetricsRequest())
    except MembershipError as error:
        return str(error)
    finally:
        channel.close()
    return "no error"


class Model(nn.Module):
    """Rows of three ids into a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = fleet.nn.SparseEmbedding(4)
        self.linear = nn.Linear(12, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.linear(self.emb(ids).flatten(1))
        return out


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Two epochs."""
    random = torch.Generator().manual_seed(1)
    ids = torch.randint(IDS, (96, 3), generator=random)
    records = TensorDataset(ids, torch.randn(96, 1, generator=random))
    batch = GLOBAL_BATCH // fleet.worker_num()
    loader = fleet.shard(DataLoader(records, batch_size=batch, shuffle=True))
    for _ in range(2):
        for inputs, target in loader:
            optimizer.zero_grad()
            ((model(inputs) - target) ** 2).mean().backward()
            optimizer.step()


def main() -> None:
    """Serve, or train and print the sum of all rows and parameters."""
    fleet.init(strategy=fleet.DistributedStrategy(deadline_s=30))
    torch.manual_seed(0)
    plain = Model()
    optimizer = fleet.distributed_optimizer(torch.optim.Adagrad(plain.parameters(), lr=0.1))
    model = fleet.distributed_model(plain)
    if fleet.is_server():
        fleet.init_server()
        fleet.run_server()
        return
    fleet.init_worker()
    train(model, optimizer)
    fleet.barrier_worker()
    with torch.no_grad():
        values = [plain.emb(torch.arange(IDS)), *plain.linear.parameters()]
    total = sum(float(value.detach().double().abs().sum()) for value in values)
    if os.environ.get("FLEET_SSL") and fleet.is_first_worker():
        error = refusal(os.environ["FLEET_SERVER_ENDPOINTS"].split(",")[0])
        sys.stdout.write(f"REFUSED {error}\n")
    # One write with its newline: unbuffered, print() would let two workers mix within a line.
    sys.stdout.write(f"RESULT {fleet.worker_index()} {fleet.worker_num()} {total:.10f}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
