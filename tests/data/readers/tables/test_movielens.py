# SPDX-License-Identifier: Apache-2.0
"""MovieLens in its three formats."""

from pathlib import Path

import pytest
import torch

from fleetlight.data import FileStream, MovieLens
from fleetlight.errors import DataError

FORMS = {
    "ml-100k/u.data": "196\t242\t3\t881250949\n186\t302\t4\t891717742\n",
    "ml-1m/ratings.dat": "196::242::3::881250949\n186::302::4::891717742\n",
    "ratings.csv": "userId,movieId,rating,timestamp\n196,242,3.0,881250949\n186,302,4,891717742\n",
}


@pytest.mark.parametrize("name", FORMS)
def test_all_three_formats_are_read(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(FORMS[name])
    ratings = MovieLens(tmp_path).columns
    assert [column.tolist() for column in ratings] == [
        *([196, 186], [242, 302], [3.0, 4.0], [881250949, 891717742])
    ]
    assert [column.dtype for column in ratings] == [
        *(torch.int64, torch.int64, torch.float32, torch.int64)
    ]


def test_ratings_can_be_streamed(tmp_path: Path) -> None:
    (tmp_path / "r.csv").write_text(FORMS["ratings.csv"])
    (batch,) = FileStream(tmp_path / "r.csv", MovieLens.parse, header=1).loader(10)
    assert batch.film.tolist() == [242, 302]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ("1\t2\t3\n", "got 3 fields between .*, expected 4: user to time"),
        ("1\tx\t3\t4\n", "got 'x' as film, expected a whole number"),
        ("1\t2\tmany\t4\n", "got 'many' as stars, expected a number"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, bad: str, message: str) -> None:
    path = tmp_path / "u.data"
    path.write_text(FORMS["ml-100k/u.data"] + bad)
    with pytest.raises(DataError, match=rf"u\.data, line 3: {message}"):
        MovieLens(path)


def test_the_stand_in_can_be_learned(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"ratings\.csv or ratings\.dat or u\.data"):
        MovieLens(tmp_path)
    data = MovieLens(tmp_path, stand_in=True)
    assert data.generated
    user, film, stars, _ = data.columns
    assert set((2 * stars).tolist()) == set(range(1, 11))
    # users differ in taste, so the first factors of the ratings are stronger than chance
    table = torch.zeros(int(user.max()) + 1, int(film.max()) + 1)
    table[user, film] = stars - stars.mean()
    strengths = torch.linalg.svdvals(table)
    assert strengths[3] > 1.5 * strengths[4]
