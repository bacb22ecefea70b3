# SPDX-License-Identifier: Apache-2.0
"""The program of one machine, before anything is distributed."""

import torch
from random_mlp import feeds, gen_data, mlp

from fleetlight import static

input_x, input_y = feeds()
cost = mlp(input_x, input_y)
optimizer = torch.optim.SGD(static.default_main_program().parameters(), lr=0.01)
static.minimize(optimizer, cost)

exe = static.Executor("cpu")
exe.run(static.default_startup_program())
step = 20
for i in range(step):
    cost_val = exe.run(feed=gen_data(i), fetch_list=[cost.name])
    print(f"step{i} cost={cost_val[0]:f}")
static.default_main_program().save("model")
