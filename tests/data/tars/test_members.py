# SPDX-License-Identifier: Apache-2.0
"""Headers of tars, against Python's tarfile, and what is no tar."""

import contextlib
import gzip
import io
import tarfile
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.data.tars.making import tar_bytes

from fleetlight.data.tars.members import TarMember, members
from fleetlight.data.tars.shard import key_of
from fleetlight.errors import DataError

FORMATS = {"ustar": tarfile.USTAR_FORMAT, "gnu": tarfile.GNU_FORMAT, "pax": tarfile.PAX_FORMAT}
names = st.lists(
    st.text(st.characters(codec="utf-8", exclude_characters="/\0"), min_size=1, max_size=60),
    min_size=1,
    max_size=5,
).map("/".join)


def found(data: bytes, *, is_whole: bool = True) -> list[TarMember]:
    def read(at: int, size: int) -> bytes:
        return data[at : at + size]

    return list(members(read, 0, len(data), "a.tar", is_whole=is_whole))


def contents(data: bytes) -> list[tuple[str, bytes]]:
    return [(one.name, data[one.start : one.stop]) for one in found(data)]


@given(
    st.lists(st.tuples(names, st.binary(max_size=1_500)), max_size=6),
    st.sampled_from(["gnu", "pax"]),
)
def test_members_are_those_of_tarfile(given: Sequence[tuple[str, bytes]], form: str) -> None:
    data = tar_bytes(given, format=FORMATS[form])
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        expected = [(info.name, tar.extractfile(info).read()) for info in tar]  # type: ignore[union-attr]
    # tarfile strips the slashes at the end of a name
    assert [(name.rstrip("/"), one) for name, one in contents(data)] == expected


@pytest.mark.parametrize("form", FORMATS)
def test_long_names_are_read(form: str) -> None:
    given = [("folder/" * 20 + "name.jpg", b"1" * 600), ("b.jpg", b"")]
    data = tar_bytes(given, format=FORMATS[form])
    assert contents(data) == given
    # extending headers belong to their member
    assert [one.header for one in found(data)] == [0, found(data)[0].end]


def test_folders_and_links_are_skipped() -> None:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as tar:
        for name, kind in (("a", tarfile.DIRTYPE), ("a/l.jpg", tarfile.SYMTYPE), ("h", b"1")):
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, "x"
            tar.addfile(info)
        tar.addfile(tarfile.TarInfo("a/b.jpg"))
    assert [one.name for one in found(file.getvalue())] == ["a/b.jpg"]


def test_large_sizes_are_read() -> None:
    info = tarfile.TarInfo("a.bin")
    info.size = 9 << 33
    header = info.tobuf(tarfile.GNU_FORMAT)
    with pytest.raises(DataError, match=f"'a.bin' at byte 0, which has {9 << 33} bytes"):
        found(header)


@pytest.mark.parametrize("left", [0, 100, 511, 512, 700, 1023, 1024, 1535])
def test_cut_off_tar_is_an_error(left: int) -> None:
    data = tar_bytes([("a.jpg", b"1" * 300), ("b.jpg", b"2" * 200)])
    with pytest.raises(DataError, match=f"a.tar: ends at byte {left}, expected .* is cut off"):
        found(data[:left])


def test_what_is_no_tar_is_an_error() -> None:
    data = tar_bytes([("a.jpg", b"1" * 300)])
    with pytest.raises(DataError, match=r"compressed with gzip, of which no part"):
        found(gzip.compress(data))
    with pytest.raises(DataError, match=r"got b'nonsense' at byte 0, expected a header"):
        found(b"nonsense" * 100)
    broken = bytearray(data)
    broken[3] ^= 1
    with pytest.raises(DataError, match="expected a header of a tar"):
        found(bytes(broken))


@given(st.binary(max_size=2_000), st.integers(0, 1_500), st.binary(max_size=40))
def test_damaged_tars_end_in_one_kind_of_error(noise: bytes, at: int, patch: bytes) -> None:
    data = bytearray(tar_bytes([("folder/" * 20 + "a.jpg", b"1" * 300)], format=tarfile.PAX_FORMAT))
    data[at : at + len(patch)] = patch
    for one in (noise, bytes(data)):
        with contextlib.suppress(DataError):
            found(one, is_whole=False)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("12.jpg", ("12", "jpg")),
        ("a.b/12.seg.PNG", ("a.b/12", "seg.png")),
        ("./a/12.cls", ("./a/12", "cls")),
        ("README", None),
        ("a/.hidden.jpg", None),
        ("__meta__.json", None),
    ],
)
def test_keys_end_at_the_first_point(name: str, expected: tuple[str, str] | None) -> None:
    assert key_of(name) == expected
