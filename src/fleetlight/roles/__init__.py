# SPDX-License-Identifier: Apache-2.0
"""Who am I: the role of this process, read from its environment or given by hand."""

from fleetlight.roles.environment import from_environment
from fleetlight.roles.foreign import foreign_variables
from fleetlight.roles.maker import RoleMaker, UserDefinedRoleMaker
from fleetlight.roles.role import (
    Endpoint,
    Kind,
    Role,
    endpoint_text,
    parse_endpoint,
    parse_endpoints,
)

__all__ = [
    "Endpoint",
    "Kind",
    "Role",
    "RoleMaker",
    "UserDefinedRoleMaker",
    "endpoint_text",
    "foreign_variables",
    "from_environment",
    "parse_endpoint",
    "parse_endpoints",
]
