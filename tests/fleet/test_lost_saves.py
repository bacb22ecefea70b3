# SPDX-License-Identifier: Apache-2.0
"""A server dies during a save: after its restart the checkpoint is complete."""

from pathlib import Path
from typing import Any

import pytest
from tests.fleet.served.tables.test_server_checkpoint import adam, equal, load, save, state, train
from tests.served import SYNC, Job, Member

from fleetlight import checkpoint
from fleetlight.checkpoint import FileTarget
from fleetlight.errors import CheckpointError, LostCheckpointError, PeerLostError
from fleetlight.fleet.served.tables.table_files import TableFiles


class DyingSave:
    """Replaces `TableFiles.save`: a server dies during the first call."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
        self.error: Exception | None = error
        self.calls = 0
        save = TableFiles.save

        def saved(files: TableFiles, target: FileTarget, *how: Any) -> Any:
            self.calls += 1
            error, self.error = self.error, None
            if error is not None:
                Path(target.location, "half-a-table").touch()
                if isinstance(error, CheckpointError):
                    # the restarted server does not know its earlier files
                    monkeypatch.setattr(files._client, "incarnations", lambda *lanes: [1, 2])
                raise error
            return save(files, target, *how)

        monkeypatch.setattr(TableFiles, "save", saved)


DURABLE = {**SYNC, "durability": "log"}
LOST = [PeerLostError("lost server 1"), CheckpointError("server 1 could not transfer table-0")]


@pytest.mark.parametrize("error", LOST)
def test_save_restarts_after_a_server_dies(
    tmp_path: Path, monkeypatch: Any, error: Exception, caplog: Any
) -> None:
    lost = DyingSave(monkeypatch, error)

    def work(member: Member) -> Any:
        train(member, range(4))
        at_the_call = state(member)
        save(member, tmp_path)
        train(member, range(4, 6))
        member.barrier()
        load(member, tmp_path)
        return at_the_call, state(member)

    job = Job(adam, DURABLE, workers=2, servers=2)
    for at_the_call, loaded in job.run(work):
        equal(at_the_call, loaded, atol=0)
    assert lost.calls == 2
    assert f"restarting the save into {tmp_path}: " in caplog.text
    assert str(error) in caplog.text
    checkpoint.read(tmp_path).verify()
    assert len(list(tmp_path.glob("generation-*"))) == 1
    assert not list(tmp_path.rglob("half-a-table"))
    assert [t._cut for s in job.servers for t in s._service.state.tables] == [None] * 4


@pytest.mark.parametrize("error", LOST)
def test_save_fails_when_no_server_restarts(
    tmp_path: Path, monkeypatch: Any, error: Exception
) -> None:
    DyingSave(monkeypatch, error)

    def work(member: Member) -> None:
        train(member, range(1))
        with pytest.raises(PeerLostError, match=str(error)):
            save(member, tmp_path)

    Job(adam, SYNC, workers=1, servers=2).run(work)


def test_next_save_replaces_one_lost_in_the_background(tmp_path: Path, monkeypatch: Any) -> None:
    lost = DyingSave(monkeypatch, LOST[0])

    def work(member: Member) -> None:
        train(member, range(2))
        save(member, tmp_path, background=True)
        train(member, range(2, 4))
        save(member, tmp_path, background=True)
        member.context.background_save.finish()
        assert checkpoint.read(tmp_path).manifest.step == 4
        # the last save has no successor
        lost.error = LOST[0]
        save(member, tmp_path, background=True)
        with pytest.raises(LostCheckpointError, match="failed in the background: lost server 1"):
            member.context.background_save.finish()

    Job(adam, DURABLE, workers=1, servers=2).run(work)
