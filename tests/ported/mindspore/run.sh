#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Data-parallel training on CPUs: one scheduler and a loop over the workers, as the page has it.
#     PYTHON=python3 WORKERS=8 PORT=8117 bash run.sh DATA_PATH
set -e
export DATA_PATH=$1
here=$(cd "$(dirname "$0")" && pwd)

export MS_WORKER_NUM=$WORKERS
export MS_SCHED_HOST=127.0.0.1
export MS_SCHED_PORT=$PORT

export MS_ROLE=MS_SCHED
"$PYTHON" "$here/resnet_distributed_training.py" >scheduler.txt 2>&1 &
echo "scheduler start success!"

export MS_ROLE=MS_WORKER
for ((i = 0; i < STARTED; i++)); do
    "$PYTHON" "$here/resnet_distributed_training.py" >"worker_$i.txt" 2>&1 &
    echo "worker ${i} start success with pid ${!}"
done
wait
