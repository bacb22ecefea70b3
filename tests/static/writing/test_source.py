# SPDX-License-Identifier: Apache-2.0
"""Garbage collection pauses while programs are written, and is restored after."""

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.static import kinds
from tests.static.nets import batch
from tests.static.table_nets import written
from torch import SymInt, Tensor, nn

import fleetlight as fleet
from fleetlight import static
from fleetlight.errors import ConfigError, PlanError
from fleetlight.static.writing import tables
from fleetlight.static.writing.source import no_gc


@pytest.fixture(autouse=True)
def enabled() -> Iterator[None]:
    gc.enable()
    yield
    gc.enable()


def test_collection_resumes_after_the_block_and_after_an_error() -> None:
    with no_gc():
        assert not gc.isenabled()
        with no_gc():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(RuntimeError), no_gc():
        raise RuntimeError
    assert gc.isenabled()


def test_disabled_collection_stays_disabled() -> None:
    gc.disable()
    with no_gc():
        assert not gc.isenabled()
    assert not gc.isenabled()


def test_a_capture_pauses_collection() -> None:
    seen = []

    def loss(output: Tensor, _: Tensor) -> Tensor:
        seen.append(gc.isenabled())
        return output.sum()

    model = nn.Linear(8, 3).double()
    static.capture(model, loss, torch.optim.SGD(model.parameters(), lr=0.1), batch(0))
    assert seen == [False]
    assert gc.isenabled()


# -- sizes are computed from the feeds, not from activations that would be kept for it ------------


@pytest.mark.slow
def test_sizes_are_computed_from_feeds() -> None:
    program = kinds.captured(kinds.of(kinds.KINDS["attention, dropout"]))
    sizes = [n for n in program.form.graph.nodes if isinstance(n.meta.get("val"), SymInt)]
    feeds = {"x", "y"}
    assert sizes
    for node in sizes:
        given = {source.name for source in node.all_input_nodes}
        assert given <= feeds or all(source in sizes for source in node.all_input_nodes), node
    # and each size once
    assert len({n.meta["val"].node.expr for n in sizes}) == len(sizes)


def test_a_size_of_two_dimensions_is_their_product() -> None:
    class Flattens(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            flat = (x * 2).flatten(0, 1)
            return flat.new_ones(flat.shape[0] + 1, 4)[1:] + flat

    program = static.capture(Flattens(), None, None, {"x": torch.ones(5, 3, 4)})
    executor = static.Executor()
    for size in (5, 2):
        (out,) = executor.run(program, {"x": torch.ones(size, 3, 4)}, ["output"])
        assert torch.equal(out, 3 * torch.ones(3 * size, 4))


# -- what layers with tables record, and what is refused without servers --------------------------


class Hashed(fleet.nn.SparseEmbedding):
    """Code around a lookup belongs to the program."""

    def forward(self, ids: Tensor, *more: Any) -> Tensor:
        return super().forward(ids % 5, *more) * 2


def test_writing_a_program_leaves_layers_unchanged() -> None:
    model = nn.ModuleDict({"a": Hashed(2), "b": nn.Embedding(4, 2, sparse=True)})
    model.forward = lambda x: model["a"](x) + model["b"](x)  # type: ignore[method-assign]
    before = [dict(layer.__dict__) for layer in model.values()]
    program = written(model, x=(5, 3))
    assert [dict(layer.__dict__) for layer in model.values()] == before
    assert [lookup.table for lookup in program.form.lookups] == ["a", "b"]
    names = [node.name for node in program.form.graph.nodes]
    assert names.index("remainder") < names.index("look_up") < names.index("mul")


def test_tables_have_the_names_that_servers_use() -> None:
    one, two, three = (fleet.nn.SparseEmbedding(2, table=t) for t in (None, "shared", "shared"))
    three.weight = one.weight
    model = nn.Sequential(one, two, three)
    lookups = [tables.Lookup(m, "rows", True, True) for m in model]
    # a shared weight decides before the name
    assert [lookup.table for lookup in tables.named(lookups, model)] == ["0", "shared", "0"]


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (
            fleet.nn.SparseEmbedding(2),
            r"^0: parameter servers store the rows of a SparseEmbedding, .* call fleet\.init\(\)",
        ),
        (
            fleet.nn.SparseEmbeddingBag(2),
            r"^0: parameter servers store the rows of a SparseEmbeddingBag",
        ),
        (nn.Embedding(9, 2, sparse=True), r"^0: a program has no .*Embedding.* sparse=False, or"),
        (nn.EmbeddingBag(9, 2, sparse=True), r"^0: .* of EmbeddingBag\(sparse=True\)"),
    ],
)
def test_training_tables_without_servers_is_refused(layer: nn.Module, message: str) -> None:
    model = nn.Sequential(layer)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs = {"x": torch.zeros(3, 2, dtype=torch.int64)}
    with pytest.raises(PlanError, match=message):
        static.capture(model, lambda out: out.sum(), optimizer, inputs)


@pytest.mark.parametrize("padding", [None, 2])
@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_sparse_layers_of_torch_evaluate_without_servers(kind: Any, padding: int | None) -> None:
    model = nn.Sequential(kind(9, 2, sparse=True, padding_idx=padding))
    x = torch.tensor([[1, 2, 2], [8, 8, 2]])
    program = static.capture(model, None, None, {"x": x})
    [found] = static.Executor().run(program, {"x": x}, ["output"])
    torch.testing.assert_close(found, model(x).detach())
    with pytest.raises(ConfigError, match="feed 'x' is missing"):
        static.Executor().run(program, {}, ["output"])
    with pytest.raises(ConfigError, match=r"^0: got id 9, expected 0 to 8; for ids of any size"):
        static.Executor().run(program, {"x": x + 1}, ["output"])


def test_a_table_that_is_not_open_names_the_missing_call() -> None:
    x = torch.zeros(3, 2, dtype=torch.int64)
    program = static.capture(nn.Sequential(fleet.nn.SparseEmbedding(2)), None, None, {"x": x})
    with pytest.raises(PlanError, match=r"^0: its table is not open yet; call fleet\.init_worker"):
        static.Executor().run(program, {"x": x}, ["output"])


def test_ids_are_whole_numbers_and_bags_have_bounds() -> None:
    for value, layer, message in (
        (torch.zeros(3, 2), fleet.nn.SparseEmbedding(2), r"got ids of type torch\.float32"),
        (torch.zeros(3, dtype=torch.int64), fleet.nn.SparseEmbeddingBag(2), "1 dimensions and no"),
    ):
        with pytest.raises(ConfigError, match=message):
            static.capture(layer, None, None, {"x": value})


def test_a_program_with_tables_is_not_saved_as_a_file(tmp_path: Any) -> None:
    program = written(nn.Sequential(fleet.nn.SparseEmbedding(2)), x=(3, 2))
    with pytest.raises(PlanError, match=r"^Program\.save: .* fleet\.save_persistables"):
        program.save(tmp_path / "program")


def test_an_unsplit_program_names_the_missing_call() -> None:
    with static.program_guard(static.Program()):
        out = fleet.nn.SparseEmbedding(2)(static.data("x", [None, 2], torch.int64))
        main = static.default_main_program()
    main.startup = None
    with pytest.raises(PlanError, match=r"optimizer\.minimize\(loss\).*clone\(for_test=True\)"):
        static.Executor().run(main, {"x": torch.zeros(1, 2, dtype=torch.int64)}, [out])


def test_summaries_do_not_call_tables_unused() -> None:
    program = written(nn.Sequential(fleet.nn.SparseEmbedding(2)), x=(3, 2)).clone(for_test=True)
    assert "unused" not in program.summary()
    assert "untrained" not in program.summary()
