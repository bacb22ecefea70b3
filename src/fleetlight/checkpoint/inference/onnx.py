# SPDX-License-Identifier: Apache-2.0
"""Programs as files in ONNX, which other runtimes take."""

from __future__ import annotations

import importlib
import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import msgspec
import torch
from torch.export import ExportedProgram

from fleetlight.checkpoint.inference.inference_manifest import IDS_FILES, MODEL_FILES, ONNX
from fleetlight.checkpoint.inference.inputs import InputEntry
from fleetlight.checkpoint.inference.lookups import LookupEntry
from fleetlight.checkpoint.inference.programs import Programs, first_line
from fleetlight.errors import CheckpointError, ConfigError

#: where a file says which rows its inputs are
_KEY = "fleetlight.lookups"


def onnx_files(programs: Programs, inputs: Sequence[InputEntry]) -> dict[str, bytes]:
    """The model, and the ids of its lookups if it has some.

    The inputs of the model for rows are called `rows.TABLE.N`, the outputs of the ids
    `ids.TABLE.N`, where N counts the lookups.
    """
    _check_installed()
    names = [entry.name for entry in inputs]
    about = [f"{entry.table}.{number}" for number, entry in enumerate(programs.lookups)]
    rows = [f"rows.{one}" for one in about]
    files = {MODEL_FILES[ONNX]: _converted(programs.program, [*rows, *names], programs.lookups)}
    if programs.ids is not None:
        outputs = [f"ids.{one}" for one in about]
        files[IDS_FILES[ONNX]] = _converted(programs.ids, names, programs.lookups, outputs)
    return files


def _converted(
    program: ExportedProgram,
    inputs: Sequence[str],
    lookups: Sequence[LookupEntry],
    outputs: Sequence[str] | None = None,
) -> bytes:
    try:
        with _quiet():
            made = torch.onnx.export(
                program,
                dynamo=True,
                verbose=False,
                input_names=list(inputs),
                output_names=None if outputs is None else list(outputs),
            )
        assert made is not None, "torch.onnx.export returned nothing"
        model = made.model_proto
        if lookups:
            entry = model.metadata_props.add()
            entry.key, entry.value = _KEY, msgspec.json.encode(lookups).decode()
        data: bytes = model.SerializeToString()
    except Exception as error:  # torch raises many kinds here
        raise CheckpointError(
            f"the program cannot be converted to ONNX: {first_line(error)}; export with "
            "form='program'"
        ) from error
    return data


def _check_installed() -> None:
    for name in ("onnx", "onnxscript"):
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise ConfigError(
                f"form='onnx' needs the package {name}: pip install 'fleetlight[onnx]'"
            ) from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what torch says about operations of other packages."""
    log = logging.getLogger("torch.onnx")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.setLevel(level)
