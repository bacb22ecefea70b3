# SPDX-License-Identifier: Apache-2.0
"""Any bytes of a file read as a value or as an error of the package."""

import contextlib
import hashlib
import json
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.checkpoint.test_manifest import manifest
from tests.ps.made_tables import ALL, LR, make, ones, saved, some_ids
from tests.ps.serving import plan

from fleetlight.checkpoint.state.worker import WorkerState
from fleetlight.checkpoint.storage.manifest import Manifest, decode, encode
from fleetlight.errors import FleetError
from fleetlight.kernels import RULES
from fleetlight.ps.changes import Change
from fleetlight.ps.journal.folder import Folder, FolderIdentity
from fleetlight.ps.journal.history import history
from fleetlight.ps.journal.records import framed
from fleetlight.ps.journal.segment import Segment, segments
from fleetlight.ps.messages import EndPhase, Message
from fleetlight.ps.server.durability.durability import CODEC
from fleetlight.ps.tables.table_file import TableReader, columns_of
from fleetlight.ps.transport.protocol import MessageCodec
from fleetlight.roles.environment import from_environment
from fleetlight.security.certificate_folder import CLIENT, SERVER
from fleetlight.security.certificate_folder import CertificateFolder as Certificates
from fleetlight.strategy import DistributedStrategy

pytestmark = [pytest.mark.timeout(240), pytest.mark.slow]
ANY = settings(
    deadline=None,
    max_examples=200,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
#: memory of a read in addition to the file: error texts, parsers
_SPARE = 4 << 20
_EDGES: tuple[Any, ...] = (
    0,
    -1,
    3,
    1 << 31,
    1 << 62,
    1 << 64,
    1.5,
    "",
    "x",
    "\0",
    None,
    True,
    [],
    {},
    [[]],
    "e" * 400,
)


def mutated(valid: bytes) -> st.SearchStrategy[bytes]:
    """The bytes with some damage; at times any bytes."""
    bits = st.tuples(st.integers(0, len(valid) - 1), st.integers(0, 7))
    flipped = st.lists(bits, min_size=1, max_size=3).map(lambda where: _flipped(valid, where))
    ends = st.integers(0, len(valid))
    cut = ends.map(lambda end: valid[:end])
    moved = st.tuples(ends, ends).map(lambda at: valid[: at[0]] + valid[at[1] :])
    deep = st.sampled_from([b"[" * 3000, b'{"a":' * 3000, b"a=" + b"[" * 3000])
    grown = st.tuples(ends, st.binary(max_size=9) | deep).map(
        lambda put: valid[: put[0]] + put[1] + valid[put[0] :]
    )
    return st.one_of(flipped, flipped, cut, moved, grown, deep, st.binary(max_size=60))


def _flipped(valid: bytes, where: list[tuple[int, int]]) -> bytes:
    data = bytearray(valid)
    for at, bit in where:
        data[at] ^= 1 << bit
    return bytes(data)


def other_value(content: Any, data: st.DataObject) -> Any:
    """A document with one value changed."""
    content = json.loads(json.dumps(content))
    place, key = content, None
    while True:
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        key = data.draw(st.sampled_from(keys))
        inner = place[key]
        if not (isinstance(inner, (dict, list)) and inner) or data.draw(st.booleans()):
            break
        place = inner
    place[key] = data.draw(st.sampled_from(_EDGES))
    return content


@contextlib.contextmanager
def well(size: int) -> Iterator[None]:
    """A block that may raise only errors of the package and use little memory."""
    tracemalloc.start()
    try:
        with contextlib.suppress(FleetError):
            yield
        assert tracemalloc.get_traced_memory()[1] < 30 * size + _SPARE
    finally:
        tracemalloc.stop()


MANIFEST = encode(manifest())


@ANY
@given(mutated(MANIFEST))
def test_damaged_manifest(data: bytes) -> None:
    with well(len(data)):
        decode(data, Manifest, "f", Path("m"))


@ANY
@given(st.data())
def test_manifest_with_a_changed_value_and_valid_checksum(data: st.DataObject) -> None:
    content = other_value(json.loads(MANIFEST), data)
    content["checksum"] = "0" * 64
    body = json.dumps(content).encode()
    sealed = body.replace(b"0" * 64, hashlib.sha256(body).hexdigest().encode(), 1)
    with well(len(sealed)):
        decode(sealed, Manifest, "f", Path("m"))


@pytest.fixture(scope="module")
def table_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    table = make("adam")
    table.push(some_ids(20), ones(20), {**LR, "beta1": 0.9, "beta2": 0.9, "eps": 1e-8}, 0)
    folder = tmp_path_factory.mktemp("table")
    saved(table, folder)
    return folder / "t.safetensors"


def _read_table(path: Path) -> None:
    reader = TableReader(path)
    columns = columns_of(3, RULES["adam"], 0)
    make("adam").load([path], ALL)
    for column in columns:
        reader.width(column.name)


@ANY
@given(st.data())
def test_damaged_table_file(table_file: Path, tmp_path: Path, data: st.DataObject) -> None:
    whole = table_file.read_bytes()
    length = 8 + int.from_bytes(whole[:8], "little")
    path = tmp_path / "t.safetensors"
    if data.draw(st.booleans()):
        # its index is long and repetitive
        path.write_bytes(data.draw(mutated(whole[:length])) + whole[length:])
    else:
        header = json.dumps(other_value(json.loads(whole[8:length]), data)).encode()
        path.write_bytes(len(header).to_bytes(8, "little") + header + whole[length:])
    with contextlib.suppress(FleetError):
        _read_table(path)


STRATEGY = b"""a_sync = true
seed = 3
deadline_s = 20.5
[a_sync_configs]
k_steps = 5
[dgc_configs]
sparsity = [0.75, 0.9]
"""


@ANY
@given(mutated(STRATEGY))
def test_damaged_strategy_file(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "strategy.toml"
    path.write_bytes(data)
    with well(len(data)):
        DistributedStrategy.from_file(path)


@ANY
@given(
    st.sampled_from([name for name in vars(DistributedStrategy()) if not name.startswith("_")]),
    st.sampled_from(["", "a = ", "k_steps = ", "folder = "]),
    st.sampled_from(
        ["1", "-1", "1e400", "nan", '"x"', "[]", "{}", "[[1]]", "9" * 30, "1979-05-27"]
    ),
)
def test_strategy_file_with_a_wrong_value(
    tmp_path_factory: pytest.TempPathFactory, name: str, key: str, value: str
) -> None:
    path = tmp_path_factory.getbasetemp() / "strategy.toml"
    path.write_text(f"[{name}]\n{key}{value}\n" if key else f"{name} = {value}\n")
    with well(100):
        DistributedStrategy.from_file(path)


NAMES = (
    "FLEET_ROLE", "FLEET_INDEX", "FLEET_WORKER_NUM", "FLEET_MASTER", "FLEET_WORKER_ENDPOINTS",
    "FLEET_SERVER_ENDPOINTS", "FLEET_DEADLINE_S", "FLEET_RESUME", "RANK", "WORLD_SIZE",
    "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "PADDLE_TRAINER_ID", "PADDLE_TRAINERS_NUM",
    "PADDLE_TRAINER_ENDPOINTS", "PADDLE_PSERVERS_IP_PORT_LIST", "TRAINING_ROLE", "MS_ROLE",
    "MS_WORKER_NUM", "MS_SERVER_NUM", "MS_SCHED_HOST", "MS_SCHED_PORT", "MS_NODE_ID",
    "SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_JOB_ID", "SLURM_NODEID",
    "SLURM_LOCALID", "SLURM_JOB_NODELIST", "SLURM_STEP_TASKS_PER_NODE", "FLAGS_selected_gpus",
)  # fmt: skip


@ANY
@given(
    st.dictionaries(
        st.sampled_from(NAMES),
        st.text(max_size=20)
        | st.integers().map(str)
        | st.sampled_from(
            ["worker", "TRAINER", "MS_WORKER", "a:1,b:2", "[::1]:5", "n[1-9]", "0x1"]
        ),
    )
)
def test_arbitrary_environment(env: dict[str, str]) -> None:
    with well(100):
        from_environment(env)


RECORDS: MessageCodec[Message] = MessageCodec(Message)


def _journal() -> bytes:
    return b"".join(
        bytes(part)
        for number in range(1, 5)
        for part in framed(RECORDS, EndPhase(number), [np.arange(number)]).sealed(number)
    )


@ANY
@given(mutated(_journal()))
def test_damaged_journal(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    folder = tmp_path_factory.mktemp("journal")
    Segment(folder, 1).close()
    segments(folder)[0][1].write_bytes(data)
    with well(len(data)):
        found = [record.number for record in history(folder, RECORDS, 1, lambda text: None)]
        assert found == list(range(1, len(found) + 1))
    # changes of other kinds
    changes: MessageCodec[Change] = CODEC
    with contextlib.suppress(FleetError):
        list(history(folder, changes, 1, lambda text: None))


@ANY
@given(st.data())
def test_broken_fsync_marker(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    folder = tmp_path_factory.mktemp("journal")
    segment = Segment(folder, 1)
    segment.write([_journal()])
    segment.sync()
    segment.close()
    word = folder / "synced"
    word.write_bytes(data.draw(mutated(word.read_bytes())))
    # all files exist, with any content
    assert len(list(history(folder, RECORDS, 1, lambda text: None))) == 4


IDENTITY = FolderIdentity(server=0, server_num=2, job="j", plan=plan())


@ANY
@given(st.data())
@pytest.mark.parametrize("which", ["identity.json", "rows-00000000000000000001/manifest.json"])
def test_damaged_server_folder(
    tmp_path_factory: pytest.TempPathFactory, which: str, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("left")
    first = Folder.open(folder, IDENTITY)
    Segment(folder, 1).close()
    first.rows_folder(1).mkdir()
    first.complete(1, [])
    first.close()
    path = folder / which
    path.write_bytes(data.draw(mutated(path.read_bytes())))
    with well(path.stat().st_size):
        again = Folder.open(folder, IDENTITY)
        try:
            again.base()
        finally:
            again.close()


STATE = WorkerState(rank=1, values={"a": [1, 2.5], "b": {"c": None}}).to_bytes()


@ANY
@given(mutated(STATE))
def test_damaged_worker_state(data: bytes) -> None:
    with well(len(data)):
        WorkerState.from_bytes(data)


@ANY
@given(st.data())
@pytest.mark.parametrize("side", [SERVER, CLIENT])
def test_damaged_certificates(
    certificates: Path, tmp_path_factory: pytest.TempPathFactory, side: str, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("certificates")
    name = data.draw(st.sampled_from(["ca.pem", f"{side}.pem", f"{side}.key"]))
    for file in ("ca.pem", f"{side}.pem", f"{side}.key"):
        whole = (certificates / file).read_bytes()
        (folder / file).write_bytes(data.draw(mutated(whole)) if file == name else whole)
        (folder / file).chmod(0o600)
    with contextlib.suppress(FleetError):
        Certificates(folder, side).check()
