# SPDX-License-Identifier: Apache-2.0
"""A loaded program runs bit for bit as the saved one."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from tests.checkpoint.states import described
from tests.errors import refuses
from tests.static.nets import accuracy, batch, captured, net
from torch import Tensor, nn

from fleetlight import static
from fleetlight.checkpoint.storage.manifest import encode
from fleetlight.errors import CheckpointError, ConfigError, CorruptCheckpointError
from fleetlight.static.files import saving
from fleetlight.static.files.document import Document, describe, form_of
from fleetlight.static.graph.fingerprint import fingerprint
from fleetlight.static.passes import Amp, GradientMerge, InsertAllReduce

pytestmark = pytest.mark.slow

OPTIMIZERS: list[Callable[..., torch.optim.Optimizer]] = [
    lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    lambda p: torch.optim.AdamW(p, lr=0.01),
    lambda p: torch.optim.Adagrad(p, lr=0.1, lr_decay=0.1),
    lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
    lambda p: torch.optim.Adadelta(p, lr=1.0),
]


def make_program(optimizer: Callable[..., torch.optim.Optimizer] = OPTIMIZERS[0]) -> static.Program:
    model = net()
    return captured(model, optimizer(model.parameters()))


def run_all(program: static.Program, numbers: range = range(4)) -> list[Tensor]:
    """Fetched values and the final state, over batches of several sizes."""
    executor, results = static.Executor(), []
    for number in numbers:
        feed = batch(number)
        torch.manual_seed(number)
        results += executor.run(program, feed, ["loss", "output", "accuracy"])
    return [*(a.clone() for a in results), *(slot.tensor.clone() for slot in program.state)]


def assert_same(one: list[Tensor], other: list[Tensor]) -> None:
    torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_loaded_program_continues_bit_for_bit(
    tmp_path: Path, optimizer: Callable[..., torch.optim.Optimizer]
) -> None:
    program = make_program(optimizer)
    run_all(program, range(2))
    program.save(tmp_path)
    loaded = static.load_program(tmp_path)
    assert_same(run_all(loaded), run_all(program))
    assert fingerprint(loaded.form) == fingerprint(program.form)


def test_a_loaded_program_has_its_own_state(tmp_path: Path) -> None:
    program = make_program()
    program.save(tmp_path)
    before = [slot.tensor.clone() for slot in program.state]
    first = static.load_program(tmp_path)
    run_all(first)
    assert_same([slot.tensor for slot in program.state], before)
    assert_same([slot.tensor for slot in static.load_program(tmp_path).state], before)
    assert [s.name for s in first.state] == [s.name for s in program.state]
    assert len(first.parameters()) == 6
    assert all(p.requires_grad for p in first.parameters())


ELSEWHERE = """
import sys, torch
from fleetlight import static
program, data = static.load_program(sys.argv[1]), torch.load(sys.argv[2])
torch.manual_seed(5)
answers = static.Executor().run(program, data, ["loss", "output"])
torch.save([*answers, *(slot.tensor.detach() for slot in program.state)], sys.argv[3])
assert "tests.static.nets" not in sys.modules

from tests.static.nets import captured, net
# tensors that came before give torch's sizes other names
captured(net(), None)
model = net()
captured(model, torch.optim.SGD(model.parameters(), 0.1, 0.9, 0, 0.01, True)).save(sys.argv[4])
"""


def files_of(path: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in sorted(path.glob("generation-*/*"))}


@pytest.mark.long
def test_another_process_runs_equally_and_writes_equal_bytes(tmp_path: Path) -> None:
    program, feed = make_program(), batch(1)
    program.save(tmp_path / "program")
    static.load_program(tmp_path / "program").save(tmp_path / "again")
    torch.save(feed, tmp_path / "batch")
    paths = [str(tmp_path / name) for name in ("program", "batch", "out", "there")]
    subprocess.run([sys.executable, "-c", ELSEWHERE, *paths], check=True, timeout=100)
    torch.manual_seed(5)
    results = static.Executor().run(program, feed, ["loss", "output"])
    expected = [*results, *(slot.tensor.detach() for slot in program.state)]
    assert_same(torch.load(tmp_path / "out"), expected)
    here, again, there = (files_of(tmp_path / name) for name in ("program", "again", "there"))
    assert set(here) == {"program.json", "state.safetensors"}
    assert here == again == there


def test_a_loaded_program_can_be_cloned_printed_and_rewritten(tmp_path: Path) -> None:
    program = make_program()
    run_all(program, range(2))
    program.save(tmp_path)
    loaded = static.load_program(tmp_path)
    assert str(loaded) == str(program)
    assert loaded.summary() == program.summary()
    assert loaded.explain() == "no passes"
    tests = [p.clone(for_test=True) for p in (loaded, program)]
    results = [static.Executor().run(p, batch(2), ["output", "loss"]) for p in tests]
    assert_same(*results)
    # passes use the shapes of values
    metas = [[n.meta.get("val") for n in p.form.graph.nodes] for p in (loaded, program)]
    for mine, theirs in zip(*metas, strict=True):
        if isinstance(theirs, Tensor):
            assert [str(s) for s in mine.stride()] == [str(s) for s in theirs.stride()] or any(
                isinstance(s, torch.SymInt) for s in mine.stride()
            )
            assert mine.dtype == theirs.dtype
    with pytest.raises(Exception, match="so it cannot be extended"):
        loaded.writable_source()


def test_a_loaded_program_explains_its_passes(tmp_path: Path) -> None:
    class Nothing:
        name = "nothing"

        def __call__(self, form: Any) -> Any:
            return form.rewritten(form.copied()[0], "nothing: 3 -> 3")

    program = make_program()
    program.passes = (Nothing(),)
    assert program.explain() == "nothing  nothing: 3 -> 3"
    program.save(tmp_path)
    loaded = static.load_program(tmp_path)
    assert loaded.explain() == "nothing: 3 -> 3"
    assert loaded.apply(Nothing()).explain() == "nothing: 3 -> 3\nnothing: 3 -> 3"


def test_merged_gradients_are_saved_and_reductions_are_not(tmp_path: Path) -> None:
    """Two of three backwards are accumulated; reductions need the other workers."""
    program, together = make_program(), make_program()
    program.passes = (Amp("float16", 8.0), GradientMerge(3))
    together.passes = (*program.passes, InsertAllReduce())
    run_all(program, range(2))
    for mine, theirs in zip(together.state, program.state, strict=True):
        mine.tensor.detach().copy_(theirs.tensor)
    together.save(tmp_path)
    loaded = static.load_program(tmp_path)
    assert loaded.form.schedule == program.form.schedule
    assert len(loaded.reports) == 2
    assert_same(run_all(loaded, range(2, 9)), run_all(program, range(2, 9)))


def test_learning_rates_are_saved_and_can_be_set(tmp_path: Path) -> None:
    model = net()
    groups = [{"params": list(model[0].parameters())}, {"params": list(model[4].parameters())}]
    optimizer = torch.optim.SGD(groups, lr=0.5)
    program = captured(model, optimizer)
    optimizer.param_groups[1]["lr"] = 0.125
    program.save(tmp_path)
    loaded = static.load_program(tmp_path)
    assert [s.tensor.item() for s in loaded.state if s.kind == "rate"] == [0.5, 0.125]
    for one in (loaded, program):
        one.set_learning_rate(0.25)
        one.set_learning_rate(0.0, group=1)
    assert [g["lr"] for g in optimizer.param_groups] == [0.25, 0.0]
    assert_same(run_all(loaded), run_all(program))
    saved = dict(zip([s.name for s in loaded.state], loaded.state, strict=True))
    torch.testing.assert_close(saved["4.bias"].tensor.detach(), net()[4].bias.detach())
    with pytest.raises(ConfigError, match="got group 2, expected one of this program: group 0, gr"):
        loaded.set_learning_rate(0.1, group=2)
    with pytest.raises(ConfigError, match="it has no optimizer"):
        static.capture(net(), None, None, {"x": batch(0)["x"]}).set_learning_rate(1.0)


class Odd(nn.Module):
    """Computed sizes, numbers that JSON lacks, tensors with unusual strides."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 4, dtype=torch.float64).t())
        self.frozen = nn.Parameter(torch.ones(1, dtype=torch.float64), requires_grad=False)
        self.register_buffer("empty", torch.empty(0, 3))
        self.other = nn.Parameter(torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, 4) @ self.weight
        masked = rows.masked_fill(rows < -1, float("-inf")).clamp(min=-2.0)
        back = masked.reshape(x.shape[0], x.shape[1], 6).sum(1) / x.shape[1]
        return back * self.frozen + torch.arange(x.shape[0], device=x.device)[:, None]


def odd(rows: int, columns: int) -> dict[str, Tensor]:
    torch.manual_seed(rows)
    return {"x": torch.randn(rows, columns, 4).double()}


def test_sizes_infinities_and_strides_are_restored(tmp_path: Path) -> None:
    main = static.Program()
    torch.manual_seed(0)
    model = Odd()
    optimizer = torch.optim.SGD([model.weight, model.other], lr=0.1)
    with static.program_guard(main):
        loss = model(static.data("x", [None, None, 4], torch.float64)).square().mean()
        static.minimize(optimizer, loss)
    static.Executor().run(main.startup)
    main.save(tmp_path)
    loaded = static.load_program(tmp_path)
    text = next(tmp_path.glob("*/program.json")).read_text()
    assert '{"float":"-inf"}' in text
    assert "x_1" in text
    state = {slot.name: slot.tensor for slot in loaded.state}
    assert state["weight"].stride() == (1, 4)
    assert not state["frozen"].requires_grad
    executor = static.Executor()
    for rows, columns in ((3, 5), (1, 2), (8, 1)):
        feed = odd(rows, columns)
        results = [executor.run(p, feed, ["loss"]) for p in (main, loaded)]
        assert_same(*results)
    assert "untrained" not in loaded.summary()
    assert "other: the program does not read them" in loaded.summary()


# -- files that were changed after the save


def rewritten(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Changes the graph and corrects its checksum, as an attacker would."""
    manifest = saving.read_manifest(path, saving.ProgramManifest, saving.FORMAT)
    file = path / f"generation-{manifest.generation:06d}" / saving.PROGRAM_FILE
    document = json.loads(file.read_text())
    change(document)
    file.write_text(json.dumps(document))
    files = [described(file) if f.name == file.name else f for f in manifest.files]
    (path / "manifest.json").write_bytes(encode(msgspec.structs.replace(manifest, files=files)))


HARMFUL = "x=print('harm') , y"


def operation(**changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda document: document["operations"][1].update(changes)


DAMAGES: list[tuple[Callable[[dict[str, Any]], None], str]] = [
    (
        operation(operation="os.system"),
        r"operation 1 \(addmm\): a program in a file may not have the operation 'os.system'",
    ),
    (operation(operation="aten.mm.out"), "cannot be computed by torch"),
    (operation(args=[{"node": "absent"}]), r"operation 1 \(addmm\) is damaged: 'absent'"),
    (operation(args=[{"dtype": "nn"}]), "torch has no dtype 'nn'"),
    (operation(args=[1, 2]), "addmm, value .* cannot be computed"),
    (operation(kwargs={HARMFUL: 1}), "is not a valid name of an argument"),
    (operation(part="elsewhere"), "is not a program: .*elsewhere"),
    (
        operation(value="float64[1]"),
        r"returns float64\[batch, 12\] with torch .* returned float64\[1\]",
    ),
    (operation(name="t"), "two values have the name 't'"),
    (lambda d: d.pop("feeds"), "is not a program: .*feeds"),
    (lambda d: d["feeds"][0].update(dtype="save"), "torch has no dtype 'save'"),
    (lambda d: d["feeds"][0].update(sizes=[1, 2, 3]), "is damaged"),
    (lambda d: d["state"][0].update(tensor="nothing"), "the state has no tensor 'nothing'"),
    (lambda d: d["state"][0].update(device="house"), "is damaged"),
    (lambda d: d["state"][0].update(strides=[-1]), "is damaged"),
    (lambda d: d["fetches"].update(loss="nothing"), "fetch 'loss' names the value 'nothing'"),
]


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("change", "message"), DAMAGES)
def test_a_forged_file_is_refused(
    tmp_path: Path, change: Callable[[dict[str, Any]], None], message: str
) -> None:
    make_program().save(tmp_path)
    rewritten(tmp_path, change)
    with pytest.raises(CheckpointError, match=rf"(?s)program\.json.*{message}"):
        static.load_program(tmp_path)


def test_names_of_values_never_become_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_program().save(tmp_path)

    def harm(document: dict[str, Any]) -> None:
        text = json.dumps(document).replace('"p_0_weight"', json.dumps(HARMFUL))
        document.update(json.loads(text.replace('"_log_softmax"', json.dumps(f"{HARMFUL}\nz"))))

    rewritten(tmp_path, harm)
    run_all(static.load_program(tmp_path))
    assert capsys.readouterr().out == ""


def state_file(path: Path) -> Path:
    return next(path.glob("*/state.safetensors"))


def graph_file(path: Path) -> Path:
    return next(path.glob("*/program.json"))


@pytest.mark.parametrize("which", [state_file, graph_file])
def test_damaged_files_are_named(tmp_path: Path, which: Callable[[Path], Path]) -> None:
    make_program().save(tmp_path)
    file, data = which(tmp_path), which(tmp_path).read_bytes()
    file.write_bytes(data[:-9])
    with pytest.raises(CorruptCheckpointError, match=f"{file.name} was truncated"):
        static.load_program(tmp_path)
    file.write_bytes(data[:-9] + b"x" * 9)
    with pytest.raises(CorruptCheckpointError, match=f"{file.name} was changed"):
        static.load_program(tmp_path)
    file.unlink()
    with pytest.raises(CorruptCheckpointError, match=f"{file.name} is missing"):
        static.load_program(tmp_path)


def test_other_versions_and_directories_are_refused(tmp_path: Path) -> None:
    program = make_program()
    program.save(tmp_path)
    manifest = tmp_path / "manifest.json"
    manifest.write_bytes(manifest.read_bytes().replace(b'"version": 1', b'"version": 9'))
    with refuses(CheckpointError, "manifest.json has format version 9, expected 1; use"):
        static.load_program(tmp_path)
    with pytest.raises(CheckpointError, match="no such directory"):
        static.load_program(tmp_path / "nowhere")
    manifest.write_bytes(manifest.read_bytes().replace(b"fleetlight-program", b"other"))
    with pytest.raises(CheckpointError, match="got format 'other', expected 'fleetlight-program'"):
        static.load_program(tmp_path)
    with pytest.raises(CheckpointError, match="would destroy something else"):
        program.save(tmp_path)


def test_a_failed_save_keeps_the_previous_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = make_program()
    program.save(tmp_path)
    before = [slot.tensor.clone() for slot in program.state]
    run_all(program)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(saving, "write_tensors", full)
    with pytest.raises(CheckpointError, match="No space left on device; generation 1 there is int"):
        program.save(tmp_path)
    assert_same([slot.tensor for slot in static.load_program(tmp_path).state], before)


def test_shared_memory_is_refused_before_writing(tmp_path: Path) -> None:
    class Halves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            whole = torch.zeros(4)
            self.register_buffer("whole", whole)
            self.register_buffer("rest", whole[2:])

        def forward(self, x: Tensor) -> Tensor:
            self.rest.add_(1)
            return x + self.whole

    program = static.capture(Halves(), None, None, {"x": torch.ones(2, 4)})
    with pytest.raises(CheckpointError, match=r"'buffer whole' and 'buffer rest' .* share mem"):
        program.save(tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_foreign_operations_are_refused_when_saving(tmp_path: Path) -> None:
    program = make_program()
    graph, _ = program.form.copied()
    next(n for n in graph.nodes if n.op == "call_function").target = torch.load
    strange = program.apply(lambda form: form.rewritten(graph, "strange"))  # type: ignore[arg-type]
    with refuses(CheckpointError, "t: a program in a file may not have the operation 'load'"):
        strange.save(tmp_path)


def test_a_document_restores_the_form() -> None:
    document, tensors = describe(make_program().form)
    text = msgspec.json.encode(document)
    again, _ = describe(form_of(msgspec.json.decode(text, type=Document), tensors))
    assert msgspec.json.encode(again) == text
    assert accuracy.__name__ in document.fetches


def test_the_weight_of_the_last_batch_is_not_saved(tmp_path: Path) -> None:
    program = make_program()
    (weight,) = (slot for slot in program.state if slot.kind == "weight")
    weight.tensor.fill_(0.25)
    program.save(tmp_path)
    (loaded,) = (s for s in static.load_program(tmp_path).state if s.kind == "weight")
    assert loaded.tensor.item() == 1
    assert weight.tensor.item() == 0.25
