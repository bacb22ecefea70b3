# SPDX-License-Identifier: Apache-2.0
"""A component of TorchX: `torchx run -s SCHEDULER .../torchx.py:job --script train.py`.

TorchX parses this file, and allows few types of arguments; annotations must not be strings.
"""

import secrets

from torchx import specs

from fleetlight.errors import ConfigError

#: Sets the rendezvous, then runs the arguments. TorchX names the host of the first process of
#: the first role in a variable; that process itself listens on all its addresses.
_MEET = """
first="$${{{rank0}:-localhost}}"
if [ "$$FLEET_ROLE $$FLEET_INDEX" = "{keeper} 0" ] && [ "$$first" = localhost ]; then
  address="$$(hostname -i 2>/dev/null | cut -d' ' -f1)"
  if [ -n "$$address" ]; then first=0.0.0.0; export FLEET_HOST="$$address"; fi
fi
export FLEET_MASTER="$$first:{port}"
exec "$$@"
"""


def job(
    *script_args: str,
    script: str = "",
    m: str = "",
    image: str = "fleetlight",
    name: str = "fleetlight",
    worker_num: int = 1,
    server_num: int = 0,
    worker_cpu: int = 1,
    worker_gpu: int = 0,
    worker_mem: int = 2048,
    server_cpu: int = 1,
    server_mem: int = 2048,
    port: int = 29511,
    max_retries: int = 0,
    checkpoint: str = "",
    env: str = "",
) -> specs.AppDef:
    """A job with workers, and with parameter servers as a role of its own.

    Args:
        script_args: arguments of the script
        script: the training script
        m: the module to run in its place
        image: the image, or the folder for local schedulers
        name: the name of the job
        worker_num: the number of workers
        server_num: the number of parameter servers
        worker_cpu: cores of each worker
        worker_gpu: GPUs of each worker, at most 1
        worker_mem: MiB of each worker
        server_cpu: cores of each server
        server_mem: MiB of each server
        port: the port of the rendezvous
        max_retries: how often TorchX restarts a process
        checkpoint: the folder for automatic checkpoints
        env: additional variables, as NAME=VALUE,NAME=VALUE
    """
    if bool(script) == bool(m):
        raise ConfigError("fleetlight.torchx.job: pass either --script train.py or -m MODULE")
    counts = {"FLEET_WORKER_NUM": str(worker_num), "FLEET_SERVER_NUM": str(server_num)}
    common = {
        **counts,
        "FLEET_JOB": specs.macros.app_id,
        "FLEET_TOKEN": secrets.token_hex(32),
        "FLEET_MAX_RESTARTS": str(max_retries),
        **({"FLEET_CHECKPOINT": checkpoint} if checkpoint else {}),
        **dict(pair.split("=", 1) for pair in env.split(",") if pair),
    }
    command = ["-m", m] if m else [script]
    meet = _MEET.format(
        rank0=specs.macros.rank0_env, keeper="server" if server_num else "worker", port=port
    )

    def role(kind: str, count: int, resource: specs.Resource) -> specs.Role:
        device = {"FLEET_DEVICE": "0"} if resource.gpu else {}
        member = ["fleetlight", "member", "--", "python", *command, *script_args]
        return specs.Role(
            name=kind,
            image=image,
            entrypoint="sh",
            args=["-c", meet, "sh", *member],
            env={
                **common,
                **device,
                "FLEET_ROLE": kind,
                "FLEET_INDEX": specs.macros.replica_id,
            },
            num_replicas=count,
            max_retries=max_retries,
            retry_policy=specs.RetryPolicy.REPLICA,
            resource=resource,
            port_map={"fleet": port},
        )

    servers = specs.Resource(cpu=server_cpu, gpu=0, memMB=server_mem)
    workers = specs.Resource(cpu=worker_cpu, gpu=worker_gpu, memMB=worker_mem)
    roles = [role("server", server_num, servers)] if server_num else []
    return specs.AppDef(name=name, roles=[*roles, role("worker", worker_num, workers)])
