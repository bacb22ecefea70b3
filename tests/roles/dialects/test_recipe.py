# SPDX-License-Identifier: Apache-2.0
"""A new dialect is one file with a `Dialect` named DIALECT."""

import sys
from pathlib import Path

import pytest

from fleetlight.errors import RoleError
from fleetlight.roles import dialects, environment

TOY = """
from fleetlight.roles.dialect import Dialect, Variables
from fleetlight.roles.role import Role


def _read(v: Variables) -> Role:
    return Role(dialect=v.dialect, index=v.number("TOY_RANK"), worker_num=v.number("TOY_SIZE"))


DIALECT = Dialect(
    name="TOY_*",
    precedence=9,
    reader=_read,
    marks=("TOY_RANK",),
    unstated=("server_num",),
    kept_from_children="TOY_.*",
)
"""
WORKER = {"TOY_RANK": "1", "TOY_SIZE": "2"}
OURS = {"FLEET_ROLE": "worker", "FLEET_WORKER_NUM": "2", "FLEET_MASTER": "a:1"}


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Add a file to the folder of dialects."""
    (tmp_path / "toy.py").write_text(TOY)
    monkeypatch.setattr(dialects, "__path__", [*dialects.__path__, str(tmp_path)])
    monkeypatch.delitem(sys.modules, f"{dialects.__name__}.toy", raising=False)


@pytest.mark.usefixtures("file")
def test_new_dialect_is_found_and_read() -> None:
    known = environment.find_dialects()
    assert [dialect.name for dialect in known] == [*(d.name for d in environment.DIALECTS), "TOY_*"]
    role = environment.from_environment(WORKER, known)
    assert (role.dialect, role.index, role.worker_num) == ("TOY_*", 1, 2)
    with pytest.raises(RoleError, match=r"TOY_\*: TOY_SIZE is not set"):
        environment.from_environment({"TOY_RANK": "1"}, known)
    assert environment.from_environment(WORKER).dialect == "single"


@pytest.mark.usefixtures("file")
def test_new_dialect_must_agree_with_the_others() -> None:
    known = environment.find_dialects()
    role = environment.from_environment(
        {**OURS, "FLEET_INDEX": "1", "FLEET_SERVER_NUM": "3", **WORKER}, known
    )
    # the lower precedence value wins; a missing variable is no contradiction
    assert (role.dialect, role.server_num) == ("FLEET_*", 3)
    with pytest.raises(RoleError, match=r"FLEET_\* has index=0, TOY_\* has index=1"):
        environment.from_environment({**OURS, "FLEET_INDEX": "0", **WORKER}, known)


@pytest.mark.usefixtures("file")
def test_fleetrun_removes_its_variables_for_children() -> None:
    assert environment.is_kept_from_children("TOY_RANK", environment.find_dialects())
    assert not environment.is_kept_from_children("TOY_RANK")
    assert not environment.is_kept_from_children("PATH", environment.find_dialects())


def test_order_of_precedence_is_unique() -> None:
    order = [dialect.precedence for dialect in environment.DIALECTS]
    assert order == sorted(set(order))
    assert [d.name.split("_")[0].split()[0] for d in environment.DIALECTS] == [
        *("FLEET", "torchrun", "PADDLE", "MS", "SLURM")
    ]
    assert [d.name for d in environment.DIALECTS if d.is_fallback] == ["SLURM_*"]
