# SPDX-License-Identifier: Apache-2.0
"""Saves models for inference: exported programs that run without the model's class."""

from __future__ import annotations

import importlib
import logging
import os
import tempfile
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from fleetlight.checkpoint.inference import archive
from fleetlight.checkpoint.inference.compiled import compile_program
from fleetlight.checkpoint.inference.inference_manifest import (
    COMPILED,
    FORMAT,
    FORMS,
    IDS_FILES,
    MODEL_FILES,
    ONNX,
    PROGRAM,
    ConstantEntry,
    InferenceManifest,
)
from fleetlight.checkpoint.inference.inputs import (
    InputEntry,
    Inputs,
    describe_input,
    name_examples,
    sizes_text,
)
from fleetlight.checkpoint.inference.lookups import LookupEntry
from fleetlight.checkpoint.inference.programs import Programs, batched_inputs, exported, first_line
from fleetlight.checkpoint.storage.files import FileTarget, FolderTarget, Writable
from fleetlight.checkpoint.storage.generations import Directory, Generation, new_generation
from fleetlight.checkpoint.storage.manifest import FileEntry
from fleetlight.checkpoint.storage.stored_generations import (
    StoredGeneration,
    new_stored_generation,
)
from fleetlight.errors import CheckpointError, ConfigError, did_you_mean
from fleetlight.store import is_url

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


#: generations under a URL: a process may still load the one before
_KEPT = 2
#: writes a file
_Writer = Callable[[Writable], None]


def save_inference(
    dirname: Directory,
    module: nn.Module,
    example_inputs: Inputs,
    *,
    dynamic_batch: bool | Collection[str] = True,
    form: str = PROGRAM,
    prefix: str = "",
) -> InferenceManifest:
    """Export `module` in eval mode, with its weights, so that it runs without its class.

    The first dimension of every input as long as that of the first one is the batch and may have
    any size of at least 1; `dynamic_batch` may name the inputs that have one, or be False. A model
    that cannot take any batch size is exported with that of the example, and the reason logged.

    `prefix`: what the names of its dense values begin with in publications.
    """
    if form not in FORMS:
        raise ConfigError(f"save_inference_model: got form={form!r}; {did_you_mean(form, FORMS)}")
    examples, positional = name_examples(module.forward, example_inputs)
    programs = exported(module, examples, positional, batched_inputs(examples, dynamic_batch))
    device = _device(programs.program) if form == COMPILED else torch.device("cpu")
    programs = programs.on(device)
    inputs = [
        describe_input(name, example, name in programs.batched and not programs.static_because)
        for name, example in examples.items()
    ]
    writers = _writers(programs, form, inputs)

    def manifest(generation: Generation | StoredGeneration) -> InferenceManifest:
        return InferenceManifest(
            **generation.header(),
            inputs=inputs,
            positional=positional,
            static_because=programs.static_because,
            form=form,
            device=device.type,
            outputs=list(_outputs(programs.program)),
            lookups=list(programs.lookups),
            prefix=prefix,
            state=list(_state(programs.program)) if form == COMPILED else [],
        )

    if not is_url(dirname):
        with new_generation(dirname, FORMAT) as folder:
            _write(folder, folder.path, writers)
            folder.publish(made := manifest(folder))
        return made
    url = os.fspath(dirname)
    with tempfile.TemporaryDirectory() as new, new_stored_generation(url, FORMAT, _KEPT) as stored:
        for entry in _write(FolderTarget(Path(new)), Path(new), writers):
            stored.add(entry, Path(new, entry.name))
        stored.publish(made := manifest(stored))
    return made


def _writers(programs: Programs, form: str, inputs: Sequence[InputEntry]) -> Mapping[str, _Writer]:
    """The files of a form, by name."""
    if form == ONNX:
        return {name: _bytes_writer(data) for name, data in onnx_files(programs, inputs).items()}
    writers = {} if programs.ids is None else {IDS_FILES[form]: _program_writer(programs.ids)}
    if form == COMPILED:
        return {MODEL_FILES[form]: _bytes_writer(compile_program(programs.program)), **writers}
    return {MODEL_FILES[form]: _program_writer(programs.program), **writers}


def _bytes_writer(data: bytes) -> _Writer:
    def write(sink: Writable) -> None:
        sink.write(data)

    return write


def _program_writer(program: ExportedProgram) -> _Writer:
    def write(sink: Writable) -> None:
        archive.write_program(sink, program)

    return write


def _write(target: FileTarget, folder: Path, writers: Mapping[str, _Writer]) -> Sequence[FileEntry]:
    """Write files into a folder."""
    entries = []
    for name, write in writers.items():
        with target.create(name) as sink:
            write(sink)
        if name in (MODEL_FILES[PROGRAM], IDS_FILES[PROGRAM]):
            archive.refuse_pickle(folder / name)
        entries.append(sink.entry)
    return entries


def _device(program: ExportedProgram) -> torch.device:
    """Where the parameters are."""
    return next((value.device for value in program.state_dict.values()), torch.device("cpu"))


def _state(program: ExportedProgram) -> Iterator[ConstantEntry]:
    for name, tensor in program.state_dict.items():
        dtype, is_parameter = (
            str(tensor.dtype).removeprefix("torch."),
            isinstance(tensor, nn.Parameter),
        )
        yield ConstantEntry(name, tuple(tensor.shape), dtype, is_parameter)


def _outputs(program: ExportedProgram) -> Iterator[str]:
    """`float32[?, 3]` for each tensor that the program returns."""
    values = {node.name: node.meta.get("val") for node in program.graph.nodes}
    for name in program.graph_signature.user_outputs:
        value = values.get(name) if isinstance(name, str) else name
        if isinstance(value, Tensor):
            shape = [size if isinstance(size, int) else None for size in value.shape]
            yield f"{str(value.dtype).removeprefix('torch.')}{sizes_text(shape)}"
        else:
            yield repr(value)
