# SPDX-License-Identifier: Apache-2.0
"""The example of wide & deep on few records in sync mode; worker 0 prints a digest of the model."""

import hashlib
import sys
from collections.abc import Mapping

import torch
from examples.wide_deep import train_fleet

import fleetlight as fleet


def main() -> None:
    """Train as the example does, in sync mode."""
    sys.argv[1:] = ["--mode", "sync", "--samples", "6000", "--test", "1000", "--batch", "250"]
    args = train_fleet.arguments()
    fleet.init()
    torch.manual_seed(0)
    model = fleet.distributed_model(train_fleet.WideDeep(width=64))
    optimizer = fleet.distributed_optimizer(train_fleet.optimizer_of(model, args))
    if fleet.is_server():
        fleet.init_server()
        fleet.run_server()
        return
    fleet.init_worker()
    train_fleet.train(model, optimizer, args)
    # empty in other workers
    if values := fleet.state_dict(model):
        print(f"WIDE&DEEP {digest_of(values)} of {sorted(values)}", flush=True)
    fleet.stop_worker()


def digest_of(values: Mapping[str, torch.Tensor]) -> str:
    """A digest of all bits."""
    digest = hashlib.sha256()
    for name, value in sorted(values.items()):
        digest.update(f"{name} {tuple(value.shape)}".encode())
        digest.update(value.numpy().tobytes())
    return digest.hexdigest()


if __name__ == "__main__":
    main()
