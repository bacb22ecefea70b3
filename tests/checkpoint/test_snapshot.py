# SPDX-License-Identifier: Apache-2.0
"""The content of a snapshot: inputs, values, random generators and workers."""

import dataclasses
import math
import random
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.checkpoint.states import snapshot, whole_step
from torch import Tensor

from fleetlight import checkpoint
from fleetlight.checkpoint.formats.tensors import read_tensors
from fleetlight.checkpoint.formats.values import pack, unpack
from fleetlight.checkpoint.inference.inputs import InputEntry, Inputs, bind_inputs, name_examples
from fleetlight.checkpoint.state.rng import RngState, RngStateCache, rng_state, set_rng_state
from fleetlight.checkpoint.state.worker import WorkerState, read_worker, write_worker
from fleetlight.checkpoint.storage.generations import new_generation
from fleetlight.errors import CheckpointError, ConfigError, CorruptCheckpointError


def test_the_manifest_describes_the_snapshot(tmp_path: Path) -> None:
    extra = {"best": (0.5, math.inf), "note": None}
    job_snapshot = dataclasses.replace(snapshot(5), seed=3, epoch=2, server_num=4, extra=extra)
    written = checkpoint.write(tmp_path, job_snapshot)
    found = checkpoint.read(tmp_path)
    assert dataclasses.asdict(job_snapshot)["step"] == found.manifest.step == 5
    assert (found.manifest.seed, found.manifest.epoch) == (3, 2)
    assert (found.manifest.workers, found.manifest.servers) == (1, 4)
    assert found.manifest.torch == torch.__version__
    assert found.manifest.created == written.created
    assert found.extra == extra
    kinds = {entry.name: (entry.kind, entry.file) for entry in found.manifest.tensors}
    assert kinds["weight"] == ("parameter", "model.safetensors")


def test_a_detached_snapshot_does_not_follow_training(tmp_path: Path) -> None:
    module = torch.nn.Linear(2, 2)
    optimizer = torch.optim.Adam(module.parameters())
    module(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    names = {param: name for name, param in module.named_parameters()}
    live = checkpoint.JobSnapshot(
        model=checkpoint.model_state(module),
        optimizers=[checkpoint.optimizer_state(optimizer, names)],
        workers=[checkpoint.WorkerState(rank=0, tensors={"r": torch.ones(1)})],
    )
    frozen = live.detached()
    before = module.weight.detach().clone()
    optimizer.step()
    live.workers[0].tensors["r"].zero_()
    checkpoint.write(tmp_path, frozen)
    found = checkpoint.read(tmp_path)
    assert torch.equal(found.model().tensors["weight"], before)
    state, worker = found.optimizers()[0], found.worker(0)
    assert state is not None
    assert state.tensors["weight.step"].item() == 1
    assert worker is not None
    assert worker.tensors["r"].item() == 1


def test_a_detached_snapshot_keeps_extra_as_it_was() -> None:
    extra: dict[str, Any] = {"rates": [0.1, (2, math.inf)]}
    frozen = checkpoint.JobSnapshot(model=checkpoint.ModelState({}, {}), extra=extra).detached()
    extra["rates"].append(0.2)
    assert frozen.extra == {"rates": [0.1, (2, math.inf)]}


def test_unsupported_values_are_refused_when_detaching() -> None:
    empty = torch.nn.Linear(2, 2, device="meta")
    with pytest.raises(CheckpointError, match=r"'weight' cannot be saved: got a .* on meta"):
        checkpoint.JobSnapshot(model=checkpoint.model_state(empty)).detached()
    unsupported = checkpoint.JobSnapshot(model=checkpoint.ModelState({}, {}), extra={"best": print})
    with pytest.raises(CheckpointError, match=r"extra\.best cannot be saved: got a"):
        unsupported.detached()


@pytest.mark.parametrize("ranks", [[1], [0, 0], [1, 0], [0, 2]])
def test_a_missing_or_repeated_worker_is_refused(tmp_path: Path, ranks: list[int]) -> None:
    checkpoint.write(tmp_path, snapshot(1))
    workers = [checkpoint.WorkerState(rank=rank) for rank in ranks]
    with pytest.raises(CheckpointError, match=r"states of workers \[.*one of each worker"):
        checkpoint.write(tmp_path, dataclasses.replace(snapshot(2), workers=workers))
    assert whole_step(tmp_path) == 1


@pytest.mark.parametrize("value", [print, torch.ones(1)])
def test_an_unsupported_extra_value_is_named(tmp_path: Path, value: Any) -> None:
    with pytest.raises(CheckpointError, match=r"extra\.best cannot be saved: got a"):
        checkpoint.write(tmp_path, dataclasses.replace(snapshot(1), extra={"best": value}))


# -- inputs have the names of forward's parameters; a wrong one is named before the run -----------

X, Y = torch.zeros(2, 3), torch.zeros(2, dtype=torch.int64)
ENTRIES = [InputEntry("x", "float32", (None, 3)), InputEntry("ids", "int64", (None,))]


def forward(x: Tensor, ids: Tensor, *more: Tensor, scale: Tensor | None = None) -> Tensor:
    return x


@pytest.mark.parametrize(
    ("examples", "names", "positional"),
    [
        ((X, Y), ["x", "ids"], True),
        ([X, Y, X], ["x", "ids", "more_0"], True),
        ({"ids": Y, "x": X}, ["ids", "x"], False),
        ({"x": X, "ids": Y, "scale": X}, ["x", "ids", "scale"], False),
    ],
)
def test_example_inputs_are_named_as_in_forward(
    examples: Inputs, names: list[str], positional: bool
) -> None:
    named, by_position = name_examples(forward, examples)
    assert (list(named), by_position) == (names, positional)


def test_one_tensor_needs_no_list() -> None:
    named, _ = name_examples(torch.nn.Linear(3, 1).forward, X)
    assert list(named) == ["input"]


def test_examples_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"do not fit forward\(x: .*missing .*'ids'"):
        name_examples(forward, X)
    with pytest.raises(ConfigError, match="got an unexpected keyword argument 'z'"):
        name_examples(forward, {"x": X, "ids": Y, "z": Y})
    with pytest.raises(ConfigError, match="example input 'ids': got a int, expected a tensor"):
        name_examples(forward, {"x": X, "ids": 3})  # type: ignore[dict-item]


def test_inputs_are_ordered_as_in_the_example() -> None:
    for values in (
        bind_inputs(ENTRIES, (X, Y), {}),
        bind_inputs(ENTRIES, (X,), {"ids": Y}),
        bind_inputs(ENTRIES, (), {"ids": Y, "x": X}),
    ):
        assert values[0] is X
        assert values[1] is Y


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        ((X, Y, Y), {}, "got 3 inputs, expected 2: x, ids"),
        ((X,), {}, "missing input 'ids'; expected all of: x, ids"),
        ((X,), {"idz": Y}, "unknown input 'idz'; did you mean 'ids'?"),
        ((X, Y), {"x": X}, "input 'x' was given twice"),
        ((X.double(), Y), {}, "input 'x': got float64[2, 3], expected float32[batch, 3]"),
        ((X[:, :2], Y), {}, "input 'x': got float32[2, 2], expected float32[batch, 3]"),
        ((X[0], Y), {}, "input 'x': got float32[3], expected float32[batch, 3]"),
        ((X, [1, 2]), {}, "input 'ids': got a list, expected a tensor int64[batch]"),
        ((X, Y[:1]), {}, "input 'ids' has a batch of 1, but 'x' has one of 2"),
        ((X[:0], Y[:0]), {}, "input 'x' is an empty batch; expected at least one row"),
    ],
)
def test_a_wrong_input_is_named(
    args: tuple[Tensor, ...], kwargs: dict[str, Tensor], message: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        bind_inputs(ENTRIES, args, kwargs)


# -- values are restored exactly ------------------------------------------------------------------

numbers = st.integers() | st.integers(2**63, 2**200) | st.floats()
scalars = st.none() | st.booleans() | numbers | st.text()
keys = st.text() | st.integers() | st.tuples(st.integers(), st.text())
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(keys, inner)
        | st.dictionaries(st.sampled_from(["tuple", "float", "dict"]), inner)
    ),
    max_leaves=20,
)


def through_json(value: object, tensors: dict[str, torch.Tensor]) -> Any:
    return unpack(msgspec.json.decode(msgspec.json.encode(pack(value, "v", tensors))), tensors)


def exact(value: Any) -> Any:
    """The value with visible types and floats as bits, so that == means identical."""
    if isinstance(value, float):
        return ("nan",) if value != value else ("float", struct.pack("d", value))
    if isinstance(value, (list, tuple)):
        return (type(value), [exact(item) for item in value])
    if isinstance(value, dict):
        return (dict, [(exact(key), exact(item)) for key, item in value.items()])
    return (type(value), value)


@settings(deadline=None)
@given(values)
def test_values_survive_the_round_trip(value: object) -> None:
    assert exact(through_json(value, {})) == exact(value)


def test_nested_tensors_are_stored_separately() -> None:
    tensors: dict[str, torch.Tensor] = {}
    value = {"a": [torch.ones(2), None], "b": (torch.zeros(()),)}
    found = through_json(value, tensors)
    assert set(tensors) == {"v.a.0", "v.b.0"}
    assert found["a"][0] is value["a"][0]
    assert isinstance(found["b"], tuple)


def test_two_tensors_never_share_a_name() -> None:
    tensors: dict[str, torch.Tensor] = {}
    found = through_json({"a": {"b": torch.ones(1)}, "a.b": torch.zeros(1)}, tensors)
    assert (found["a"]["b"].item(), found["a.b"].item()) == (1, 0)


@pytest.mark.parametrize("dtype", ["uint32", "int64", "float32", "float64"])
def test_numpy_arrays_and_scalars_survive(dtype: str) -> None:
    array = np.array([1, 2, 3], dtype=dtype)
    found = through_json(array, {})
    assert found.dtype == array.dtype
    np.testing.assert_array_equal(found, array)
    assert through_json(array[0], {}) == array[0].item()


@pytest.mark.parametrize("value", [object(), {1, 2}, b"bytes", print, np.zeros((2, 2)), 1j])
def test_an_unsupported_value_is_named(value: object) -> None:
    kind = type(value).__name__
    with pytest.raises(CheckpointError, match=rf"^w\.hook\.1 cannot be saved: got a {kind}"):
        pack({"hook": [0, value]}, "w", {})


# -- random generators continue where they were saved ---------------------------------------------


def _no_cuda() -> bool:
    return torch.cuda.device_count() == 0


def draw() -> list[object]:
    # gauss and randn keep a spare number between calls, which is part of the state
    numpy = [float(np.random.randn()), int(np.random.randint(10**6))]
    return [random.random(), random.gauss(0, 1), *numpy, *torch.randn(3).tolist()]


def same(one: RngState, other: RngState) -> bool:
    return msgspec.json.encode(one) == msgspec.json.encode(other)


@pytest.mark.parametrize("before", range(3))
def test_generators_continue_after_a_round_trip(before: int) -> None:
    for _ in range(before):
        draw()
    state = msgspec.json.decode(msgspec.json.encode(rng_state()), type=RngState)
    expected = [draw() for _ in range(3)]
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    set_rng_state(state)
    assert [draw() for _ in range(3)] == expected


@pytest.mark.parametrize(
    "draw_or_seed",
    [
        lambda: None,
        lambda: np.random.randint(10),
        # every second number was drawn with the one before, and changes only the spare
        np.random.randn,
        lambda: np.random.seed(5),
        lambda: np.random.set_state(np.random.RandomState(6).get_state()),
        random.random,
        lambda: random.gauss(0, 1),
        lambda: random.seed(5),
        lambda: torch.randn(1),
    ],
)
def test_the_cache_notices_every_draw(draw_or_seed: Callable[[], object]) -> None:
    cache = RngStateCache()
    for _ in range(3):
        assert same(cache.state(), rng_state())
        draw_or_seed()
    assert same(cache.state(), rng_state())


def test_the_cache_supports_other_generators_of_numpy() -> None:
    usual, cache = np.random.get_bit_generator(), RngStateCache()
    np.random.set_bit_generator(np.random.PCG64(3))
    try:
        for _ in range(2):
            np.random.random()
            assert same(cache.state(), rng_state())
    finally:
        np.random.set_bit_generator(usual)


@pytest.mark.skipif(not _no_cuda(), reason="needs a machine without GPUs")
def test_states_of_missing_devices_are_ignored() -> None:
    set_rng_state(msgspec.structs.replace(rng_state(), cuda=[bytes(16)]))


@pytest.mark.gpu
@pytest.mark.skipif(_no_cuda(), reason="needs a GPU")
def test_cuda_generators_continue_after_a_round_trip() -> None:
    torch.randn(1, device="cuda")
    state = rng_state()
    expected = torch.randn(3, device="cuda")
    set_rng_state(state)
    assert torch.equal(torch.randn(3, device="cuda"), expected)


# -- the state of a worker, as bytes and as files -------------------------------------------------


def state() -> WorkerState:
    return WorkerState(
        rank=3,
        rng=rng_state(),
        values={
            "sampler": {"epoch": 2, "position": 2**40, "order": (1, 2)},
            "scaler": {"scale": 65536.0, "_growth_tracker": 3, "peak": torch.tensor(2.0)},
        },
        tensors={"residual.w": torch.randn(4)},
    )


def assert_same(found: WorkerState, expected: WorkerState) -> None:
    assert (found.rank, found.rng) == (expected.rank, expected.rng)
    assert found.values["sampler"] == expected.values["sampler"]
    assert found.values["scaler"]["peak"].item() == 2
    assert set(found.tensors) == {"residual.w"}
    assert torch.equal(found.tensors["residual.w"], expected.tensors["residual.w"])


def test_state_survives_as_bytes() -> None:
    expected = state()
    assert_same(WorkerState.from_bytes(expected.to_bytes()), expected)


def test_state_survives_as_files(tmp_path: Path) -> None:
    expected = state()
    with new_generation(tmp_path, "f") as generation:
        entries = write_worker(generation, expected)
        tensors = read_tensors(generation.path / "worker-00003.safetensors")
        assert_same(read_worker(generation.path / "worker-00003.json", tensors), expected)
    assert {entry.kind for entry in entries} == {"worker"}


def test_a_worker_without_tensors_has_one_file(tmp_path: Path) -> None:
    with new_generation(tmp_path, "f") as generation:
        assert write_worker(generation, WorkerState(rank=0)) == []
        assert [entry.name for entry in generation.files] == ["worker-00000.json"]


def test_an_unsupported_value_of_a_worker_is_named() -> None:
    with pytest.raises(CheckpointError, match=r"worker 1 values\.sampler\.fn cannot be saved"):
        WorkerState(rank=1, values={"sampler": {"fn": print}}).to_bytes()


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "worker-00000.json").write_text("{")
    with pytest.raises(CorruptCheckpointError, match=r"worker-00000.json is damaged"):
        read_worker(tmp_path / "worker-00000.json", {})
