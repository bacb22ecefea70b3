#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A kubectl whose cluster is a folder: the objects, what was asked, and what it refuses."""

import json
import os
import sys
from pathlib import Path

HERE = Path(os.environ["FAKE_CLUSTER"])


def file_of(kind: str, name: str) -> Path:
    return HERE / f"{kind.lower()}.{name}.json"


def main(words: list[str]) -> int:
    with (HERE / "asked").open("a") as asked:
        print(json.dumps(words), file=asked)
    words = [word for word in words if not word.startswith("--request-timeout")]
    if words[0] == "--namespace":
        words = words[2:]
    refusals = HERE / "refuses"
    given = sys.stdin.read()
    for line in refusals.read_text().splitlines() if refusals.exists() else ():
        start, text = line.split("|")
        if start == words[0] or start in given:
            print(text, file=sys.stderr)
            return 1
    return VERBS[words[0]](words[1:], given)


def create(words: list[str], given: str) -> int:
    one = json.loads(given)
    file = file_of(one["kind"], one["metadata"]["name"])
    if file.exists() and "apply" not in words:
        print(f"Error from server (AlreadyExists): {file.stem} already exists", file=sys.stderr)
        return 1
    one["metadata"]["uid"] = "1-2-3"
    file.write_text(json.dumps(one))
    print(json.dumps(one))
    return 0


def apply(words: list[str], given: str) -> int:
    return create(["apply"], given)


def get(words: list[str], given: str) -> int:
    kind, *more = words
    if kind in ("pods", "events"):
        file = HERE / f"{kind}.json"
        print(json.dumps({"items": json.loads(file.read_text()) if file.exists() else []}))
        return 0
    file = file_of(kind, more[0])
    if not file.exists():
        print(f'Error from server (NotFound): {kind} "{more[0]}" not found', file=sys.stderr)
        return 1
    print(file.read_text())
    return 0


def delete(words: list[str], given: str) -> int:
    file_of(words[0], words[1]).unlink()
    if words[0] == "jobset":
        # its secret belongs to it
        file_of("secret", words[1]).unlink(missing_ok=True)
    return 0


def logs(words: list[str], given: str) -> int:
    print(f"printed by {words[0]}")
    return 0


VERBS = {"create": create, "apply": apply, "get": get, "delete": delete, "logs": logs}

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
