# SPDX-License-Identifier: Apache-2.0
"""The messages between workers and servers. Pure data: arrays travel separately.

A worker sends a request and receives one reply. Each class lists its arrays in order; D are the
dense blocks of that server in the order of `placement.Placement.blocks_of`.
"""

from __future__ import annotations

from fleetlight.ps.messages.base import Done, Failure, decode_failure, encode_failure
from fleetlight.ps.messages.checkpoints import (
    DropSnapshot,
    FetchDense,
    FetchedDense,
    FileChunk,
    Load,
    ReadFile,
    RestoreDense,
    Save,
    Saved,
    SnapshotRequest,
    SnapshotTaken,
    TableFile,
    WriteFile,
)
from fleetlight.ps.messages.elastic import (
    Admit,
    Admitted,
    Enter,
    Entered,
    EnteredAll,
    FreePlace,
    Held,
    OfferState,
    PlaceRequest,
    Prelude,
    PreludeRequest,
)
from fleetlight.ps.messages.joining import Greeting, Join, Resume, Resumed, ShareMemory, Welcome
from fleetlight.ps.messages.membership import (
    Barrier,
    BarrierReply,
    GoodbyeAck,
    Heartbeat,
    HeartbeatAck,
    Leave,
)
from fleetlight.ps.messages.publications import (
    Changed,
    PublicationCut,
    PublicationRequest,
    PublicationTaken,
    PublicationWrite,
    PublicationWritten,
    PublishedFile,
)
from fleetlight.ps.messages.rendezvous import (
    Announce,
    Announced,
    Attend,
    Depart,
    Enrol,
    Enrolled,
    Locate,
    Located,
    ServerEntry,
)
from fleetlight.ps.messages.shard_queue import (
    LeaseProgress,
    LeaseReply,
    LeaseRequest,
    Remaining,
    RemainingRequest,
)
from fleetlight.ps.messages.training import (
    Apply,
    EndPhase,
    FiguresRequest,
    Fill,
    GeoExchange,
    GeoExchangeReply,
    Pull,
    Pulled,
    Push,
    Pushed,
    ServerFigures,
    Shrink,
    Shrunk,
    TablePull,
    TablePush,
)
from fleetlight.security.token import AuthRequest, Challenge, Proof

__all__ = [
    "Admit",
    "Admitted",
    "Announce",
    "Announced",
    "Apply",
    "Attend",
    "AuthRequest",
    "Barrier",
    "BarrierReply",
    "Challenge",
    "Changed",
    "Depart",
    "Done",
    "DropSnapshot",
    "EndPhase",
    "Enrol",
    "Enrolled",
    "Enter",
    "Entered",
    "EnteredAll",
    "Failure",
    "FetchDense",
    "FetchedDense",
    "FiguresRequest",
    "FileChunk",
    "Fill",
    "FreePlace",
    "GeoExchange",
    "GeoExchangeReply",
    "GoodbyeAck",
    "Greeting",
    "Heartbeat",
    "HeartbeatAck",
    "Held",
    "Join",
    "LeaseProgress",
    "LeaseReply",
    "LeaseRequest",
    "Leave",
    "Load",
    "Locate",
    "Located",
    "Message",
    "OfferState",
    "PlaceRequest",
    "Prelude",
    "PreludeRequest",
    "Proof",
    "PublicationCut",
    "PublicationRequest",
    "PublicationTaken",
    "PublicationWrite",
    "PublicationWritten",
    "PublishedFile",
    "Pull",
    "Pulled",
    "Push",
    "Pushed",
    "ReadFile",
    "Remaining",
    "RemainingRequest",
    "RestoreDense",
    "Resume",
    "Resumed",
    "Save",
    "Saved",
    "ServerEntry",
    "ServerFigures",
    "ShareMemory",
    "Shrink",
    "Shrunk",
    "SnapshotRequest",
    "SnapshotTaken",
    "TableFile",
    "TablePull",
    "TablePush",
    "Welcome",
    "WriteFile",
    "decode_failure",
    "encode_failure",
]

Message = (
    Greeting | Welcome | Resume | Resumed | Join | Fill | Pull | Pulled | Push | Apply | Pushed
    | GeoExchange | GeoExchangeReply | EndPhase | Barrier | BarrierReply | Leave | GoodbyeAck
    | Heartbeat | HeartbeatAck | SnapshotRequest | SnapshotTaken | Save | Saved | ReadFile
    | FileChunk | WriteFile | DropSnapshot | FetchDense | FetchedDense | Load | RestoreDense
    | Shrink | Shrunk | FiguresRequest | ServerFigures | LeaseRequest | LeaseReply | LeaseProgress
    | RemainingRequest | Remaining | Done | Failure | AuthRequest | Challenge | Proof
    | PlaceRequest | FreePlace | PreludeRequest | Prelude | Admit | Admitted | Held | OfferState
    | Enter | Entered | EnteredAll
    | PublicationRequest | Changed | PublicationCut | PublicationTaken | PublicationWrite
    | PublicationWritten
    | ShareMemory | Attend | Enrol | Enrolled | Announce | Announced | Locate | Located | Depart
)  # fmt: skip
