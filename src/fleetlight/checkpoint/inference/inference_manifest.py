# SPDX-License-Identifier: Apache-2.0
"""The manifest of a saved inference model, and the names of its files."""

from __future__ import annotations

import msgspec

from fleetlight.checkpoint.inference.inputs import InputEntry
from fleetlight.checkpoint.inference.lookups import LookupEntry
from fleetlight.checkpoint.storage.manifest import BaseManifest

FORMAT = "fleetlight-inference"

#: forms: a graph of torch, machine code for one kind of device, and ONNX
PROGRAM, COMPILED, ONNX = "program", "compiled", "onnx"
FORMS = (PROGRAM, COMPILED, ONNX)

#: the file of each form
MODEL_FILES = {PROGRAM: "program.pt2", COMPILED: "compiled.pt2", ONNX: "model.onnx"}
#: the file that returns the ids of lookups
IDS_FILES = {PROGRAM: "ids.pt2", COMPILED: "ids.pt2", ONNX: "ids.onnx"}


class ConstantEntry(msgspec.Struct, frozen=True):
    """A parameter, buffer or constant of a program."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    is_parameter: bool = True


class InferenceManifest(BaseManifest, frozen=True, kw_only=True):
    """The manifest of a saved inference model."""

    inputs: list[InputEntry]
    positional: bool
    #: why the batch size is fixed, None if it is not
    static_because: str | None
    form: str = PROGRAM
    #: the kind of device that a compiled program runs on
    device: str = "cpu"
    #: what the program returns, in words
    outputs: list[str] | None = None
    #: lookups whose rows the program takes
    lookups: list[LookupEntry] = msgspec.field(default_factory=list)
    #: what the names of its dense values begin with in publications, if it is a part of the model
    prefix: str = ""
    #: the dense values of a compiled program
    state: list[ConstantEntry] = msgspec.field(default_factory=list)
