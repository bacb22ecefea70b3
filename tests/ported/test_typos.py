# SPDX-License-Identifier: Apache-2.0
"""A typo in any call of the ported programs gives an error with the intended name."""

import ast
import contextlib
import functools
import io
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.workers import run_workers

import fleetlight as fleet
from fleetlight import static

HERE = Path(__file__).parent
FOLDERS = ("quickstart", "multi_machine", "fleetx", "geosgd", "mindspore")
PROGRAMS = [
    file
    for file in sorted([*HERE.glob("wide_deep_model.py"), *HERE.glob("*/*.py")])
    if file.parent.name in (HERE.name, *FOLDERS) and not file.name.startswith("test_")
]
#: variables of the programs, and their objects
HELD = {
    **dict.fromkeys(("exe", "executor"), "executor"),
    **dict.fromkeys(("strategy", "dist_strategy"), "strategy"),
    **dict.fromkeys(("train_loader", "train_dataloader", "reader"), "loader"),
    "exec_strategy": "exec_strategy",
    "role": "role",
}
#: a name of a program: its owner, the name, and the keyword of the call, if any
Place = tuple[str, str, str]


@functools.cache
def object_of(kind: str) -> Any:
    """The object that a program's variable holds, or one of the two modules."""
    if kind == "loader":
        with static.program_guard(static.Program()):
            return static.bind([torch.ones(2, 3)], [static.data("x", [None, 3])])
    makers = {
        "executor": lambda: static.Executor("cpu"),
        "strategy": fleet.DistributedStrategy,
        "exec_strategy": static.ExecutionStrategy,
        "role": fleet.PaddleCloudRoleMaker,
    }
    return makers[kind]() if kind in makers else {"fleet": fleet, "static": static}[kind]


def names_in(node: ast.expr) -> list[str]:
    """`fleet.nn.SparseEmbedding` as names, the first one of a known variable; else none."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        return []
    first = node.id if node.id in ("fleet", "static") else HELD.get(node.id)
    return [] if first is None else [first, *reversed(names)]


def places_in(program: Path) -> Iterator[Place]:
    """All names of Fleetlight in a program, and the keywords of their calls."""
    for node in ast.walk(ast.parse(program.read_text())):
        if isinstance(node, ast.Attribute) and names_in(node):
            *owner, name = names_in(node)
            yield ".".join(owner), name, ""
        elif isinstance(node, ast.Call) and len(names_in(node.func)) > 1:
            *owner, name = names_in(node.func)
            yield from ((".".join(owner), name, one.arg) for one in node.keywords if one.arg)
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
            for owner in filter(None, map(names_in, node.targets)):
                for key in node.value.keys:
                    assert isinstance(key, ast.Constant)
                    yield owner[0], owner[1], str(key.value)


def misspelled(name: str) -> str:
    """The name without one letter, or a short name with one letter doubled."""
    middle = len(name) // 2
    return name + name[-1] if len(name) < 4 else name[:middle] + name[middle + 1 :]


PLACES = sorted({place for program in PROGRAMS for place in places_in(program)})


def as_python_shows(error: BaseException) -> str:
    """The last line that a user reads."""
    with contextlib.redirect_stderr(io.StringIO()) as shown:
        sys.__excepthook__(type(error), error, error.__traceback__)
    return shown.getvalue().strip().splitlines()[-1]


def do_misspelled(place: Place) -> None:
    """Uses the misspelled name."""
    owner, name, keyword = place
    first, *others = owner.split(".")
    value = functools.reduce(getattr, others, object_of(first))
    if keyword and isinstance(value, fleet.DistributedStrategy):
        setattr(value, name, {misspelled(keyword): 1})
    elif keyword:
        getattr(value, name)(**{misspelled(keyword): None})
    elif first.endswith("strategy") and name != "explain":
        setattr(value, misspelled(name), getattr(value, name))
    else:
        getattr(value, misspelled(name))


@pytest.mark.parametrize("place", PLACES, ids=lambda place: ".".join(filter(None, place)))
def test_a_typo_gives_the_intended_name(place: Place) -> None:
    with pytest.raises((AttributeError, TypeError, ValueError)) as caught:
        do_misspelled(place)
    last = as_python_shows(caught.value)
    right = place[2] or place[1]
    assert misspelled(right) in last
    assert "id you mean" in last, last
    assert f"'{right}'" in last, last


def test_the_programs_use_the_checked_variables() -> None:
    names = {".".join(filter(None, place)) for place in PLACES}
    assert len(names) > 60
    assert {
        "fleet.PaddleCloudRoleMaker.is_collective",
        "static.accuracy.label",
        "fleet.nn.SparseEmbeddingBag.initializer",
        "executor.run.fetch_list",
        "strategy.a_sync_configs.k_steps",
    } <= names


def misspell_minimize() -> str:
    """`minimize` exists only on an optimizer from `distributed_optimizer`."""
    parameters = torch.nn.Linear(1, 1).parameters()
    optimizer: Any = fleet.distributed_optimizer(torch.optim.SGD(parameters))
    assert callable(optimizer.minimize)
    with pytest.raises(AttributeError) as caught:
        optimizer.minimise(torch.ones(()))
    return as_python_shows(caught.value)


@pytest.mark.slow
def test_a_misspelled_minimize_gives_the_intended_name() -> None:
    assert "Did you mean: 'minimize'?" in run_workers(misspell_minimize, 1)[0]


@pytest.mark.parametrize(
    ("call", "wrong", "right"),
    [
        (fleet.init_server, "dirnam", "dirname"),
        (fleet.PaddleCloudRoleMaker, "is_colective", "is_collective"),
        (static.accuracy, "lable", "label"),
        (fleet.nn.SparseEmbedding, "initialiser", "initializer"),
        (fleet.nn.SparseEmbeddingBag, "combinr", "combiner"),
    ],
)
def test_keywords_of_other_programs_get_suggestions(call: Any, wrong: str, right: str) -> None:
    with pytest.raises(TypeError, match=rf"'{wrong}'; did you mean '{right}'"):
        call(**{wrong: 1})
