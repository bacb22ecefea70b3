# SPDX-License-Identifier: Apache-2.0
"""The folder of compiled kernels: its place, its permissions and its lock."""

import fcntl
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numba
import pytest

import fleetlight
from fleetlight.kernels.compiling import compiled_files
from fleetlight.kernels.compiling.compiled_files import Turn

pytestmark = pytest.mark.slow

PROGRAM = """
from fleetlight.kernels.compiling import compiled_files
from fleetlight.kernels.ids import hashing
{}
hashing.splitmix64([1, 2])
dispatcher = hashing._hash._ready
print(compiled_files.place(), sum(dispatcher.stats.cache_hits.values()))
"""

PRINTS_WHEN_IT_WAITS = """
wait = compiled_files.Turn.wait
def printing(turn):
    print("waits", flush=True)
    return wait(turn)
compiled_files.Turn.wait = printing
"""


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A copy of the package without compiled code."""
    source = Path(fleetlight.__file__).parent
    ignore = shutil.ignore_patterns("__pycache__")
    for name in ("__init__.py", "errors.py", "version.py", "wording.py"):
        (tmp_path / "site" / "fleetlight").mkdir(parents=True, exist_ok=True)
        shutil.copy(source / name, tmp_path / "site" / "fleetlight" / name)
    for name in ("files", "kernels"):
        shutil.copytree(source / name, tmp_path / "site" / "fleetlight" / name, ignore=ignore)
    return tmp_path / "site"


def start(package: Path, before: str = "", **environment: str) -> subprocess.Popen[str]:
    """Start a process that compiles a kernel or loads its code."""
    kept = {key: os.environ[key] for key in ("PATH",)}
    found = {**kept, "PYTHONPATH": str(package), "PYTHONDONTWRITEBYTECODE": "1", **environment}
    program = [sys.executable, "-c", PROGRAM.format(before)]
    return subprocess.Popen(program, env=found, stdout=subprocess.PIPE, text=True)


def result(process: subprocess.Popen[str]) -> tuple[str, int]:
    """Return the folder of the process and its cache hits."""
    with process:
        try:
            said, _ = process.communicate(timeout=100)
        finally:
            process.kill()
    assert process.returncode == 0
    place, hits = said.rsplit(maxsplit=1)
    return place, int(hits)


def run(package: Path, before: str = "", **environment: str) -> tuple[str, int]:
    return result(start(package, before, **environment))


@pytest.fixture
def unwritable(package: Path) -> Path:
    """The package, whose folder of compiled code not even root can create."""
    (package / "fleetlight" / "kernels" / "__pycache__").write_text("in the way")
    return package


def test_code_is_stored_beside_the_sources_and_reused(package: Path) -> None:
    place, hits = run(package)
    assert place.startswith(str(package / "fleetlight" / "kernels" / "__pycache__" / "kernels-"))
    assert hits == 0
    assert run(package) == (place, 1)


@pytest.mark.long
def test_code_is_stored_at_home_if_the_sources_are_read_only(
    unwritable: Path, tmp_path: Path
) -> None:
    place, _ = run(unwritable, HOME=str(tmp_path / "home"))
    assert place.startswith(str(tmp_path / "home" / ".cache" / "fleetlight" / "kernels-"))


@pytest.mark.long
def test_code_is_stored_in_xdg_cache_home(unwritable: Path, tmp_path: Path) -> None:
    place, _ = run(unwritable, HOME=str(tmp_path / "home"), XDG_CACHE_HOME=str(tmp_path / "xdg"))
    assert place.startswith(str(tmp_path / "xdg" / "fleetlight" / "kernels-"))
    assert not (tmp_path / "home").exists()


@pytest.mark.long
@pytest.mark.parametrize("said", ["", "relative/cache"])
def test_relative_xdg_cache_home_is_ignored(unwritable: Path, tmp_path: Path, said: str) -> None:
    place, _ = run(unwritable, HOME=str(tmp_path / "home"), XDG_CACHE_HOME=said)
    assert place.startswith(str(tmp_path / "home" / ".cache" / "fleetlight" / "kernels-"))


@pytest.mark.long
def test_code_is_stored_in_a_private_temporary_folder_without_home(
    unwritable: Path, tmp_path: Path
) -> None:
    place, _ = run(unwritable, HOME="/dev/null", TMPDIR=str(tmp_path))
    assert place.startswith(str(tmp_path / f"fleetlight-{os.getuid()}" / "kernels-"))
    assert (tmp_path / f"fleetlight-{os.getuid()}").stat().st_mode & 0o077 == 0


@pytest.mark.long
def test_temporary_folder_that_others_can_write_is_not_used(
    unwritable: Path, tmp_path: Path
) -> None:
    folder = tmp_path / f"fleetlight-{os.getuid()}"
    folder.mkdir()
    folder.chmod(0o777)
    assert run(unwritable, HOME="/dev/null", TMPDIR=str(tmp_path)) == ("None", 0)


@pytest.mark.long
@pytest.mark.parametrize("inner", [False, True])
def test_cache_that_others_can_write_is_not_used(
    unwritable: Path, tmp_path: Path, inner: bool
) -> None:
    cache = tmp_path / "cache"
    environment = {"XDG_CACHE_HOME": str(cache), "HOME": "/dev/null", "TMPDIR": str(tmp_path)}
    place, _ = run(unwritable, **environment)
    assert place.startswith(str(cache / "fleetlight" / "kernels-"))
    (cache / "fleetlight").chmod(0o755)
    assert run(unwritable, **environment) == (place, 1)
    (Path(place) if inner else cache / "fleetlight").chmod(0o777)
    fallback, hits = run(unwritable, **environment)
    assert fallback.startswith(str(tmp_path / f"fleetlight-{os.getuid()}" / "kernels-"))
    assert hits == 0


@pytest.mark.long
def test_new_folders_are_private_under_any_umask(unwritable: Path, tmp_path: Path) -> None:
    before = os.umask(0o000)
    try:
        place, _ = run(unwritable, HOME=str(tmp_path / "home"))
    finally:
        os.umask(before)
    assert place.startswith(str(tmp_path / "home"))
    assert [p.stat().st_mode & 0o777 for p in (Path(place), Path(place).parent)] == [0o700] * 2


def test_folder_depends_on_the_sources_and_the_numba_version(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(compiled_files, "_SOURCES", tmp_path)
    seen = set()
    for text, version in (("one", "1.0"), ("two", "1.0"), ("two", "2.0")):
        (tmp_path / "kernel.py").write_text(text)
        monkeypatch.setattr(numba, "__version__", version)
        seen.add(compiled_files._stamp.__wrapped__())
    assert len(seen) == 3


def is_held(folder: Path) -> bool:
    with open(folder / "lock", "a") as other:
        try:
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr(compiled_files, "place", lambda: tmp_path)
    monkeypatch.setattr(Turn, "_has_given_up", False)
    return tmp_path


def test_a_turn_holds_the_lock_only_after_it_waits(folder: Path) -> None:
    with Turn() as turn:
        assert not is_held(folder)
        assert turn.wait()
        assert is_held(folder)
        assert not turn.wait()
    assert not is_held(folder)


def test_turn_ends_although_a_forked_child_runs(folder: Path) -> None:
    script = f"""
import os, pathlib
from fleetlight.kernels.compiling import compiled_files
compiled_files.place = lambda: pathlib.Path({str(folder)!r})
with compiled_files.Turn() as turn:
    turn.wait()
    if os.fork() == 0:
        input()
        os._exit(0)
print("over", flush=True)
"""
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"over\n"
        assert not is_held(folder)
        process.communicate(b"\n", timeout=60)


def test_a_lock_that_is_never_released_times_out_only_once(folder: Path) -> None:
    with open(folder / "lock", "w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with Turn() as turn:
            assert turn.wait()
            turn._deadline = 0.0
            assert not turn.wait()
        with Turn() as turn:
            assert not turn.wait()
    # the lock is released after all
    with Turn() as turn:
        assert turn.wait()
        assert is_held(folder)


def test_turn_works_without_a_lock_that_cannot_be_opened(folder: Path) -> None:
    (folder / "lock").mkdir()
    with Turn() as turn:
        assert not turn.wait()


@pytest.mark.long
def test_waiting_process_loads_the_code_of_the_first(package: Path) -> None:
    place = Path(run(package)[0])
    kept = place.rename(place.with_name("kept"))
    place.mkdir()
    with open(place / "lock", "w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        second = start(package, PRINTS_WHEN_IT_WAITS)
        assert second.stdout is not None
        assert second.stdout.readline() == "waits\n"
        shutil.copytree(kept, place, dirs_exist_ok=True, ignore=lambda *_: ["lock"])
    assert result(second) == (str(place), 1)


@pytest.mark.long
def test_cached_code_is_loaded_while_another_process_compiles(package: Path) -> None:
    place, _ = run(package)
    with open(Path(place, "lock"), "w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        assert run(package, before="compiled_files.LOCK_WAIT_S = 1e9") == (place, 1)


def test_turn_and_keep_work_without_a_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_files, "place", lambda: None)
    with Turn() as turn:
        compiled_files.keep(None, True, turn)
        assert not turn.wait()
