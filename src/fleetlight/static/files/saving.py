# SPDX-License-Identifier: Apache-2.0
"""Saving a program and loading it, where the classes of its model need not be known.

DIR/manifest.json                        who wrote it, and checksums of the files
DIR/generation-000001/program.json       the graph
DIR/generation-000001/state.safetensors  parameters, buffers, state of the optimizer, rates
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import msgspec
import torch
from torch import Tensor

from fleetlight.checkpoint.formats.tensors import read_tensors, write_tensors
from fleetlight.checkpoint.storage.generations import (
    Directory,
    new_generation,
    read_manifest,
    verified,
)
from fleetlight.checkpoint.storage.manifest import BaseManifest
from fleetlight.errors import CheckpointError, CorruptCheckpointError
from fleetlight.static.files.document import Document, describe, form_of
from fleetlight.static.graph.form import Form

FORMAT = "fleetlight-program"
PROGRAM_FILE = "program.json"
STATE_FILE = "state.safetensors"


class ProgramManifest(BaseManifest, frozen=True, kw_only=True):
    """The manifest of a saved program."""


def save(dirname: Directory, form: Form) -> None:
    """Write a program with its state; it is on disk when this returns.

    Until then, and after any failure, `dirname` holds the program that was there before.
    """
    document, tensors = describe(form)
    _refuse_shared(tensors)
    with new_generation(dirname, FORMAT) as generation:
        with generation.create(PROGRAM_FILE) as sink:
            sink.write(_text(document))
        with generation.create(STATE_FILE) as sink:
            write_tensors(sink, tensors)
        generation.publish(ProgramManifest(**generation.header()))


def load(dirname: Directory, device: str | torch.device | None = None) -> Form:
    """What `save` wrote, with tensors of its own, on a device or on those where they were.

    Its operations are among those that `operations.py` lists; a file that names others is refused.
    """
    manifest = read_manifest(dirname, ProgramManifest, FORMAT)
    path = verified(dirname, manifest, PROGRAM_FILE)
    tensors = read_tensors(verified(dirname, manifest, STATE_FILE))
    place = None if device is None else torch.device(device)
    try:
        document = msgspec.json.decode(path.read_bytes(), type=Document)
        return form_of(document, tensors, place)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CorruptCheckpointError(f"{path} is not a program: {error}") from error
    except CheckpointError as error:
        raise type(error)(f"{path}: {error}") from error
    except (KeyError, TypeError, ValueError, RuntimeError, RecursionError) as error:
        raise CorruptCheckpointError(f"{path} is damaged: {error!r}; load another one") from error


def _text(document: Document) -> bytes:
    """JSON with a line for each entry, so that people can read it and compare two."""
    fields = []
    for name, value in msgspec.structs.asdict(document).items():
        encoded = msgspec.json.encode(value)
        if isinstance(value, list):
            encoded = b"[\n" + b",\n".join(map(msgspec.json.encode, value)) + b"\n]"
        fields.append(msgspec.json.encode(name) + b": " + encoded)
    return b"{\n" + b",\n".join(fields) + b"\n}\n"


def _refuse_shared(tensors: Mapping[str, Tensor]) -> None:
    """In a file each tensor is by itself; a change of one would no longer change the other."""
    ends: list[tuple[str, int, str, int]] = []
    for name, tensor in tensors.items():
        if tensor.numel():
            reach = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
            begin = tensor.data_ptr()
            end = begin + (reach + 1) * tensor.element_size()
            ends.append((str(tensor.device), begin, name, end))
    ends.sort()
    for (place, _, name, end), (other_place, begin, other, _) in itertools.pairwise(ends):
        if place == other_place and begin < end:
            raise CheckpointError(
                f"{name!r} and {other!r} of the program share memory, which a file cannot say; "
                "use one tensor in both places, or give each its own"
            )
