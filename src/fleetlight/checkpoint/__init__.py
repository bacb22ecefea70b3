# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: pure functions from the state of a job to files and back.

This package does not depend on processes. The caller has gathered the state already, and decides
which process writes. The names are in `api.py`, and the first use of one imports torch; commands
that look after checkpoints use `storage` only. Those of exported models load at their first use.

A save writes a new generation folder and replaces the manifest last. Code finds tensors by name,
never by position. Each part uses only those before it: `storage/` has generations, checksummed
files and the manifest (`stored_generations.py`: the same under a URL, where a conditional write
replaces the manifest; `stored_manifest.py` reads it, or a copy if it arrived half; `sources.py`
reads both); `formats/` turns tensors, tables and Python values into bytes; `state/` takes and
restores models, optimizers, workers and random numbers; `inference/` exports programs
(`programs.py` with torch.export, also as machine code in `compiled.py`, and as ONNX), and loads
them (`loaded.py`). `lookups.py` there makes two programs of a model whose rows come from a
reader: its ids, and what follows from rows; `served.py` runs both with one publication;
`snapshot.py` writes a whole job, `reader.py` reads it. A `JobSnapshot` refers to live tensors;
`fleet/parts/background.py` writes its `detached()` copy while training continues. For
`fleet.publish`, a thread of worker 0 (`fleet/served/publishing/publisher.py`) cuts all servers
between two of its steps, lets them write their files, and then replaces the manifest. A save may
be a delta, which needs the generation that is its base. `storage/bases.py` finds the base in the
manifest, so that no process remembers saves. The next manifest also says whether the last base
was saved: until then servers keep the changes since both (`ps/tables/saving/unsaved_rows.py`).
New rows are found by their numbers, so pulls mark none. A reader takes the files of the base,
then ids without a row, then rows that replace others (`ps/tables/saving/delta_files.py`,
`checkpoint/formats/tables.py`). Parameter servers write the files of their tables themselves,
when worker 0 asks (`fleet/served/tables/table_files.py`). Under a URL they cut rows into files of
whole buckets, and fetch only those with their own
(`ps/server/checkpoints/checkpoint_handler.py`). `fleet/served/tables/server_checkpoint.py` makes
the cut and adds the dense values of the servers to the worker's snapshot. To load,
`fleet/served/tables/loading.py` compares everything, plans the requests for each server and
carries them out, in worker 0 or in the server itself. `fleet/checkpoints/whole_state.py` gathers
and sets all values in memory (`fleet.state_dict`); `served/partial_state.py` warns that
`model.state_dict()` has no rows. For inference, `ps/layers/frozen.py` has layers that look ids up
in buffers, with the kernels' first values in torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fleetlight.checkpoint.api import *  # noqa: F403
    from fleetlight.checkpoint.inference.exported import save_inference as save_inference
    from fleetlight.checkpoint.inference.loaded import InferenceModel as InferenceModel
    from fleetlight.checkpoint.inference.loaded import load_inference as load_inference
    from fleetlight.checkpoint.inference.lookups import TakenRows as TakenRows
    from fleetlight.checkpoint.inference.served import RowReader as RowReader

else:
    #: names of exported models, and their modules
    _OF_INFERENCE = {
        "InferenceModel": "inference.loaded",
        "RowReader": "inference.served",
        "TakenRows": "inference.lookups",
        "load_inference": "inference.loaded",
        "save_inference": "inference.exported",
    }

    def __getattr__(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        # `from fleetlight.checkpoint import api` would ask this function for it
        part = importlib.import_module(f"{__name__}.{_OF_INFERENCE.get(name, 'api')}")
        if name not in _OF_INFERENCE and name not in part.__all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(part, name)
        return value
