# SPDX-License-Identifier: Apache-2.0
"""MovieLens: the stars that users gave to films."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fleetlight.data.random_bits import key_of
from fleetlight.data.readers.files import find, plain_or_gzip, refuse_absent
from fleetlight.data.readers.lines import table_of
from fleetlight.data.readers.tables.fields import Fields
from fleetlight.data.records import TableDataset

_NAMES = ("user", "film", "stars", "time")
_FILES = ("ratings.csv", "ratings.dat", "u.data")
_FOLDERS = (".", "ml-latest-small", "ml-100k", "ml-1m", "ml-10M100K", "ml-20m", "ml-25m")
_SEPARATORS = (b",", b"::", b"\t")
_FIRST_COLUMN = b"userId"
#: of the stand-in
_USERS, _FILMS, _RATINGS, _FACTORS = 600, 2_000, 100_000, 4


class Rating(NamedTuple):
    """One rating; the tensors of a batch have one more dimension.

    Args:
        user: int64, as in the file.
        film: int64, as in the file.
        stars: float32, 0.5 to 5.
        time: int64, seconds since 1970.

    Example:
        >>> rating = fleet.data.MovieLens.parse([b"1,31,2.5,1260759144"])
        >>> rating.film, rating.stars
        (tensor([31]), tensor([2.5000]))
    """

    #: int64, as in the file
    user: Tensor
    #: int64, as in the file
    film: Tensor
    #: float32, 0.5 to 5
    stars: Tensor
    #: int64, seconds since 1970
    time: Tensor


class MovieLens(TableDataset[Rating]):
    r"""Ratings, in the order of the file.

    Reads a file, or `ratings.csv`, `ratings.dat` or `u.data` in `root` or in a folder there with a
    published name (`ml-100k`, `ml-1m`, ...).

    Args:
        root: the folder or the file.
        stand_in: True generates ratings where the files are absent.
        seed: the seed of generated ratings.

    Raises:
        DataError: the file is absent or damaged.

    Example:
        >>> from pathlib import Path
        >>> _ = Path("ratings.csv").write_text("userId,movieId,rating,timestamp\n1,31,2.5,9\n")
        >>> fleet.data.MovieLens("ratings.csv")[0].stars
        tensor(2.5000)
    """

    def __init__(
        self, root: str | os.PathLike[str], *, stand_in: bool = False, seed: int = 0
    ) -> None:
        path = find(Path(root), _FILES, _FOLDERS)
        if path is None:
            refuse_absent("MovieLens", Path(root), plain_or_gzip(_FILES), stand_in)
            super().__init__("MovieLens", _generated(seed), generated=True)
        else:
            super().__init__("MovieLens", table_of(path, MovieLens.parse, _is_header))

    @staticmethod
    def parse(lines: Sequence[bytes]) -> Rating:
        """The records of some lines, which all have the separator of the first one."""
        separator = next((mark for mark in _SEPARATORS if mark in lines[0]), b",")
        if len(separator) > 1:
            lines, separator = [line.replace(separator, b"\t") for line in lines], b"\t"
        fields = Fields.of(lines, separator, _NAMES)
        people = fields.only(["user", "film", "time"]).integers()
        stars = fields.only(["stars"]).numbers().squeeze(1).float()
        return Rating(people[:, 0], people[:, 1], stars, people[:, 2])


def _is_header(line: bytes) -> bool:
    return line.startswith(_FIRST_COLUMN)


def _generated(seed: int) -> Rating:
    """Generated ratings that a factor model can learn: user factors x film factors, and noise."""
    rng = np.random.default_rng(int(key_of(seed)))
    user_factors = rng.normal(size=(_USERS, _FACTORS))
    film_factors = rng.normal(size=(_FILMS, _FACTORS))
    users = rng.integers(_USERS, size=_RATINGS)
    # a few films have most of the ratings
    films = (_FILMS * rng.random(_RATINGS) ** 2).astype(np.int64)
    liking = (user_factors[users] * film_factors[films]).sum(1) / 2
    liking += 0.3 * rng.normal(size=_RATINGS)
    stars = np.clip(np.round(2 * (3.5 + liking)) / 2, 0.5, 5)
    columns = [users + 1, films + 1, stars.astype(np.float32), np.arange(_RATINGS)]
    return Rating(*map(torch.from_numpy, columns))
