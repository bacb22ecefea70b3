# SPDX-License-Identifier: Apache-2.0
"""The same program with the four changes of the document."""

import os
import sys

import torch
from random_mlp import feeds, gen_data, mlp

# change 1: the library
import fleetlight as fleet
from fleetlight import static

input_x, input_y = feeds()
cost = mlp(input_x, input_y)
optimizer = torch.optim.SGD(static.default_main_program().parameters(), lr=0.01)

# change 2: strategy and role
dist_strategy = fleet.DistributedStrategy()
role = fleet.PaddleCloudRoleMaker(is_collective=True)
fleet.init(role)

# change 3: the optimizer, and minimize with the startup program
optimizer = fleet.distributed_optimizer(optimizer, strategy=dist_strategy)
optimizer.minimize(cost, static.default_startup_program())
train_prog = fleet.main_program

gpu_id = int(os.getenv("FLAGS_selected_gpus", "0"))  # noqa: SIM112
print(gpu_id, sys.argv[1:])
exe = static.Executor("cpu")
exe.run(static.default_startup_program())
step = 20
for i in range(step):
    cost_val = exe.run(program=train_prog, feed=gen_data(i), fetch_list=[cost.name])
    print(f"step{i} cost={cost_val[0]:f}", flush=True)

# change 4: saving; the old form says what to write
try:
    fleet.save_persistables(exe, "model")  # type: ignore[arg-type]
except fleet.errors.ConfigError as error:
    print(error)
fleet.save_persistables("model")
# or the second way to save, for inference only
fleet.save_inference_model("served", ["x", "y"], [cost], program=train_prog)
print(f"served cost {exe.run(train_prog.clone(for_test=True), gen_data(0), [cost])[0]:f}")
