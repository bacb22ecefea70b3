# SPDX-License-Identifier: Apache-2.0
"""The role of this process, read from its environment or given by the script.

`roles` turns an environment into a `Role`, a frozen record. Each dialect (`FLEET_*`, torchrun's,
`PADDLE_*`, `MS_*`, `SLURM_*`) is one file with a `Dialect` (`dialect.py`): its marks, its
precedence and its reader. `placement.py` decides which tasks of an engine are servers (pure).
`environment.py` finds all dialects, chooses the first that is present and refuses two that
disagree. A value that no variable gives is `None` until the job forms. `members.py` says which
processes belong to a job (how they introduce themselves, their indices and places; pure).
`address.py` finds the address of this machine that reaches a peer. It asks the routing table,
because a hostname may resolve to 127.0.1.1.
"""

from fleetlight.roles.environment import from_environment
from fleetlight.roles.maker import RoleMaker, UserDefinedRoleMaker
from fleetlight.roles.role import (
    Endpoint,
    Kind,
    Role,
    endpoint_text,
    parse_endpoint,
    parse_endpoints,
)
from fleetlight.roles.unsupported import unsupported_variables

__all__ = [
    "Endpoint",
    "Kind",
    "Role",
    "RoleMaker",
    "UserDefinedRoleMaker",
    "endpoint_text",
    "from_environment",
    "parse_endpoint",
    "parse_endpoints",
    "unsupported_variables",
]
