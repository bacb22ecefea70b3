# SPDX-License-Identifier: Apache-2.0
"""The manifests of jobs whose script is on a claim."""

import contextlib
import io

from fleetlight.cli.fleetrun import main


def manifest(*words: str, name: str = "t", mounts: str = "work:/job") -> str:
    """What fleetrun prints for a job."""
    output = io.StringIO()
    flags = ("--on", "kubernetes", "--print", "--name", name)
    options = ("--option", "image=x", "--option", f"mount={mounts}")
    with contextlib.redirect_stdout(output):
        assert main([*flags, *options, *words]) == 0
    return output.getvalue()
