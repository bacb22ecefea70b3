# SPDX-License-Identifier: Apache-2.0
"""`fleet.rows` reads the rows of an embedding, local or remote."""

from typing import Any

import pytest
import torch
from tests.served import SYNC, Member, run
from torch import nn

import fleetlight as fleet
from fleetlight.errors import ConfigError, PlanError
from fleetlight.fleet.public.rows import rows
from fleetlight.ps.layers.embedding import SparseEmbedding, SparseEmbeddingBag

IDS = torch.tensor([[1, 2], [2, 5]])


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.open = SparseEmbedding(3)
        self.bag = SparseEmbeddingBag(3)
        self.moved = nn.Embedding(9, 3, sparse=True)
        self.moved_bag = nn.EmbeddingBag(9, 3, sparse=True)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        rows = self.open(ids).sum(1) + self.moved(ids).sum(1)
        return (rows + self.bag(ids) + self.moved_bag(ids)).sum()


def built() -> Any:
    model = Net()
    return model, [torch.optim.Adagrad(model.parameters(), lr=0.5)]


def test_every_kind_of_layer_is_read_and_trained() -> None:
    def work(member: Member) -> None:
        model: Any = member.model
        model(IDS).backward()
        member.optimizer.step()
        member.optimizer.zero_grad()
        for layer in (model.open, model.moved, model.bag, model.moved_bag):
            with torch.no_grad():
                before = rows(layer, IDS)
            rows(layer, IDS).square().sum().backward()
            assert before.shape == (2, 2, 3)
            assert layer.weight.grad is not None
        member.optimizer.step()
        with torch.no_grad():
            torch.testing.assert_close(rows(model.open, IDS), model.open(IDS))
            assert not torch.equal(rows(model.open, IDS), before)

    run(built, work, SYNC, workers=1)


def test_moved_weight_is_refused_and_its_optimizer_state_dropped() -> None:
    def work(member: Member) -> None:
        model: Any = member.model
        weight = model.moved.weight
        model(IDS).backward()
        # torch's Adagrad creates state for each parameter at once
        assert model.open.weight not in member.optimizer.state
        assert weight not in member.optimizer.state
        with pytest.raises(PlanError, match=r"moved: torch\.Tensor\.square was called"):
            weight.square().sum()
        member.optimizer.step()

    run(built, work, SYNC, workers=1)


def test_rows_of_a_local_layer() -> None:
    layer = nn.Embedding(9, 3)
    fleet.rows(layer, IDS).sum().backward()
    assert layer.weight.grad is not None
    assert layer.weight.grad[:, 0].tolist() == [0, 1, 2, 0, 0, 1, 0, 0, 0]
    with pytest.raises(ConfigError, match="got a Linear"):
        fleet.rows(nn.Linear(1, 1), IDS)


def _gradient(layer: Any, read: Any) -> list[Any]:
    layer.weight.grad = None
    read(IDS).sum().backward()
    gradient: list[Any] = layer.weight.grad.tolist()
    return gradient


@pytest.mark.parametrize(
    "options", [{"padding_idx": 2}, {"scale_grad_by_freq": True}, {"max_norm": 0.1}]
)
def test_rows_respect_the_options_of_a_torch_layer(options: dict[str, Any]) -> None:
    layer = nn.Embedding(9, 3, **options)
    with torch.no_grad():
        read = fleet.rows(layer, IDS)
    torch.testing.assert_close(read, layer(IDS))
    assert _gradient(layer, lambda ids: fleet.rows(layer, ids)) == _gradient(layer, layer)


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_padding_is_not_trained_in_one_process_nor_in_a_job(kind: Any) -> None:
    plain = kind(9, 3, sparse=True, padding_idx=2)
    fleet.rows(plain, IDS).sum().backward()
    assert plain.weight.grad.to_dense()[:, 0].tolist() == [0, 1, 0, 0, 0, 1, 0, 0, 0]

    class One(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.emb = kind(9, 3, sparse=True, padding_idx=2)

    def built() -> Any:
        model = One()
        return model, [torch.optim.SGD(model.parameters(), lr=0.5)]

    def work(member: Member) -> None:
        layer: Any = member.model.emb
        rows(layer, IDS).sum().backward()
        [part] = layer.weight.grad.parts
        assert sorted(part.ids.tolist()) == [1, 5]

    run(built, work, SYNC, workers=1)
