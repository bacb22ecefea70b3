# SPDX-License-Identifier: Apache-2.0
"""Exported models whose rows and dense values come from a reader of publications."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fleetlight as fleet
from fleetlight.errors import CheckpointError, ConfigError, PlanError
from fleetlight.serve import Reader

IDS = torch.arange(60).view(20, 3)


class Scores(nn.Module):
    """An embedding, a bag, a buffer and a dense layer."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = fleet.nn.SparseEmbedding(4, padding_idx=5)
        self.bag = fleet.nn.SparseEmbeddingBag(4, "mean")
        self.norm = nn.BatchNorm1d(4)
        self.linear = nn.Linear(8, 1)

    def forward(self, ids: Tensor) -> Tensor:
        one, other = self.norm(self.emb(ids).mean(1)), self.bag(ids)
        out: Tensor = self.linear(torch.cat([one, other], dim=1))
        return out


@pytest.fixture(autouse=True)
def _left() -> Iterator[None]:
    yield
    fleet.reset()


def started(model: nn.Module) -> tuple[nn.Module, Any]:
    fleet.init()
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    model = fleet.distributed_model(model)
    optimizer = fleet.distributed_optimizer(optimizer)
    fleet.init_worker()

    def train() -> None:
        model.train()
        model(IDS + 7).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        model.eval()

    return model, train


@torch.no_grad()
def scores(model: nn.Module) -> Tensor:
    out: Tensor = model(IDS)
    return out


@pytest.mark.slow
@pytest.mark.parametrize(
    "form",
    ["program", pytest.param("compiled", marks=[pytest.mark.long, pytest.mark.timeout(400)])],
)
def test_each_call_has_rows_and_dense_values_of_one_publication(tmp_path: Path, form: str) -> None:
    model, train = started(Scores())
    publisher = fleet.publish(tmp_path / "rows", every_s=1e6)
    assert publisher is not None
    train()
    publisher.publish_now()
    fleet.save_inference_model(tmp_path / "program", IDS[:2], rows="reader", form=form)
    with Reader(tmp_path / "rows", cache=tmp_path / "cache", follow=False) as reader:
        served = fleet.load_inference_model(tmp_path / "program", reader=reader)
        first = served(IDS)
        assert torch.allclose(first, scores(model), atol=1e-6)
        for _ in range(3):
            train()
        publisher.publish_now()
        assert torch.equal(served(IDS), first)
        reader.refresh()
        assert not torch.allclose(served(IDS), first, atol=1e-3)
        assert torch.allclose(served(IDS), scores(model), atol=1e-6)
    # the program has neither rows nor a way to them of its own
    with pytest.raises(
        ConfigError, match=r"the rows of table 'emb' in .* come from a reader; load"
    ):
        fleet.load_inference_model(tmp_path / "program")
    fleet.stop_worker()


class Nested(nn.Module):
    """Its tables have a point in their names."""

    def __init__(self) -> None:
        super().__init__()
        self.part = Scores()

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.part(ids)
        return out


@pytest.mark.long
@pytest.mark.slow
def test_onnx_takes_rows_and_says_of_which_ids(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    model, train = started(Nested())
    publisher = fleet.publish(tmp_path / "rows", every_s=1e6)
    assert publisher is not None
    train()
    publisher.publish_now()
    fleet.save_inference_model(tmp_path / "program", IDS[:2], rows="reader", form="onnx")
    page = (Path(__file__).parents[4] / "docs/serving.md").read_text()
    [code] = re.findall(
        r"^```python\n(import json, pathlib\nimport onnx.*?)^```$", page, re.M | re.S
    )
    monkeypatch.chdir(tmp_path)
    with Reader(tmp_path / "rows", cache=tmp_path / "cache", follow=False) as reader:
        scope: dict[str, Any] = {"reader": reader, "inputs": {"ids": IDS.numpy()}}
        exec(code, scope)
    assert sorted(scope["rows"]) == ["rows.part.bag.1", "rows.part.emb.0"]
    assert torch.allclose(torch.from_numpy(scope["scores"]), scores(model), atol=1e-6)
    about = scope["model"].get_modelmeta().custom_metadata_map["fleetlight.lookups"]
    assert isinstance(scope["model"], onnxruntime.InferenceSession)
    assert [entry["table"] for entry in json.loads(about)] == ["part.emb", "part.bag"]
    with pytest.raises(ConfigError, match=r"has a model in ONNX; run model\.onnx there with onnx"):
        fleet.load_inference_model(tmp_path / "program")
    fleet.stop_worker()


@pytest.mark.slow
def test_a_part_of_a_model_is_served(tmp_path: Path) -> None:
    tower = nn.Sequential(fleet.nn.SparseEmbedding(4), nn.Linear(4, 2))
    _, train = started(nn.Sequential(tower, nn.Linear(2, 1)))
    publisher = fleet.publish(tmp_path / "rows", every_s=1e6)
    assert publisher is not None
    fleet.save_inference_model(tmp_path / "program", IDS[:2], tower, rows="reader")
    train()
    publisher.publish_now()
    with Reader(tmp_path / "rows", cache=tmp_path / "cache", follow=False) as reader:
        served = fleet.load_inference_model(tmp_path / "program", reader=reader)
        assert torch.allclose(served(IDS), scores(tower), atol=1e-6)
    fleet.stop_worker()


class Tied(nn.Module):
    """Two layers that share a weight; the program may know it by either name."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = fleet.nn.SparseEmbedding(4)
        self.one, self.other = nn.Linear(4, 4), nn.Linear(4, 4)
        self.other.weight = self.one.weight

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.one(self.other(self.emb(ids)))
        return out


@pytest.mark.slow
def test_tied_values_are_those_of_the_publication(tmp_path: Path) -> None:
    model, train = started(Tied())
    publisher = fleet.publish(tmp_path / "rows", every_s=1e6)
    assert publisher is not None
    fleet.save_inference_model(tmp_path / "program", IDS[:2], rows="reader")
    for _ in range(3):
        train()
    publisher.publish_now()
    with Reader(tmp_path / "rows", cache=tmp_path / "cache", follow=False) as reader:
        assert set(reader.dense) == {
            f"{n}.{m}" for n in ("one", "other") for m in ("weight", "bias")
        }
        served = fleet.load_inference_model(tmp_path / "program", reader=reader)
        assert torch.allclose(served(IDS), scores(model), atol=1e-6)
    fleet.stop_worker()


class Chained(nn.Module):
    """Looks up ids that depend on a row."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = fleet.nn.SparseEmbedding(4)

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.emb((self.emb(ids) > 0).long().sum(-1))
        return out


def test_lookups_that_depend_on_rows_are_refused(tmp_path: Path) -> None:
    started(Chained())
    with pytest.raises(CheckpointError, match=r"the ids of a lookup in table 'emb' .* depend on"):
        fleet.save_inference_model(tmp_path / "program", IDS, rows="reader")
    fleet.stop_worker()


@pytest.mark.slow
def test_a_reader_and_a_program_that_do_not_fit(tmp_path: Path) -> None:
    started(nn.Sequential(fleet.nn.SparseEmbedding(4)))
    publisher = fleet.publish(tmp_path / "rows", every_s=1e6)
    assert publisher is not None
    publisher.publish_now()
    fleet.save_inference_model(tmp_path / "whole", IDS)
    fleet.stop_worker()
    with Reader(tmp_path / "rows", cache=tmp_path / "cache", follow=False) as reader:
        with pytest.raises(ConfigError, match=r"got a reader, and .* has all its rows; load it"):
            fleet.load_inference_model(tmp_path / "whole", reader=reader)
        fleet.reset()
        started(nn.Sequential(fleet.nn.SparseEmbedding(8)))
        fleet.save_inference_model(tmp_path / "wider", IDS, rows="reader")
        with pytest.raises(ConfigError, match=r"rows of 8 in table '0', and publication 2 has row"):
            fleet.load_inference_model(tmp_path / "wider", reader=reader)
        fleet.stop_worker()
        fleet.reset()
        started(nn.Sequential(fleet.nn.SparseEmbedding(4), nn.Linear(4, 1)))
        fleet.save_inference_model(tmp_path / "dense", IDS, rows="reader")
        dense = fleet.load_inference_model(tmp_path / "dense", reader=reader)
        with pytest.raises(
            ConfigError, match=r"publication 2 has no '1\.weight', which the program"
        ):
            dense(IDS)
    fleet.stop_worker()


def test_layers_of_torch_are_refused(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Embedding(9, 2, sparse=True), nn.Flatten(), nn.Linear(6, 1))
    started(model)
    with pytest.raises(PlanError, match=r"table '0' is of a torch.nn.Embedding; use the layer of"):
        fleet.save_inference_model(tmp_path / "program", IDS % 9, rows="reader")
    fleet.stop_worker()
