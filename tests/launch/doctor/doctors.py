# SPDX-License-Identifier: Apache-2.0
"""Doctors on addresses of the loopback, which are as many machines."""

from __future__ import annotations

import random
import socket

from fleetlight.launch.doctor.messages import ExamOptions, Facts

HOSTS = ("127.0.0.1", "127.0.0.2", "127.0.0.3")


def free_ports(count: int) -> int:
    """The first of so many ports in a row that nobody has, outside those that systems choose."""
    while True:
        first = random.randrange(20000, 30000)
        if all(_is_free(host, first + i) for host in HOSTS for i in range(count)):
            return first


def _is_free(host: str, port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def asked(machines: int = 2, seconds: float = 0.02) -> ExamOptions:
    """As many machines, with a port and three behind it that are free."""
    hosts = HOSTS[:machines]
    return ExamOptions(names=hosts, hosts=hosts, port=free_ports(4), workers=2, seconds=seconds)


def facts(of: ExamOptions) -> Facts:
    """Of a machine where nothing is wrong."""
    return Facts(asked=of, fleetlight="1", torch="2", python="3", shared_memory=1 << 40, cores=64)
