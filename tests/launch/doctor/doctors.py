# SPDX-License-Identifier: Apache-2.0
"""Doctors on loopback addresses, each of which stands for a machine."""

import random
import socket

from fleetlight.launch.doctor.messages import ExamOptions, Facts

HOSTS = ("127.0.0.1", "127.0.0.2", "127.0.0.3")


def free_ports(count: int) -> int:
    """The first of `count` consecutive free ports, outside the ephemeral range."""
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


def exam_options(machines: int = 2, seconds: float = 0.02) -> ExamOptions:
    """Options for loopback machines, with four consecutive free ports."""
    hosts = HOSTS[:machines]
    return ExamOptions(names=hosts, hosts=hosts, port=free_ports(4), workers=2, seconds=seconds)


def facts(of: ExamOptions) -> Facts:
    """The facts of a sound machine."""
    return Facts(asked=of, fleetlight="1", torch="2", python="3", shared_memory=1 << 40, cores=64)
