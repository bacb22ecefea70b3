# SPDX-License-Identifier: Apache-2.0
"""Train one of the recommenders: by collective workers, or by workers and parameter servers."""

import functools
import sys

import recommenders as r
import torch

import fleetlight as fleet
from fleetlight.errors import PlanError


def main(name: str, mode: str, dtype_name: str, out: str) -> None:
    """Trains, and writes all values of the model."""
    fleet.init(is_collective=mode == "collective")
    dtype = getattr(torch, dtype_name)
    model, optimizer = r.build(name, dtype)
    model = fleet.distributed_model(model)
    optimizer = fleet.distributed_optimizer(optimizer)
    if fleet.is_server():
        fleet.init_server()
        fleet.run_server()
        return
    fleet.init_worker()
    batches, held_out = r.data(dtype)
    share = r.BATCH // fleet.worker_num()
    mine = slice(fleet.worker_index() * share, (fleet.worker_index() + 1) * share)
    batches = [tuple(part[mine] for part in batch) for batch in batches]  # type: ignore[misc]
    if name == "mmoe":
        loop = functools.partial(r.train_and_keep_best, held_out=held_out)
        best = loop(model, optimizer, batches, take=fleet.state_dict, put=fleet.load_state_dict)
        print("best epoch", best)
    elif name == "deepfm":
        if mode == "servers":
            refuse_whole_penalty(model, batches[0][0])
        r.train(model, optimizer, batches, r.penalty_on_rows)
    else:
        r.train(model, optimizer, batches)
    state = fleet.state_dict(model)
    if fleet.is_first_worker():
        torch.save(state, out)
    fleet.stop_worker()


def refuse_whole_penalty(model: r.DeepFM, ids: torch.Tensor) -> None:
    """The penalty on a whole weight is refused with advice; its value would be zero."""
    try:
        r.whole_penalty(model, ids)
    except PlanError as error:
        print("refused:", error)
    else:
        raise AssertionError("a penalty on a table's weight was computed")


if __name__ == "__main__":
    main(*sys.argv[1:])
