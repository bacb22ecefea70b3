# SPDX-License-Identifier: Apache-2.0
"""What workers and servers say to each other. Pure data: arrays travel beside a message.

A worker speaks first and gets one answer. Each class says which arrays go with it, in order; D are
the dense blocks of that server in the order of `placement.Placement.blocks_of`.
"""

from __future__ import annotations

from fleetlight.ps.messages.company import Beat, Beaten, Heard, Leave, Meet, Met
from fleetlight.ps.messages.dealing import Deal, Dealt, Reached, Remain, Remaining
from fleetlight.ps.messages.joining import Hello, Join, Resume, Resumed, Welcome
from fleetlight.ps.messages.outcomes import Done, Failure, decode_failure, encode_failure
from fleetlight.ps.messages.saving import (
    Cut,
    Drop,
    Fetch,
    Fetched,
    Load,
    Put,
    Restore,
    Save,
    Saved,
    TableFile,
    Take,
    Taken,
)
from fleetlight.ps.messages.training import (
    Apply,
    Ask,
    Counted,
    EndPhase,
    Exchange,
    Exchanged,
    Fill,
    Pull,
    Pulled,
    Push,
    Pushed,
    Shrink,
    Shrunk,
    TablePull,
    TablePush,
)
from fleetlight.security.token import AuthRequest, Challenge, Proof

__all__ = [
    "Apply",
    "Ask",
    "AuthRequest",
    "Beat",
    "Beaten",
    "Challenge",
    "Counted",
    "Cut",
    "Deal",
    "Dealt",
    "Done",
    "Drop",
    "EndPhase",
    "Exchange",
    "Exchanged",
    "Failure",
    "Fetch",
    "Fetched",
    "Fill",
    "Heard",
    "Hello",
    "Join",
    "Leave",
    "Load",
    "Meet",
    "Message",
    "Met",
    "Proof",
    "Pull",
    "Pulled",
    "Push",
    "Pushed",
    "Put",
    "Reached",
    "Remain",
    "Remaining",
    "Restore",
    "Resume",
    "Resumed",
    "Save",
    "Saved",
    "Shrink",
    "Shrunk",
    "TableFile",
    "TablePull",
    "TablePush",
    "Take",
    "Taken",
    "Welcome",
    "decode_failure",
    "encode_failure",
]

Message = (
    Hello | Welcome | Resume | Resumed | Join | Fill | Pull | Pulled | Push | Apply | Pushed
    | Exchange | Exchanged | EndPhase | Meet | Met | Leave | Heard | Beat | Beaten | Cut | Save
    | Saved | Take | Taken | Put | Drop | Fetch | Fetched | Load | Restore | Shrink | Shrunk | Ask
    | Counted | Deal | Dealt | Reached | Remain | Remaining | Done | Failure | AuthRequest
    | Challenge | Proof
)  # fmt: skip
