# SPDX-License-Identifier: Apache-2.0
"""What layers with tables record, and what is refused without servers."""

from typing import Any

import pytest
import torch
from tests.static.table_nets import written
from torch import Tensor, nn

import fleetlight as fleet
from fleetlight import static
from fleetlight.errors import ConfigError, PlanError
from fleetlight.static.writing import tables


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
