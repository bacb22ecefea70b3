# SPDX-License-Identifier: Apache-2.0
"""The tuned program of the document: strategies of communication and of execution."""

import sys

import torch
from random_mlp import feeds, gen_data, mlp

import fleetlight as fleet
from fleetlight import static

nccl_comm_num = 2
num_threads = 3
num_iteration_per_drop_scope = 30
fuse_all_reduce_ops = True
fetch_frequency = 2

input_x, input_y = feeds()
cost = mlp(input_x, input_y, hid_dim=64)
optimizer = torch.optim.SGD(static.default_main_program().parameters(), lr=0.01)

role = fleet.PaddleCloudRoleMaker(is_collective=True)
fleet.init(role)

dist_strategy = fleet.DistributedStrategy()
dist_strategy.nccl_comm_num = nccl_comm_num
exec_strategy = static.ExecutionStrategy()
exec_strategy.num_threads = num_threads
exec_strategy.num_iteration_per_drop_scope = num_iteration_per_drop_scope
dist_strategy.exec_strategy = exec_strategy
dist_strategy.fuse_all_reduce_ops = fuse_all_reduce_ops
if "hierarchical" in sys.argv:
    dist_strategy.use_hierarchical_allreduce = True
    # on one machine, as if every two workers had their own machine
    dist_strategy.hierarchical_allreduce_inter_nranks = 2
if "localsgd" in sys.argv:
    dist_strategy.use_local_sgd = True
    dist_strategy.local_sgd_is_warm_steps = 4
    dist_strategy.local_sgd_steps = 4

optimizer = fleet.distributed_optimizer(optimizer, strategy=dist_strategy)
optimizer.minimize(cost, static.default_startup_program())
train_prog = fleet.main_program
if "explain" in sys.argv:
    print(dist_strategy.explain())

exe = static.Executor("cpu")
exe.run(static.default_startup_program())
step = 20
#: after each step; during local steps, workers with different batches differ
weights = []
for i in range(step):
    number = i * fleet.worker_num() + fleet.worker_index() if "apart" in sys.argv else i
    if i % fetch_frequency == 0:
        cost_val = exe.run(program=train_prog, feed=gen_data(number), fetch_list=[cost.name])
        print(f"step{i} cost={cost_val[0]:f}", flush=True)
    else:
        cost_val = exe.run(program=train_prog, feed=gen_data(number))
    weights.append([p.detach().clone().numpy() for p in train_prog.parameters()])
fleet.barrier_worker()
