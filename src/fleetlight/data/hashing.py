# SPDX-License-Identifier: Apache-2.0
"""Ids of texts, the same in every process, run and machine, unlike Python's `hash`."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fleetlight.data.random_bits import Bits, key_of, only
from fleetlight.errors import ConfigError
from fleetlight.kernels.ids.hashing import mix

_WORD = 8
#: keeps the first n bytes of a little-endian word
_KEEP = np.array([2 ** (8 * n) - 1 for n in range(_WORD + 1)], np.uint64)
#: the key with which salts are hashed
_SALT_KEY = key_of(1)


def stable_hash(texts: Iterable[str | bytes], salt: str = "") -> Tensor:
    """An int64 id for each text, of the whole range, so also negative.

    A text has a different id for each `salt`. A str has the id of its UTF-8 bytes.

    Args:
        texts: str or bytes.
        salt: distinguishes kinds of texts, such as columns.

    Returns:
        An int64 tensor of shape `[texts]`.

    Raises:
        ConfigError: a value is no text.

    Example:
        >>> ids = fleet.data.stable_hash(["red", "green", "red"])
        >>> bool(ids[0] == ids[2]), bool(ids[0] == ids[1])
        (True, False)
    """
    encoded = _encoded(texts, "stable_hash")
    return torch.from_numpy(_hash_texts(encoded, salt_key(salt)))


def hash_column(field: str, values: Iterable[str | bytes] | Tensor | NDArray[Any]) -> Tensor:
    """Ids of one column's values, texts or whole numbers, with the field's name as salt.

    So fields can share a table: "1" has a different id in each field. Different whole numbers of
    a field never share an id.

    Args:
        field: the name of the column.
        values: texts or whole numbers.

    Returns:
        An int64 tensor of the shape of `values`.

    Raises:
        ConfigError: the values are floats.

    Example:
        >>> user = fleet.data.hash_column("user", [1, 2])
        >>> item = fleet.data.hash_column("item", [1, 2])
        >>> bool((user == item).any())
        False
    """
    if not isinstance(values, (Tensor, np.ndarray)):
        values = list(values)
        if not values or isinstance(values[0], (str, bytes)):
            return stable_hash(values, field)
    numbers = np.asarray(values)
    if numbers.dtype.kind in "SUO":
        return stable_hash(numbers.ravel().tolist(), field).reshape(numbers.shape)
    if numbers.dtype.kind not in "iu":
        raise ConfigError(
            f"hash_column {field!r}: got {numbers.dtype}, expected texts or whole numbers; "
            "put floats into bins first"
        )
    bits = numbers.astype(np.int64).view(np.uint64)
    return torch.from_numpy(mix(bits ^ salt_key(field)).view(np.int64))


@functools.lru_cache(maxsize=4096)
def salt_key(salt: str) -> np.uint64:
    """The key with which texts of a salt are hashed."""
    return only(_hash_texts([salt.encode()], _SALT_KEY).view(np.uint64))


def hash_spans(
    buffer: NDArray[np.uint8],
    starts: NDArray[np.int64],
    lengths: NDArray[np.int64],
    keys: NDArray[np.uint64],
) -> NDArray[np.int64]:
    """The ids of texts in one buffer; `starts`, `lengths` and `keys` broadcast."""
    starts, lengths, keys = np.broadcast_arrays(starts, lengths, keys)
    words = _words(buffer)
    state: Bits = mix(keys ^ lengths.astype(np.uint64)).ravel()
    flat_starts, flat_lengths = starts.ravel(), lengths.ravel()
    for offset in range(0, int(flat_lengths.max(initial=0)), _WORD):
        # only the texts that are this long: the work is proportional to the bytes
        active = np.flatnonzero(flat_lengths > offset)
        kept = _KEEP[np.minimum(flat_lengths[active] - offset, _WORD)]
        state[active] = mix(state[active] ^ (words[flat_starts[active] + offset] & kept))
    return mix(state).view(np.int64).reshape(starts.shape)


def _words(buffer: NDArray[np.uint8]) -> NDArray[np.uint64]:
    """The 8 bytes from each position as one number."""
    padded = np.concatenate([buffer, np.zeros(_WORD, np.uint8)])
    shape = (len(padded) - _WORD + 1,)
    words: NDArray[np.uint64] = np.ndarray(shape, np.dtype("<u8"), buffer=padded.data, strides=(1,))
    return words


def _hash_texts(texts: Sequence[bytes], key: np.uint64) -> NDArray[np.int64]:
    lengths = np.fromiter(map(len, texts), np.int64, len(texts))
    buffer = np.frombuffer(b"".join(texts), np.uint8)
    return hash_spans(buffer, np.cumsum(lengths) - lengths, lengths, np.asarray([key]))


def _encoded(texts: Iterable[str | bytes], caller: str) -> list[bytes]:
    if isinstance(texts, (str, bytes)):
        raise ConfigError(f"{caller}: got the text {texts!r}, expected a list of texts")
    try:
        # every str has an id, even one that UTF-8 cannot encode
        return [t if isinstance(t, bytes) else t.encode("utf-8", "surrogatepass") for t in texts]
    except (TypeError, AttributeError) as error:
        raise ConfigError(f"{caller}: {error}; expected a list of texts") from error
