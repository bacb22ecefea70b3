# SPDX-License-Identifier: Apache-2.0
"""Where compiled code is kept, and that it is found again."""

from __future__ import annotations

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

TELLS_WHEN_IT_WAITS = """
wait = compiled_files.Turn.wait
def telling(turn):
    print("waits", flush=True)
    return wait(turn)
compiled_files.Turn.wait = telling
"""


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A copy of the package with nothing compiled, in a folder of its own."""
    source = Path(fleetlight.__file__).parent
    ignore = shutil.ignore_patterns("__pycache__")
    for name in ("__init__.py", "errors.py", "version.py"):
        (tmp_path / "site" / "fleetlight").mkdir(parents=True, exist_ok=True)
        shutil.copy(source / name, tmp_path / "site" / "fleetlight" / name)
    for name in ("files", "kernels"):
        shutil.copytree(source / name, tmp_path / "site" / "fleetlight" / name, ignore=ignore)
    return tmp_path / "site"


def start(package: Path, before: str = "", **environment: str) -> subprocess.Popen[str]:
    """A process that compiles a kernel, or finds it compiled."""
    kept = {key: os.environ[key] for key in ("PATH",)}
    found = {**kept, "PYTHONPATH": str(package), "PYTHONDONTWRITEBYTECODE": "1", **environment}
    program = [sys.executable, "-c", PROGRAM.format(before)]
    return subprocess.Popen(program, env=found, stdout=subprocess.PIPE, text=True)


def told(process: subprocess.Popen[str]) -> tuple[str, int]:
    """Where it keeps its code, and whether it found the kernel there."""
    with process:
        try:
            said, _ = process.communicate(timeout=100)
        finally:
            process.kill()
    assert process.returncode == 0
    place, hits = said.rsplit(maxsplit=1)
    return place, int(hits)


def run(package: Path, before: str = "", **environment: str) -> tuple[str, int]:
    return told(start(package, before, **environment))


@pytest.fixture
def unwritable(package: Path) -> Path:
    """The package where no user, not even root, can make a folder of compiled code."""
    (package / "fleetlight" / "kernels" / "__pycache__").write_text("in the way")
    return package


def test_beside_the_sources_and_found_again(package: Path) -> None:
    place, hits = run(package)
    assert place.startswith(str(package / "fleetlight" / "kernels" / "__pycache__" / "kernels-"))
    assert hits == 0
    assert run(package) == (place, 1)


def test_at_home_when_the_sources_are_read_only(unwritable: Path, tmp_path: Path) -> None:
    place, _ = run(unwritable, HOME=str(tmp_path / "home"))
    assert place.startswith(str(tmp_path / "home" / ".cache" / "fleetlight" / "kernels-"))


def test_where_the_user_keeps_caches(unwritable: Path, tmp_path: Path) -> None:
    place, _ = run(unwritable, HOME=str(tmp_path / "home"), XDG_CACHE_HOME=str(tmp_path / "xdg"))
    assert place.startswith(str(tmp_path / "xdg" / "fleetlight" / "kernels-"))
    assert not (tmp_path / "home").exists()


@pytest.mark.parametrize("said", ["", "relative/cache"])
def test_only_a_whole_path_says_where_caches_are(
    unwritable: Path, tmp_path: Path, said: str
) -> None:
    place, _ = run(unwritable, HOME=str(tmp_path / "home"), XDG_CACHE_HOME=said)
    assert place.startswith(str(tmp_path / "home" / ".cache" / "fleetlight" / "kernels-"))


def test_in_an_own_temporary_folder_without_a_home(unwritable: Path, tmp_path: Path) -> None:
    place, _ = run(unwritable, HOME="/dev/null", TMPDIR=str(tmp_path))
    assert place.startswith(str(tmp_path / f"fleetlight-{os.getuid()}" / "kernels-"))
    assert (tmp_path / f"fleetlight-{os.getuid()}").stat().st_mode & 0o077 == 0


def test_code_of_others_is_not_loaded(unwritable: Path, tmp_path: Path) -> None:
    folder = tmp_path / f"fleetlight-{os.getuid()}"
    folder.mkdir()
    folder.chmod(0o777)
    assert run(unwritable, HOME="/dev/null", TMPDIR=str(tmp_path)) == ("None", 0)


@pytest.mark.parametrize("inner", [False, True])
def test_a_cache_that_others_can_write_to_is_not_used(
    unwritable: Path, tmp_path: Path, inner: bool
) -> None:
    cache = tmp_path / "cache"
    environment = {"XDG_CACHE_HOME": str(cache), "HOME": "/dev/null", "TMPDIR": str(tmp_path)}
    place, _ = run(unwritable, **environment)
    assert place.startswith(str(cache / "fleetlight" / "kernels-"))
    (cache / "fleetlight").chmod(0o755)
    assert run(unwritable, **environment) == (place, 1)
    (Path(place) if inner else cache / "fleetlight").chmod(0o777)
    refuge, hits = run(unwritable, **environment)
    assert refuge.startswith(str(tmp_path / f"fleetlight-{os.getuid()}" / "kernels-"))
    assert hits == 0


def test_folders_that_are_made_are_private_whatever_the_umask(
    unwritable: Path, tmp_path: Path
) -> None:
    before = os.umask(0o000)
    try:
        place, _ = run(unwritable, HOME=str(tmp_path / "home"))
    finally:
        os.umask(before)
    assert place.startswith(str(tmp_path / "home"))
    assert [p.stat().st_mode & 0o777 for p in (Path(place), Path(place).parent)] == [0o700] * 2


def test_other_sources_and_another_numba_have_another_folder(
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


def test_processes_take_turns(folder: Path) -> None:
    with Turn() as turn:
        assert not is_held(folder)
        assert turn.wait()
        assert is_held(folder)
        assert not turn.wait()
    assert not is_held(folder)


def test_a_turn_is_over_although_a_child_was_forked_in_it(folder: Path) -> None:
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


def test_a_process_that_never_ends_is_waited_for_once(folder: Path) -> None:
    with open(folder / "lock", "w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with Turn() as turn:
            assert turn.wait()
            turn._deadline = 0.0
            assert not turn.wait()
        with Turn() as turn:
            assert not turn.wait()
    # it has ended after all
    with Turn() as turn:
        assert turn.wait()
        assert is_held(folder)


def test_a_lock_that_cannot_be_opened_is_done_without(folder: Path) -> None:
    (folder / "lock").mkdir()
    with Turn() as turn:
        assert not turn.wait()


def test_who_comes_second_finds_the_code_of_the_first(package: Path) -> None:
    place = Path(run(package)[0])
    kept = place.rename(place.with_name("kept"))
    place.mkdir()
    with open(place / "lock", "w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        second = start(package, TELLS_WHEN_IT_WAITS)
        assert second.stdout is not None
        assert second.stdout.readline() == "waits\n"
        shutil.copytree(kept, place, dirs_exist_ok=True, ignore=lambda *_: ["lock"])
    assert told(second) == (str(place), 1)


def test_what_is_compiled_is_found_while_another_process_compiles(package: Path) -> None:
    place, _ = run(package)
    with open(Path(place, "lock"), "w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        assert run(package, before="compiled_files.LOCK_WAIT_S = 1e9") == (place, 1)


def test_without_any_folder_kernels_still_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_files, "place", lambda: None)
    with Turn() as turn:
        compiled_files.keep(None, True, turn)
        assert not turn.wait()
