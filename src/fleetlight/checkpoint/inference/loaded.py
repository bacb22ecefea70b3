# SPDX-License-Identifier: Apache-2.0
"""Loads models for inference."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram

from fleetlight.checkpoint.inference import archive
from fleetlight.checkpoint.inference.compiled import CompiledProgram, load_compiled
from fleetlight.checkpoint.inference.inference_manifest import (
    COMPILED,
    FORMAT,
    IDS_FILES,
    MODEL_FILES,
    ONNX,
    InferenceManifest,
)
from fleetlight.checkpoint.inference.inputs import InputEntry, bind_inputs
from fleetlight.checkpoint.inference.programs import first_line, on_device
from fleetlight.checkpoint.inference.served import InterpretedProgram, RowReader, ServedProgram
from fleetlight.checkpoint.storage.generations import Directory
from fleetlight.checkpoint.storage.manifest import folder_of
from fleetlight.checkpoint.storage.sources import Source, source_of
from fleetlight.errors import CheckpointError, ConfigError, CorruptCheckpointError

#: takes the inputs by position
_Run = Callable[..., Any]


class InferenceModel:
    """A loaded program. Call it with tensors by position or by name."""

    def __init__(self, manifest: InferenceManifest, run: _Run, device: torch.device) -> None:
        """`run` takes all inputs by position."""
        self.manifest = manifest
        self.device = device
        self._run = run

    def __repr__(self) -> str:
        """`InferenceModel(x: float32[?, 4]) -> float32[?, 3]`."""
        takes, outputs = ", ".join(map(str, self.inputs)), self.manifest.outputs
        gives = "?" if outputs is None else ", ".join(outputs) or "nothing"
        return f"InferenceModel({takes}) -> {gives}"

    @property
    def inputs(self) -> list[InputEntry]:
        """The names, types and shapes of the inputs."""
        return self.manifest.inputs

    def __call__(self, *args: Tensor, **kwargs: Tensor) -> Any:
        """Run the program; what it returns has the structure of the model's own result."""
        values = bind_inputs(self.inputs, args, kwargs)
        self._check_devices(values)
        with torch.no_grad():
            return self._run(*values)

    def _check_devices(self, values: Sequence[Tensor]) -> None:
        for entry, value in zip(self.inputs, values, strict=True):
            if value.device != self.device:
                raise ConfigError(
                    f"input {entry.name!r} is on {value.device}, expected it on {self.device}; "
                    f"move it there, or load the model with device={str(value.device)!r}"
                )


def load_inference(
    dirname: Directory, device: str | torch.device = "cpu", reader: RowReader | None = None
) -> InferenceModel:
    """Load what `save_inference` wrote, onto a device. Neither servers nor classes are needed.

    `reader` gives the rows of a program that has none, and the dense values.

    The graph becomes code that runs in this process: load only what comes from a trusted place.
    """
    place = torch.empty(0, device=device).device  # "cuda" becomes "cuda:0"
    source = source_of(dirname)
    manifest = source.manifest(InferenceManifest, FORMAT)
    where = source.location(folder_of(manifest))
    _check_form(manifest, where, place)
    _check_reader(manifest, where, reader)
    if reader is not None:
        ids = _program(source, manifest, IDS_FILES[manifest.form], place).module()
        return InferenceModel(manifest, _served(source, manifest, ids, reader, place), place)
    if manifest.form == COMPILED:
        compiled = _compiled(source, manifest, place)
        return InferenceModel(manifest, _by_position(compiled, manifest), place)
    module = _program(source, manifest, MODEL_FILES[manifest.form], place).module()
    return InferenceModel(manifest, _by_position(module, manifest), place)


def _served(
    source: Source,
    manifest: InferenceManifest,
    ids: Callable[..., Sequence[Tensor]],
    reader: RowReader,
    device: torch.device,
) -> ServedProgram:
    if manifest.form == COMPILED:
        compiled = _compiled(source, manifest, device)
        return ServedProgram(ids, compiled.with_values, manifest.lookups, reader)
    program = _program(source, manifest, MODEL_FILES[manifest.form], device)
    run = InterpretedProgram(program.module, manifest.prefix)
    return ServedProgram(ids, run, manifest.lookups, reader)


def _by_position(run: _Run, manifest: InferenceManifest) -> _Run:
    """Call a program whose model takes its inputs by name."""
    if manifest.positional:
        return run
    names = [entry.name for entry in manifest.inputs]
    return lambda *values: run(**dict(zip(names, values, strict=True)))


def _program(
    source: Source, manifest: InferenceManifest, name: str, device: torch.device
) -> ExportedProgram:
    path = source.path(manifest, name)
    try:
        program = archive.read_program(path)
    except CheckpointError:
        raise
    except Exception as error:  # torch raises many kinds here
        raise CorruptCheckpointError(
            f"{path} (written with torch {manifest.torch}) cannot be loaded with torch "
            f"{torch.__version__}: {first_line(error)}; save it again with this torch"
        ) from error
    return on_device(program, device)


def _compiled(source: Source, manifest: InferenceManifest, device: torch.device) -> CompiledProgram:
    return load_compiled(source.path(manifest, MODEL_FILES[COMPILED]), manifest, device)


def _check_form(manifest: InferenceManifest, where: str, device: torch.device) -> None:
    if manifest.form == ONNX:
        raise ConfigError(
            f"load_inference_model: {where} has a model in ONNX; run {MODEL_FILES[ONNX]} there "
            "with onnxruntime, or export with form='program'"
        )
    if manifest.form == COMPILED and manifest.device != device.type:
        raise ConfigError(
            f"load_inference_model: {where} is compiled for {manifest.device!r}, and device is "
            f"{str(device)!r}; load it with device={manifest.device!r}, or export with "
            "form='program'"
        )


def _check_reader(manifest: InferenceManifest, where: str, reader: RowReader | None) -> None:
    if reader is None and manifest.lookups:
        raise ConfigError(
            f"load_inference_model: the rows of table {manifest.lookups[0].table!r} in {where} "
            "come from a reader; load it with reader=fleetlight.serve.Reader(url)"
        )
    if reader is not None and not manifest.lookups:
        raise ConfigError(
            f"load_inference_model: got a reader, and {where} has all its rows; load it without, "
            "or export with rows='reader'"
        )
