# SPDX-License-Identifier: Apache-2.0
"""Words that a reader of papers and of PyTorch does not expect, and what to write instead."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests.tidy.sources import PACKAGE, ROOT, SOURCES, TESTS, relative, text

PAGES = [*sorted((ROOT / "docs").rglob("*.md")), ROOT / "README.md", ROOT / "ARCHITECTURE.md"]

#: a pattern, and the words for its place; a word is a whole word, in any case
INSTEAD = {
    # pronouns that are riddles
    "somebody|anybody|everybody|nobody": "name it: the worker, each server, no process",
    "who (?:is|are|was|were) (?:told|asked|let|late)(?: late)?": "name it: the worker that ...",
    '"""one (?:that|who|which|of)': 'a noun: """A worker that ...',
    '"""the same\\.': "what it does",
    "what of (?:it|them|the|a|an|each)": "the part of ... that",
    # verbs of another language
    "answers (?:whether|how|what|where|which|who|with|by|none|true|false|the|an?|it|if)": "returns",
    "goes on|go on|going on|went on|gone on": "continues, resumes",
    "(?:is|are|was|were|be|been) waited for": "a subject: the worker waits for ...",
    "(?:has|have|had|is|are) parted|part(?:s|ed)? (?:from|with) the": "disconnects, leaves",
    "(?:take|takes|taken|took|taking) up": "resumes, loads",
    "(?:begin|begins|began|begun) (?:anew|again)|anew": "restarts, again",
    "know(?:s|n)? nothing of": "does not import, does not depend on",
    "heard (?:of|from)": "received",
    "shall": "must, will",
    "the own": "its own, this worker's, the address of this machine",
    "(?:workers?|servers?|processes|machines?|members?) (?:came|(?:have|has|had) come)": "joined",
    "by itself": "automatically, on its own, separately",
    "went away|without a word": "was lost, disconnected, silently",
    # prepositions
    "amid": "during",
    r"behind (?:(?:the|an?|each|every|this|that|its) )?(?:(?:coming|last|first|next|same) )?"
    r"(?:step|push|call|loop|end|answer|reply|forward|backward|batch|epoch|barrier|save|snapshot)"
    r"(?:e?s)?": "after",
    "behind (?:one )?another": "after another",
    "under way": "in progress",
    "for ever": "forever",
    "in front of": "ahead of, before",
    # metaphors where a term exists
    "rows (?:not )?ahead": "prefetched rows, rows fetched on demand",
    "signs? of life": "heartbeat",
    "(?:earlier|former|later|each|this|that|its|first|second|another) li(?:fe|ves)": "incarnation",
    "lives (?:on|in|at)": "is stored",
    "dear|dearer": "expensive",
    "(?:the|a|this) house": "the project",
    "noticeboard": "status board",
    "meeting point": "rendezvous",
    "neighbours?": "local peers",
    "courier|parcels?": "checkpoint copy, push request",
    "chronicle": "write-ahead log",
    "crew": "served group",
    "rhythm": "poll schedule",
    "haste": "no_gc",
    "sparing": "communication effects",
}
BANNED = {re.compile(rf"(?<!\w)(?:{words})(?!\w)"): instead for words, instead in INSTEAD.items()}
#: most files have none, which one pass finds out
ANY_BANNED = re.compile(rf"(?<!\w)(?:{'|'.join(INSTEAD)})(?!\w)")


class Found(NamedTuple):
    """A banned word, and where it stands."""

    place: str
    word: str
    instead: str

    def __str__(self) -> str:
        return f"{self.place}: {self.word!r}: write: {self.instead}"


def room(path: Path) -> str:
    """The part of the project that a file belongs to, as its own engineer reads it."""
    if path.is_relative_to(PACKAGE):
        return f"src/{path.relative_to(PACKAGE).parts[0].removesuffix('.py')}"
    return path.relative_to(ROOT).parts[0]


def room_names() -> list[str]:
    return sorted({room(path) for path in [*SOURCES, *TESTS, *PAGES]})


@functools.cache
def banned_words() -> dict[str, list[Found]]:
    """The banned words of each room."""
    rooms: dict[str, list[Found]] = {}
    for path in [*SOURCES, *TESTS, *PAGES]:
        if found := list(in_text(text(path), relative(path))):
            rooms.setdefault(room(path), []).extend(found)
    return rooms


def in_text(said: str, name: str) -> Iterator[Found]:
    lowered = said.lower()
    if not ANY_BANNED.search(lowered):
        return
    for pattern, instead in BANNED.items():
        for match in pattern.finditer(lowered):
            line = said.count("\n", 0, match.start()) + 1
            yield Found(f"{name}:{line}", said[slice(*match.span())], instead)


def word_counts() -> dict[str, int]:
    return {name: len(found) for name, found in sorted(banned_words().items())}
