# SPDX-License-Identifier: Apache-2.0
"""The examples of the page about serving run, with stand-ins for the other systems."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from tests.serve.target import DIM, TABLE, Target

PAGE = Path(__file__).parents[2] / "docs" / "serving.md"
#: by the first word that it has
EXAMPLES = {
    word: next(
        block
        for block in re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.M | re.S)
        if word in block
    )
    for word in ("def changes", "import redis", "import faiss", "triton_python_backend_utils")
}


class FakeRedis:
    """Strings by key, and pipelines."""

    def __init__(self) -> None:
        self.kept: dict[str, bytes] = {}

    def pipeline(self, transaction: bool) -> FakeRedis:
        return self

    def __enter__(self) -> FakeRedis:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def set(self, key: str, value: bytes) -> None:
        self.kept[key] = value

    def delete(self, key: str) -> None:
        self.kept.pop(key, None)

    def execute(self) -> None:
        pass


class FakeIndex:
    """Vectors by id."""

    def __init__(self, dim: int) -> None:
        self.dim = dim
        self.kept: dict[int, Any] = {}

    def remove_ids(self, ids: Any) -> None:
        for one in ids.tolist():
            self.kept.pop(one, None)

    def add_with_ids(self, rows: Any, ids: Any) -> None:
        assert rows.dtype == np.float32
        assert rows.shape == (len(ids), self.dim)
        self.kept.update(zip(ids.tolist(), rows, strict=True))


def published(folder: Path, table: str, form: str = "f32") -> Target:
    target = Target(folder, msgspec.structs.replace(TABLE, name=table, form=form))
    target.base({1: 1.0, 2: 2.0, 3: 3.0})
    # the file of one server has no change, and then none has one
    target.delta({3: 7.0}, removed=[1])
    target.delta({})
    return target


def run(monkeypatch: pytest.MonkeyPatch, word: str, **modules: Any) -> dict[str, Any]:
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    scope: dict[str, Any] = {"__name__": "example"}
    exec(EXAMPLES["def changes"], scope)
    exec(EXAMPLES[word], scope)
    return scope


@pytest.mark.parametrize("form", ["f32", "f16", "int8"])
def test_redis(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    target = published(tmp_path / "shared/rows", "ids", form)
    monkeypatch.chdir(tmp_path)
    redis: Any = ModuleType("redis")
    redis.Redis = FakeRedis
    kept = run(monkeypatch, "import redis", redis=redis)["store"].kept
    assert set(kept) == {f"ids:{one}" for one in target.expected}
    for one, value in target.expected.items():
        row = np.frombuffer(kept[f"ids:{one}"], np.float16 if form == "f16" else np.float32)
        assert np.allclose(row, [value] * DIM, atol=0.1)


def test_faiss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = published(tmp_path / "shared/rows", "items", "f16")
    monkeypatch.chdir(tmp_path)
    faiss: Any = ModuleType("faiss")
    faiss.IndexFlatIP, faiss.IndexIDMap2 = FakeIndex, lambda index: index
    index = run(monkeypatch, "import faiss", faiss=faiss)["index"]
    assert {one: row.tolist() for one, row in index.kept.items()} == {
        one: [value] * DIM for one, value in target.expected.items()
    }


def test_triton(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = published(tmp_path / "rows", "ids")
    backend: Any = ModuleType("triton_python_backend_utils")
    backend.get_input_tensor_by_name = lambda request, name: request[name]
    backend.Tensor = lambda name, value: SimpleNamespace(name=name, value=value)
    backend.InferenceResponse = list
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", backend)
    code = EXAMPLES["triton_python_backend_utils"]
    assert code.count('"/models/shared/rows"') == 1
    code = code.replace('"/models/shared/rows"', f"{str(target.folder)!r}, cache={str(tmp_path)!r}")
    scope: dict[str, Any] = {"__name__": "example"}
    exec(code, scope)
    model = scope["TritonPythonModel"]()
    model.initialize({})
    [[answer]] = model.execute([{"ids": SimpleNamespace(as_numpy=lambda: np.array([[3, 2]]))}])
    model.reader.close()
    assert answer.value.tolist() == [[[7.0] * DIM, [2.0] * DIM]]
