#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Data-parallel training on the CPUs of this machine: one scheduler and N workers, which read their
# roles from environment variables.
#
#     bash run.sh DATA_PATH [WORKERS=8] [arguments of train_fleet.py ...]
#
# An empty DATA_PATH ("") trains on generated images. Also read: PYTHON, LOG_DIR, MS_SCHED_PORT.
set -euo pipefail

if [ $# -lt 1 ]; then
    echo "usage: bash run.sh DATA_PATH [WORKERS] [arguments of train_fleet.py ...]" >&2
    exit 2
fi
if ((BASH_VERSINFO[0] * 100 + BASH_VERSINFO[1] < 403)); then
    echo "run.sh: this is bash $BASH_VERSION; waiting for any of several processes needs 4.3" >&2
    exit 2
fi

python=${PYTHON:-python3}
script=$(cd "$(dirname "$0")" && pwd)/train_fleet.py
logs=${LOG_DIR:-log}
data=$1
workers=${2:-8}
shift $(($# > 1 ? 2 : 1))
arguments=("$@")

export MS_WORKER_NUM=$workers
export MS_SCHED_HOST=127.0.0.1
export MS_SCHED_PORT=${MS_SCHED_PORT:-8117}

# Share the cores: each worker would use all of them.
cores=$(getconf _NPROCESSORS_ONLN)
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores > workers ? cores / workers : 1))}

pids=()
end_children() {
    kill -TERM "${pids[@]}" 2>/dev/null || return 0
    for _ in 1 2 3 4 5 6 7 8 9 10; do
        kill -0 "${pids[@]}" 2>/dev/null || break
        sleep 0.2
    done
    kill -KILL "${pids[@]}" 2>/dev/null || true
}
trap end_children EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP

mkdir -p "$logs"
rm -f "$logs/scheduler.txt" "$logs"/worker_*.txt # from an earlier run, perhaps with more workers

# start NAME: start a process with its output in NAME.txt
start() {
    "$python" "$script" --data "$data" "${arguments[@]}" >"$logs/$1.txt" 2>&1 &
    pids+=($!)
    echo "$1 started, pid $!"
}

export MS_ROLE=MS_SCHED
start scheduler
export MS_ROLE=MS_WORKER
for ((i = 0; i < workers; i++)); do
    export MS_NODE_ID=$i # the worker with this rank writes worker_i.txt
    start "worker_$i"
done

for _ in "${pids[@]}"; do
    status=0
    wait -n || status=$?
    if [ "$status" -ne 0 ]; then
        echo "a process failed with exit code $status; the last lines of the logs:" >&2
        tail -n 1 "$logs/scheduler.txt" "$logs"/worker_*.txt >&2
        exit "$status"
    fi
done
echo "all $workers workers finished; the end of $logs/worker_0.txt:"
tail -n 3 "$logs/worker_0.txt"
