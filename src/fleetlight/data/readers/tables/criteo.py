# SPDX-License-Identifier: Apache-2.0
"""Criteo's click logs: a label, 13 counts and 26 categories, separated by tabs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from fleetlight.data.generated.tables import ClickLog
from fleetlight.data.readers.files import find, plain_or_gzip, refuse_absent
from fleetlight.data.readers.lines import table_of
from fleetlight.data.readers.tables.fields import Fields
from fleetlight.data.records import Record, TableDataset
from fleetlight.errors import DataError

COUNTS = tuple(f"I{i}" for i in range(1, 14))
CATEGORIES = tuple(f"C{i}" for i in range(1, 27))
NAMES = ("label", *COUNTS, *CATEGORIES)
_FILES = ("train.txt", "day_0", "part-0")
_STAND_IN_RECORDS = 100_000


class Criteo(TableDataset[Record]):
    r"""Clicks: 13 counts as `sign(x) log(1 + |x|)` (missing: 0), 26 ids, label 0 or 1.

    Reads a file, or `train.txt`, `day_0` or `part-0` in the folder `root`, into memory: 268 bytes
    for each record. `fleet.data.criteo` reads files larger than memory.
    An id is `stable_hash(text, salt="C1")`, with its column's name; a missing value has an id too.

    Args:
        root: the folder or the file.
        stand_in: True generates records where the files are absent.
        seed: the seed of generated records.

    Raises:
        DataError: the file is absent or damaged.

    Example:
        >>> from pathlib import Path
        >>> line = "1\t" + "\t".join(["5"] * 13 + ["68fd1e64"] * 26) + "\n"
        >>> _ = Path("train.txt").write_text(line)
        >>> clicks = fleet.data.Criteo("train.txt")
        >>> len(clicks), clicks[0].label
        (1, tensor(1.))
    """

    def __init__(
        self, root: str | os.PathLike[str], *, stand_in: bool = False, seed: int = 0
    ) -> None:
        path = find(Path(root), _FILES)
        if path is None:
            refuse_absent("Criteo", Path(root), plain_or_gzip(_FILES), stand_in)
            log = ClickLog(_STAND_IN_RECORDS, seed=seed)
            super().__init__("Criteo", log.batch(range(len(log))), generated=True)
        else:
            super().__init__("Criteo", table_of(path, Criteo.parse))

    @staticmethod
    def parse(lines: Sequence[bytes]) -> Record:
        """The records of some lines."""
        fields = Fields.of(lines, b"\t", NAMES)
        label = fields[:1].numbers().squeeze(1)
        if len(wrong := label[(label != 0) & (label != 1)]):
            raise DataError(f"got the label {wrong[0]:g}, expected 0 or 1")
        counts = fields[1:14].numbers(missing=0)
        return Record(scaled(counts).float(), fields[14:].ids(), label.float())


def scaled(counts: Tensor) -> Tensor:
    """Counts as numbers of about 1."""
    return counts.sign() * counts.abs().log1p()
