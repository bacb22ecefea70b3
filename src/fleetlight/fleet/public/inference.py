# SPDX-License-Identifier: Apache-2.0
"""Exports models for inference, with the rows of their tables, and loads them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, overload

import torch
from torch import Tensor, nn

from fleetlight import checkpoint
from fleetlight.errors import ConfigError, PlanError, names_arguments
from fleetlight.fleet.job import Job, PlainLayer, Rows, current, current_or_none
from fleetlight.fleet.plan.remote_embedding import RemoteEmbedding, plain_layer
from fleetlight.fleet.training import local_training
from fleetlight.fleet.training.model import as_plain_module
from fleetlight.fleet.training.registering import registered_model
from fleetlight.ps.layers.embedding import TableLayer
from fleetlight.torch_compat.modules import children

if TYPE_CHECKING:
    from fleetlight.checkpoint import InferenceModel, RowReader
    from fleetlight.static.inference import Feeds
    from fleetlight.static.program import Program

Directory = str | os.PathLike[str]
Examples = tuple[Tensor, ...] | Mapping[str, Tensor] | Tensor


@overload
def save_inference_model(
    dirname: Directory,
    example_inputs: Examples,
    model: nn.Module | None = None,
    *,
    dynamic_batch: bool | list[str] = True,
    rows: Rows = "all",
    form: str = "program",
) -> None:
    """Export a model, with the rows of its tables."""


@overload
def save_inference_model(
    dirname: Directory,
    feeds: Feeds,
    fetches: Sequence[Any],
    /,
    *,
    dynamic_batch: bool | list[str] = True,
    rows: Rows = "all",
    form: str = "program",
    program: Program,
) -> None:
    """Export a static program; feeds and fetches are variables or their names."""


@overload
def save_inference_model(
    dirname: Directory,
    *,
    feeds: Feeds,
    fetches: Sequence[Any],
    dynamic_batch: bool | list[str] = True,
    rows: Rows = "all",
    form: str = "program",
    program: Program,
) -> None:
    """Export a static program, by keywords."""


@names_arguments
def save_inference_model(
    dirname: Directory,
    example_inputs: Any = None,
    model: Any = None,
    *others: Any,
    dynamic_batch: bool | list[str] = True,
    rows: Rows = "all",
    form: str = "program",
    feeds: Any = None,
    fetches: Any = None,
    program: Program | None = None,
) -> None:
    """Export the model for inference; worker 0 writes, and the other workers do nothing.

    `load_inference_model` alone runs the result, without a job, servers or the model's class.
    Workers that train alone (LocalSGD, DiLoCo) differ: let all call `fleet.barrier_worker()`
    before.

    For a static program, give feeds and fetches in place of example inputs and model. The exported
    model returns one fetch as it is, and several as a tuple.

    Args:
        dirname: a folder or a URL.
        example_inputs: a tensor, a tuple of tensors, or tensors by name.
        model: the module to export; by default the registered model.
        others: none; an error explains calls in Fleet's old form.
        dynamic_batch: True if the first dimension of each input may have any size, or a list of
            the inputs for which it may.
        rows: `"all"` rows of tables, those of some ids with `{"emb": ids}`, or none with
            `"reader"`, for a model that reads published rows. Other ids read their first values.
        form: `"program"`, `"compiled"` (machine code for the kind of device that the model is on;
            needs a C++ compiler) or `"onnx"` (for other runtimes).
        feeds: the inputs of a static program, variables or names.
        fetches: the outputs of a static program, variables or names.
        program: the static program.

    Raises:
        ConfigError: the arguments do not fit together.
        PlanError: torch cannot export the model, or its rows are in no job of this process.

    Example:
        >>> fleet.init(is_collective=True)
        >>> model = fleet.distributed_model(nn.Linear(4, 3))
        >>> fleet.save_inference_model("exported", torch.zeros(2, 4))
        >>> fleet.load_inference_model("exported")(torch.zeros(5, 4)).shape
        torch.Size([5, 3])
    """
    _refuse_old_form(dirname, example_inputs, model, *others)
    if program is not None:
        given = example_inputs if feeds is None else feeds
        wanted = model if fetches is None else fetches
        _save_program(dirname, program, given, wanted, dynamic_batch, rows, form)
        return
    if feeds is not None or fetches is not None:
        raise ConfigError(
            "save_inference_model: got feeds and fetches without a static program; add "
            "program=fleet.main_program"
        )
    job = current()
    job.refuse_in_server("save_inference_model")
    if job.group.index != 0:
        return
    local_training.warn_if_apart(job, "save_inference_model")
    examples = (example_inputs,) if isinstance(example_inputs, Tensor) else example_inputs
    with contextlib.ExitStack() as stack:
        module = model or registered_model(job)
        prefix = _prefix_of(module, job)
        module = stack.enter_context(with_plain_layers(job, module, rows))
        stack.enter_context(as_plain_module(module))
        checkpoint.save_inference(
            dirname, module, examples, dynamic_batch=dynamic_batch, form=form, prefix=prefix
        )


def _prefix_of(module: nn.Module, job: Job) -> str:
    """What the names of a module's values begin with in those of the registered model."""
    whole = registered_model(job) if job.models else module
    names = [name for name, part in whole.named_modules() if part is module and name]
    return f"{names[0]}." if names else ""


def _refuse_old_form(dirname: Any, *others: Any) -> None:
    """ConfigError for Fleet's old form: an executor, the folder, feeds and fetches."""
    if isinstance(dirname, (str, os.PathLike)) and len(others) == 2:
        return
    got = ", ".join(type(value).__name__ for value in (dirname, *others) if value is not None)
    raise ConfigError(
        f"fleet.save_inference_model: got ({got}), expected a folder, feeds and fetches; it takes "
        "no executor: write fleet.save_inference_model(dirname, feeds, fetches, program=program)"
    )


def _save_program(
    dirname: Directory,
    program: Program,
    feeds: Any,
    fetches: Any,
    dynamic: bool | list[str],
    rows: Rows,
    form: str,
) -> None:
    """Export a program. Without tables it needs no `fleet.init`."""
    from fleetlight.static.inference import examples_of, has_tables, inference_module

    if feeds is None or fetches is None:
        raise ConfigError(
            "save_inference_model: expected the feeds and the fetches of the program, as variables "
            'or names: save_inference_model(dirname, ["x"], ["output"], program=program)'
        )
    job = current_or_none()
    if job is not None:
        job.refuse_in_server("save_inference_model")
        if job.group.index != 0:
            return
        local_training.warn_if_apart(job, "save_inference_model")
    examples, batched = examples_of(program, feeds)
    inputs = tuple(examples.values())
    if dynamic is True:
        dynamic = batched or False
    with contextlib.ExitStack() as stack:
        make_plain: PlainLayer | None = None
        if has_tables(program):
            if job is not None:
                make_plain = stack.enter_context(job.plain_layers(rows))
            make_plain = make_plain or _unserved
        module = inference_module(program, feeds, fetches, make_plain)
        checkpoint.save_inference(dirname, module, inputs, dynamic_batch=dynamic, form=form)


def _unserved(layer: nn.Module) -> nn.Module:
    """A plain layer of torch from a layer without servers."""
    if isinstance(layer, TableLayer):
        raise PlanError(
            f"save_inference_model: the rows of a {type(layer).__name__} are in a table of a job "
            "with parameter servers (or of fleet.init() in one process), but this process has no "
            "such job; call it in the worker that trains"
        )
    assert isinstance(layer, (nn.Embedding, nn.EmbeddingBag))
    return plain_layer(layer, layer.weight.detach())


def load_inference_model(
    dirname: Directory, device: str | torch.device = "cpu", reader: RowReader | None = None
) -> InferenceModel:
    """Load an exported model as a callable; this needs no `fleet.init`.

    Args:
        dirname: the folder or URL of `save_inference_model`.
        device: the device that runs the model.
        reader: a `fleetlight.serve.Reader`, for a model exported with `rows="reader"`: it gives
            the rows and dense values of the newest publication, one publication for each call.

    Returns:
        A callable that takes tensors by position or by name. `inputs` lists them.

    Raises:
        ConfigError: the device or the reader does not fit the exported model.
        CheckpointError: the files cannot be read.

    Example:
        >>> fleet.init(is_collective=True)
        >>> model = fleet.distributed_model(nn.Linear(4, 3))
        >>> fleet.save_inference_model("exported", {"input": torch.zeros(2, 4)})
        >>> fleet.load_inference_model("exported")
        InferenceModel(input: float32[?, 4]) -> float32[?, 3]
    """
    return checkpoint.load_inference(dirname, device, reader)


@contextlib.contextmanager
def with_plain_layers(job: Job, module: nn.Module, rows: Rows) -> Iterator[nn.Module]:
    """The module, with plain layers of torch in place of those whose rows are on servers."""
    replacements: dict[nn.Module, nn.Module] = {}
    with job.plain_layers(rows) as make_plain:
        if make_plain is not None:
            replacements = {
                layer: make_plain(layer) for layer in module.modules() if _has_rows(layer)
            }
    with _replaced(module, replacements):
        yield replacements.get(module, module)


def _has_rows(layer: nn.Module) -> bool:
    """True when the rows of a layer are on servers."""
    moved = isinstance(layer.__dict__.get("forward"), RemoteEmbedding)
    return isinstance(layer, TableLayer) or moved


@contextlib.contextmanager
def _replaced(module: nn.Module, replacements: Mapping[nn.Module, nn.Module]) -> Iterator[None]:
    """Replace some modules inside the block."""
    places = [
        (parent, name, child)
        for parent in list(module.modules())
        for name, child in children(parent).items()
        if child in replacements
    ]
    for parent, name, child in places:
        assert child is not None
        children(parent)[name] = replacements[child]
    try:
        yield
    finally:
        for parent, name, child in places:
            children(parent)[name] = child
