# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of a job: saved by N workers, loaded by M workers or by plain PyTorch."""

import random
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from tests.checkpoint.states import snapshot, whole_step
from tests.errors import error_text
from tests.workers import WorkerFailedError, descend, run_workers
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import fleetlight as fleet
from fleetlight import checkpoint
from fleetlight.checkpoint.storage.manifest import VERSION
from fleetlight.errors import CheckpointError, ConfigError, CorruptCheckpointError, PeerError
from fleetlight.fleet.checkpoints import loading, persistables
from fleetlight.fleet.job import current

pytestmark = pytest.mark.multiprocess

GLOBAL_BATCH = 12


def build(seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    model = fleet.distributed_model(model)
    optimizer = fleet.distributed_optimizer(torch.optim.Adam(model.parameters(), lr=0.05))
    x = torch.randn(50, 5, generator=torch.Generator().manual_seed(9)).double()
    records = TensorDataset(x, (x.sum(1) > 0).long())
    batch = GLOBAL_BATCH // fleet.worker_num()
    return model, optimizer, fleet.shard(DataLoader(records, batch_size=batch, shuffle=True))


def train(steps: int, model: nn.Module, optimizer: Any, loader: Any) -> None:
    done = 0
    while done < steps:
        for x, y in loader:
            descend(optimizer, F.cross_entropy(model(x), y))
            done += 1
            if done == steps:
                break


def save_after(steps: int, dirname: str, more: int) -> Any:
    model, optimizer, loader = build()
    train(steps, model, optimizer, loader)
    fleet.save_persistables(dirname, extra={"note": "half-way", "epoch": 1})
    bound = float(torch.rand(1))
    # what an uninterrupted job does next: the rest of this epoch, then further epochs
    resumed = fleet.shard(loader_of(loader))
    resumed.load_state_dict(loader.state_dict())
    train(more, model, optimizer, resumed)
    return [p.detach().clone() for p in model.parameters()], bound


def loader_of(sharded: Any) -> Any:
    batch = GLOBAL_BATCH // fleet.worker_num()
    return DataLoader(sharded.dataset, batch_size=batch, shuffle=True)


def load_and_resume(dirname: str, more: int) -> Any:
    model, optimizer, loader = build(seed=77 + fleet.worker_index())
    random.seed(1)
    extra = fleet.load_persistables(dirname)
    bound = float(torch.rand(1))
    train(more, model, optimizer, loader)
    return [p.detach().clone() for p in model.parameters()], bound, extra


@pytest.mark.contract
@pytest.mark.parametrize(("before", "after"), [(2, 3), (2, 2), (3, 1), (1, 2)])
def test_any_number_of_workers_resumes_from_a_checkpoint(
    tmp_path: Path, before: int, after: int
) -> None:
    saved = run_workers(save_after, before, 6, str(tmp_path / "ckpt"), 5)
    loaded = run_workers(load_and_resume, after, str(tmp_path / "ckpt"), 5)
    for parameters, _, extra in loaded:
        assert extra == {"note": "half-way", "epoch": 1}
        for mine, theirs in zip(parameters, saved[0][0], strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)
    if before == after:
        assert [r[1] for r in loaded] == [r[1] for r in saved]


@pytest.mark.contract
def test_plain_pytorch_loads_a_checkpoint(tmp_path: Path) -> None:
    [(parameters, _)] = run_workers(save_after, 1, 6, str(tmp_path / "ckpt"), 0)
    from safetensors.torch import load_file

    from fleetlight.checkpoint import export

    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    model.load_state_dict(load_file(export(tmp_path / "ckpt", tmp_path / "model.safetensors")))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), parameters, strict=True))


def load_from_private_folder(root: str) -> Any:
    """Only worker 0 has the checkpoint; worker 1 has an older one in the same place."""
    model, _, _ = build(seed=fleet.worker_index())
    mine = Path(root) / f"host{fleet.worker_index()}"
    fleet.load_persistables(mine)
    return [p.detach().clone() for p in model.parameters()]


def test_load_uses_the_checkpoint_of_worker_0(tmp_path: Path) -> None:
    saved = run_workers(save_after, 1, 4, str(tmp_path / "host0"), 0)
    run_workers(save_after, 1, 2, str(tmp_path / "host1"), 0)
    for parameters in run_workers(load_from_private_folder, 3, str(tmp_path)):
        for mine, theirs in zip(parameters, saved[0][0], strict=True):
            assert torch.equal(mine, theirs)


def only_some_save(dirname: str) -> None:
    build()
    if fleet.worker_index() == 0:
        fleet.save_persistables(dirname)
    else:
        wait_for_goodbye()


def wait_for_goodbye() -> None:
    liveness = current().group.liveness
    assert liveness is not None
    while not liveness.all_gone():
        pass


def test_save_by_some_workers_names_the_missing_ones(tmp_path: Path) -> None:
    with pytest.raises(
        WorkerFailedError, match=r"every worker must call it.* worker 1 .*is alive, at step 0"
    ):
        run_workers(only_some_save_and_fail, 2, str(tmp_path / "ckpt"))


def only_some_save_and_fail(dirname: str) -> None:
    current().group.deadline_s = 1.5
    try:
        only_some_save(dirname)
    except BaseException as error:
        current().group.fail(str(error))
        raise


def save_into(dirname: str) -> str:
    build()
    try:
        fleet.save_persistables(dirname)
    except CheckpointError as error:
        return str(error)
    return "saved"


def test_failed_save_is_an_error_on_all_workers(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    zero, one = run_workers(save_into, 2, str(tmp_path / "file"))
    assert "file" in zero
    assert one.startswith("on worker 0: ")


def load_unfit_checkpoint(dirname: str) -> Any:
    """The model fits; the optimizer on worker 1 does not."""
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    model = fleet.distributed_model(model)
    kind = torch.optim.SGD if fleet.worker_index() == 1 else torch.optim.Adam
    fleet.distributed_optimizer(kind(model.parameters(), lr=0.05))
    records = TensorDataset(torch.randn(50, 5).double(), torch.zeros(50).long())
    loader = fleet.shard(DataLoader(records, batch_size=6, shuffle=True))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    bound = torch.get_rng_state()
    with pytest.raises(CheckpointError, match="it is SGD here, but Adam in the checkpoint"):
        fleet.load_persistables(dirname)
    same = all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    return same, loader.epoch, loader.consumed, torch.equal(torch.get_rng_state(), bound)


def test_checkpoint_unfit_for_one_worker_changes_no_worker(tmp_path: Path) -> None:
    run_workers(save_after, 1, 6, str(tmp_path / "ckpt"), 0)
    answers = run_workers(load_unfit_checkpoint, 2, str(tmp_path / "ckpt"))
    assert answers == [(True, 0, 0, True)] * 2


def load_refused_position(dirname: str) -> Any:
    model, _, loader = build(seed=5)
    before = [p.detach().clone() for p in model.parameters()]
    fleet.shard(loader_of(loader))  # a second loader, whose position lacks a field
    state = {"loaders": [{**loader.state_dict(), "epoch": 7}, {"epoch": 1}]}
    context = current()
    write_job(context, dirname, checkpoint.WorkerState(rank=0, values=state))
    with pytest.raises(CheckpointError, match="position lacks"):
        fleet.load_persistables(dirname)
    same = all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))
    return same, loader.epoch


def write_job(context: Any, dirname: str, saved: Any) -> None:
    other = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    adam = torch.optim.Adam(other.parameters(), lr=0.05)
    names = {parameter: name for name, parameter in other.named_parameters()}
    snapshot = checkpoint.JobSnapshot(
        model=checkpoint.model_state(other),
        optimizers=[checkpoint.optimizer_state(adam, names)],
        workers=[saved],
    )
    checkpoint.write(dirname, snapshot)


def test_refused_loader_position_changes_nothing(tmp_path: Path) -> None:
    assert run_workers(load_refused_position, 1, str(tmp_path / "ckpt")) == [(True, 0)]


def save_slowly(dirname: str) -> str:
    build()
    context = current()
    context.group.deadline_s = 2.0
    write = checkpoint.write
    pause = threading.Event()

    def slow(*args: Any, **how: Any) -> Any:
        pause.wait(5.0)
        return write(*args, **how)

    checkpoint.write = slow
    fleet.save_persistables(dirname)
    return "saved"


def test_save_may_exceed_the_deadline(tmp_path: Path) -> None:
    assert run_workers(save_slowly, 2, str(tmp_path / "ckpt")) == ["saved", "saved"]


def save_in_background(dirname: str) -> Any:
    """The file is written only after three more steps."""
    model, optimizer, loader = build()
    train(2, model, optimizer, loader)
    write, go = checkpoint.write, threading.Event()

    def held_back(*args: Any, **how: Any) -> Any:
        assert go.wait(30), "the save did not continue in the background"
        return write(*args, **how)

    checkpoint.write = held_back
    extra = {"epochs": [1]}
    fleet.save_persistables(dirname, extra=extra, background=True)
    extra["epochs"].append(2)
    saved = [p.detach().clone() for p in model.parameters()]
    train(3, model, optimizer, loader)
    moved = not any(torch.equal(a, b) for a, b in zip(saved, model.parameters(), strict=True))
    early = Path(dirname, "manifest.json").exists()
    go.set()
    loaded = fleet.load_persistables(dirname)
    same = all(torch.equal(a, b) for a, b in zip(saved, model.parameters(), strict=True))
    return early, moved, loaded, same, current().step


def test_background_save_has_the_values_at_the_call(tmp_path: Path) -> None:
    answers = run_workers(save_in_background, 2, str(tmp_path / "ckpt"))
    assert answers == [(False, True, {"epochs": [1]}, True, 2)] * 2


def fail_in_background(dirname: str) -> list[str]:
    """Two saves fail: the next save raises the first error, the end of the job the second."""
    build()
    texts = []
    zero = fleet.is_first_worker()
    for end in (lambda: fleet.save_persistables(dirname), fleet.stop_worker):
        if zero:
            Path(dirname).write_text("in the way")
        fleet.save_persistables(dirname, background=True)
        try:
            end()
            texts.append("")
        except CheckpointError as error:
            texts.append(str(error))
        if zero:
            Path(dirname).unlink()
    return texts


def test_background_failure_is_raised_by_the_next_call(tmp_path: Path) -> None:
    zero, one = run_workers(fail_in_background, 2, str(tmp_path / "ckpt"))
    failed = f"the save into {tmp_path / 'ckpt'} at step 0 failed in the background: "
    assert [text.startswith(failed) for text in zero] == [True, True], zero
    assert [text.startswith(f"on worker 0: {failed}") for text in one] == [True, False], one


def save_without_optimizer(dirname: str) -> list[str]:
    fleet.distributed_model(nn.Linear(2, 2))
    messages: list[str] = []
    persistables.logger.warning = lambda text, *_: messages.append(text)  # type: ignore[method-assign]
    fleet.save_persistables(dirname)
    return messages


def test_save_without_the_optimizer_of_a_model_warns(tmp_path: Path) -> None:
    zero, one = run_workers(save_without_optimizer, 2, str(tmp_path / "ckpt"))
    assert [("no optimizer state is saved" in text) for text in zero] == [True]
    assert one == []


def load_from(dirname: str) -> str:
    build()
    try:
        fleet.load_persistables(dirname)
    except CheckpointError as error:
        return f"{type(error).__name__}: {error}"
    return "loaded"


def test_damaged_file_is_named_on_all_workers(tmp_path: Path) -> None:
    run_workers(save_after, 1, 2, str(tmp_path / "ckpt"), 0)
    [model] = (tmp_path / "ckpt").glob("*/model.safetensors")
    data = bytearray(model.read_bytes())
    data[-1] ^= 1
    model.write_bytes(data)
    for text in run_workers(load_from, 2, str(tmp_path / "ckpt")):
        assert text.startswith(CorruptCheckpointError.__name__)
        assert "model.safetensors" in text


def call_with_executor() -> None:
    build()
    with pytest.raises(ConfigError, match=r"write fleet\.save_persistables\(dirname\)"):
        fleet.save_persistables(object(), "ckpt")
    with pytest.raises(ConfigError, match=r"got \(NoneType\), expected a folder: write fleet"):
        fleet.save_persistables(None)  # type: ignore[arg-type]


def test_checkpoint_of_another_version_changes_nothing(tmp_path: Path) -> None:
    run_workers(save_after, 1, 1, str(tmp_path), 1)
    manifest = tmp_path / "manifest.json"
    document = msgspec.json.decode(manifest.read_bytes())
    manifest.write_bytes(msgspec.json.encode({**document, "version": VERSION + 1}))
    [(text, changed)] = run_workers(refused_load, 1, str(tmp_path))
    assert f"format version {VERSION + 1}, expected {VERSION}; use the Fleetlight" in text
    assert not changed


def refused_load(dirname: str) -> Any:
    model, _, _ = build(seed=3)
    before = [p.detach().clone() for p in model.parameters()]
    return error_text(CheckpointError, fleet.load_persistables, dirname), not all(
        map(torch.equal, before, model.parameters())
    )


def test_arguments_of_paddle_fleet_name_the_new_form() -> None:
    run_workers(call_with_executor, 1)


def gan(dirname: str, load: bool) -> Any:
    torch.manual_seed(0 if not load else 5)
    parts = [fleet.distributed_model(nn.Linear(3, 3)) for _ in range(2)]
    optimizers = [fleet.distributed_optimizer(torch.optim.Adam(p.parameters())) for p in parts]
    if load:
        fleet.load_persistables(dirname)
    else:
        for part, optimizer in zip(parts, optimizers, strict=True):
            part(torch.ones(2, 3)).sum().backward()
            optimizer.step()
        fleet.save_persistables(dirname)
    values = [p.detach().clone() for part in parts for p in part.parameters()]
    return values + [s["exp_avg"] for o in optimizers for s in o.state.values()]


def test_several_models_and_optimizers(tmp_path: Path) -> None:
    saved = run_workers(gan, 2, str(tmp_path / "ckpt"), False)
    loaded = run_workers(gan, 2, str(tmp_path / "ckpt"), True)
    assert len(saved[0]) == 8
    for one, other in zip(saved[0], loaded[1], strict=True):
        assert torch.equal(one, other)


def export_model(dirname: str) -> Any:
    model, optimizer, loader = build()
    train(2, model, optimizer, loader)
    fleet.save_inference_model(dirname, torch.ones(2, 5).double())
    fleet.barrier_worker()
    x = torch.arange(15).reshape(3, 5).double()
    with torch.no_grad():
        expected = model.eval()(x)
    return bool(torch.allclose(fleet.load_inference_model(dirname)(x), expected))


def test_exported_model_computes_the_same(tmp_path: Path) -> None:
    assert run_workers(export_model, 2, str(tmp_path / "model")) == [True, True]


# Copies of worker 0's checkpoint: sent in chunks; a failure on any side reaches all workers.


def copy_to_all(root: str) -> Any:
    """Worker i reads host<i>; returns the folder and the step of the checkpoint it uses."""
    index = fleet.worker_index()
    loading._CHUNK = 100  # so that every file takes several chunks
    largest = watch_chunks()
    own, copy = Path(root) / f"host{index}", Path(root) / f"copy{index}"
    found = loading.copy_checkpoint(current().group, str(own), copy)
    return Path(found).name, whole_step(found), max(largest)


def watch_chunks() -> list[int]:
    """The sizes of all messages that worker 0 broadcasts."""
    sizes, group = [0], current().group
    send = group.broadcast_bytes

    def watched(data: bytes, operation: str) -> bytes:
        received = send(data, operation)
        if not received.startswith(b"["):  # the list of names
            sizes.append(len(received))
        return received

    group.broadcast_bytes = watched  # type: ignore[method-assign]
    return sizes


def test_only_workers_without_the_checkpoint_get_a_chunked_copy(tmp_path: Path) -> None:
    checkpoint.write(tmp_path / "host0", snapshot(5, size=200))
    checkpoint.write(tmp_path / "host1", snapshot(3, size=200))
    (tmp_path / "host2").symlink_to("host0")
    answers = run_workers(copy_to_all, 3, str(tmp_path))
    assert [(name, step) for name, step, _ in answers] == [("host0", 5), ("copy1", 5), ("host2", 5)]
    assert {largest for _, _, largest in answers} == {100}
    assert not (tmp_path / "copy2").exists()


def test_shared_folder_is_not_copied(tmp_path: Path) -> None:
    checkpoint.write(tmp_path / "host0", snapshot(5))
    (tmp_path / "host1").symlink_to("host0")
    assert [a[0] for a in run_workers(copy_to_all, 2, str(tmp_path))] == ["host0", "host1"]


def copy_and_fail(root: str, vanishing: bool) -> Any:
    index = fleet.worker_index()
    if vanishing:
        # worker 0 has checked its files, then one of them vanishes
        found, gone = loading._found, Path(root, "generation-9/gone")
        loading._found = lambda *args: {**found(*args), "generation-9/gone": gone}
    copy = Path(root) / f"copy{index}"
    if not vanishing:
        copy.write_text("in the way")
    with pytest.raises(CheckpointError, match="could not be copied") as caught:
        loading.copy_checkpoint(current().group, f"{root}/host{index}", copy)
    return isinstance(caught.value, PeerError), str(caught.value)


@pytest.mark.parametrize("vanishing", [False, True], ids=["writing", "reading"])
def test_failure_on_one_worker_is_an_error_on_all(tmp_path: Path, vanishing: bool) -> None:
    checkpoint.write(tmp_path / "host0", snapshot(5))
    answers = run_workers(copy_and_fail, 2, str(tmp_path), vanishing)
    culprit = 0 if vanishing else 1
    for index, (consequence, text) in enumerate(answers):
        assert consequence is (index != culprit)
        assert text.startswith(f"on worker {culprit}: ") is (index != culprit)
        assert ("generation-9/gone" if vanishing else "copy1") in text
