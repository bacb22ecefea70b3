# SPDX-License-Identifier: Apache-2.0
"""The process that sends the events of a job to a collector of OpenTelemetry."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path

from fleetlight.errors import ConfigError
from fleetlight.launch.processes.child import Reaper
from fleetlight.launch.processes.followers.follower import Follower

ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
#: they would come before an endpoint that the user passes
_OF_ONE_SIGNAL = ("OTEL_EXPORTER_OTLP_LOGS_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
_PACKAGES = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")
#: how long the process has to start, to see the end of the job and to send the rest
_END_S = 10.0


def check_packages() -> None:
    """Raise an error if a package of the export is missing."""
    missing = [name for name in _PACKAGES if not _is_installed(name)]
    if missing:
        raise ConfigError(
            f"the export of events needs {', '.join(missing)}: "
            "pip install 'fleetlight[opentelemetry]'"
        )


def _is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        # the package around it is missing
        return False


class EventExport:
    """Sends the events of the job in a log folder until the job is over."""

    def __init__(
        self, folder: Path, endpoint: str, environment: Mapping[str, str], reaper: Reaper
    ) -> None:
        """Without an `endpoint`, variables of OpenTelemetry name it."""
        variables = dict(environment)
        if endpoint:
            variables[ENDPOINT] = endpoint
            for name in _OF_ONE_SIGNAL:
                variables.pop(name, None)
        command = ("events", str(folder), "--export", "--of_fleetrun")
        self._follower = Follower(command, variables, reaper)

    def close(self) -> None:
        """Let the process send what it has; the record of the job says that it is over."""
        self._follower.end(_END_S)
