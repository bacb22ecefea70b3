# SPDX-License-Identifier: Apache-2.0
"""The role of this process, read from its environment or given by the script."""

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
