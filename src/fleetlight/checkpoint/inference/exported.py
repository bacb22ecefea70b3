# SPDX-License-Identifier: Apache-2.0
"""Models for inference: an exported program that runs without the model's class."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram, ShapesCollection
from torch.export.passes import move_to_device_pass

from fleetlight.checkpoint.inference import archive
from fleetlight.checkpoint.inference.inputs import (
    InputEntry,
    Inputs,
    bind_inputs,
    describe_input,
    name_examples,
    sizes_text,
)
from fleetlight.checkpoint.inference.reader_rows import FollowingModule, RowReader
from fleetlight.checkpoint.storage.generations import (
    Directory,
    new_generation,
    read_manifest,
    verified,
)
from fleetlight.checkpoint.storage.manifest import BaseManifest
from fleetlight.errors import CheckpointError, ConfigError, CorruptCheckpointError, did_you_mean

FORMAT = "fleetlight-inference"
PROGRAM_FILE = "program.pt2"

_log = logging.getLogger(__name__)


class InferenceManifest(BaseManifest, frozen=True, kw_only=True):
    """The manifest of a saved inference model."""

    inputs: list[InputEntry]
    positional: bool
    #: why the batch size is fixed, None if it is not
    static_because: str | None


class InferenceModel:
    """A loaded program. Call it with tensors by position or by name."""

    def __init__(
        self,
        manifest: InferenceManifest,
        program: ExportedProgram,
        device: torch.device,
        reader: RowReader | None = None,
    ) -> None:
        self.manifest = manifest
        self.device = device
        self._module = program.module()
        #: takes rows and dense values from the newest publication
        self._following = None if reader is None else FollowingModule(program.module, reader)
        self._gives = ", ".join(_outputs(program)) or "nothing"

    def __repr__(self) -> str:
        """`InferenceModel(x: float32[?, 4]) -> float32[?, 3]`."""
        return f"InferenceModel({', '.join(map(str, self.inputs))}) -> {self._gives}"

    @property
    def inputs(self) -> list[InputEntry]:
        """The names, types and shapes of the inputs."""
        return self.manifest.inputs

    def __call__(self, *args: Tensor, **kwargs: Tensor) -> Any:
        """Run the program; what it returns has the structure of the model's own result."""
        values = bind_inputs(self.inputs, args, kwargs)
        self._check_devices(values)
        with torch.no_grad():
            if self._following is None:
                return self._run(self._module, values)
            with self._following.newest() as module:
                return self._run(module, values)

    def _run(self, module: nn.Module, values: Sequence[Tensor]) -> Any:
        if self.manifest.positional:
            return module(*values)
        names = (entry.name for entry in self.inputs)
        return module(**dict(zip(names, values, strict=True)))

    def _check_devices(self, values: list[Tensor]) -> None:
        for entry, value in zip(self.inputs, values, strict=True):
            if value.device != self.device:
                raise ConfigError(
                    f"input {entry.name!r} is on {value.device}, expected it on {self.device}; "
                    f"move it there, or load the model with device={str(value.device)!r}"
                )


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


def save_inference(
    dirname: Directory,
    module: nn.Module,
    example_inputs: Inputs,
    *,
    dynamic_batch: bool | Collection[str] = True,
) -> InferenceManifest:
    """Export `module` in eval mode, with its weights, so that it runs without its class.

    The first dimension of every input as long as that of the first one is the batch and may have
    any size of at least 1; `dynamic_batch` may name the inputs that have one, or be False. A model
    that cannot take any batch size is exported with that of the example, and the reason logged.
    """
    examples, positional = name_examples(module.forward, example_inputs)
    batched = _batched(examples, dynamic_batch)
    with _evaluating(module):
        program, reason = _export(module, examples, positional, batched)
    program = _on(program, torch.device("cpu"))
    entries = [
        describe_input(name, example, name in batched and reason is None)
        for name, example in examples.items()
    ]
    with new_generation(dirname, FORMAT) as generation:
        with generation.create(PROGRAM_FILE) as sink:
            archive.write_program(sink, program)
        archive.refuse_pickle(generation.path / PROGRAM_FILE)
        manifest = InferenceManifest(
            **generation.header(), inputs=entries, positional=positional, static_because=reason
        )
        generation.publish(manifest)
    return manifest


def load_inference(
    dirname: Directory, device: str | torch.device = "cpu", reader: RowReader | None = None
) -> InferenceModel:
    """Load what `save_inference` wrote, onto a device. Neither servers nor classes are needed.

    `reader` gives the rows of a program that has none, and the dense values.

    The graph becomes code that runs in this process: load only what comes from a trusted place.
    """
    place = torch.empty(0, device=device).device  # "cuda" becomes "cuda:0"
    manifest = read_manifest(dirname, InferenceManifest, FORMAT)
    path = verified(dirname, manifest, PROGRAM_FILE)
    try:
        program = archive.read_program(path)
    except CheckpointError:
        raise
    except Exception as error:  # torch raises many kinds here
        raise CorruptCheckpointError(
            f"{path} (written with torch {manifest.torch}) cannot be loaded with torch "
            f"{torch.__version__}: {_first_line(error)}; save it again with this torch"
        ) from error
    return InferenceModel(manifest, _on(program, place), place, reader)


@contextlib.contextmanager
def _evaluating(module: nn.Module) -> Iterator[None]:
    """Eval mode without gradients; every submodule gets its own training flag back."""
    flags = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for part, training in flags:
            part.training = training


def _batched(examples: Mapping[str, Tensor], wanted: bool | Collection[str]) -> list[str]:
    """The names of the inputs whose first dimension is the batch."""
    with_rows = [name for name, example in examples.items() if example.dim() > 0]
    if wanted is False or not with_rows:
        return []
    if wanted is True:
        rows = examples[with_rows[0]].shape[0]
        wanted = [name for name in with_rows if examples[name].shape[0] == rows]
    for name in wanted:
        if name not in with_rows:
            raise ConfigError(
                f"dynamic_batch: got {name!r}, expected inputs that have dimensions; "
                f"{did_you_mean(name, with_rows)}"
            )
        if examples[name].shape[0] == 0:
            raise ConfigError(f"example input {name!r} has no rows; expected at least one")
    return [name for name in with_rows if name in wanted]


def _export(
    module: nn.Module, examples: Mapping[str, Tensor], positional: bool, batched: list[str]
) -> tuple[ExportedProgram, str | None]:
    """The program, and why its batch size is fixed (None if it is not)."""
    reason = None if batched else "no batch dimension was asked for or found"
    if batched:
        try:
            return _trace(module, _two_rows(examples, batched), positional, batched), None
        except Exception as error:  # whatever it is, the model may still work with one batch size
            reason = _first_line(error)
            _log.warning(
                "%s: exported for the example's batch size only, because: %s",
                type(module).__name__,
                reason,
            )
    try:
        return _trace(module, examples, positional, []), reason
    except Exception as error:  # torch raises many kinds here
        raise CheckpointError(
            f"{type(module).__name__} cannot be exported: {_first_line(error)}; "
            f"expected a forward that torch.export can trace"
        ) from error


def _trace(
    module: nn.Module, examples: Mapping[str, Tensor], positional: bool, batched: list[str]
) -> ExportedProgram:
    args = tuple(examples.values()) if positional else ()
    kwargs = {} if positional else dict(examples)
    shapes, batch = ShapesCollection(), Dim("batch", min=1)  # type: ignore[no-untyped-call]
    for name in batched:
        shapes[examples[name]] = {0: batch}
    dynamic: Any = shapes if batched else None
    return torch.export.export(module, args, kwargs, dynamic_shapes=dynamic)


def _two_rows(examples: Mapping[str, Tensor], batched: list[str]) -> dict[str, Tensor]:
    """The same inputs with a batch of at least 2: torch takes sizes 0 and 1 for constants."""
    if all(examples[name].shape[0] >= 2 for name in batched):
        return dict(examples)
    doubled = {name: torch.cat([examples[name][:1]] * 2) for name in batched}
    return {**examples, **doubled}


def _on(program: ExportedProgram, device: torch.device) -> ExportedProgram:
    """The program on one device, so that one trained on a GPU runs anywhere."""
    held = [*program.state_dict.values(), *program.constants.values()]
    devices = {tensor.device for tensor in held if isinstance(tensor, Tensor)}
    return program if devices <= {device} else move_to_device_pass(program, device)


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), repr(error))
