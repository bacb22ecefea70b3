# SPDX-License-Identifier: Apache-2.0
"""A process of `launch_overhead`: prints a line, with `--torch` after a rendezvous."""

from __future__ import annotations

import json
import os
import sys


def main() -> None:
    """Join the others if requested, print one line, and exit."""
    if "--torch" in sys.argv:
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo")
        dist.all_reduce(torch.ones(1))
        dist.destroy_process_group()
    print("RESULT " + json.dumps({"rank": int(os.environ["RANK"])}), flush=True)


if __name__ == "__main__":
    main()
