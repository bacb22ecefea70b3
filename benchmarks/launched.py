# SPDX-License-Identifier: Apache-2.0
"""What `launch_overhead` starts: a process that says it was here, with `--torch` after meeting."""

from __future__ import annotations

import json
import os
import sys


def main() -> None:
    """Meet the others if asked to, print one line, end."""
    if "--torch" in sys.argv:
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo")
        dist.all_reduce(torch.ones(1))
        dist.destroy_process_group()
    print("RESULT " + json.dumps({"rank": int(os.environ["RANK"])}), flush=True)


if __name__ == "__main__":
    main()
