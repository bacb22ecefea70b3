# SPDX-License-Identifier: Apache-2.0
"""A server trains without torch's compiler, and has it when it is wanted."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.launch.workplace import free_ports

PROGRAM = """
import sys
import torch
import fleetlight as fleet

def is_loaded():
    return "torch._dynamo.eval_frame" in sys.modules

fleet.init()
assert fleet.is_server()
for kind in (torch.optim.SGD, torch.optim.Adam, torch.optim.Adagrad, torch.optim.RMSprop):
    model = torch.nn.Linear(2, 1)
    optimizer = kind([model.weight], lr=0.5)
    optimizer.add_param_group({"params": [model.bias]})
    before = model.weight.detach().clone()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert not torch.equal(model.weight, before), kind
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.zero_grad()
    assert model.weight.grad is None
fleet.distributed_model(model)
fleet.distributed_optimizer(optimizer)
fleet.init_server()
assert not hasattr(sys.modules["torch._dynamo"], "__file__")
print(is_loaded())
double = torch.compile(lambda x: 2 * x, backend="eager")
print(double(torch.ones(1)).item(), is_loaded())
"""


def test_a_server_loads_the_compiler_when_something_is_compiled() -> None:
    told = {
        "FLEET_ROLE": "server",
        "FLEET_INDEX": "0",
        "FLEET_SERVER_NUM": "1",
        "FLEET_WORKER_NUM": "1",
        "FLEET_SERVER_ENDPOINTS": f"127.0.0.1:{free_ports(['127.0.0.1'], 1)}",
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env={**os.environ, **told}, capture_output=True, text=True,
        timeout=100,
    )  # fmt: skip
    assert done.stdout.split() == ["False", "2.0", "True"], done.stderr
