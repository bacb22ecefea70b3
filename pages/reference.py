# SPDX-License-Identifier: Apache-2.0
"""The API reference: a page of Markdown for each `Page`, from signatures and docstrings."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterator
from typing import Any

from fleetlight.strategy.settings import Settings
from pages.docstrings import Docstring, docstring_of
from pages.public import PAGES, Page, methods_of, resolved

#: columns of a signature on one line
_WIDTH = 76
#: where each object is described
PLACES = {name: page.slug for page in PAGES for name in page.names}
_MENTION = re.compile(r"`((?:fleet|fleetlight)\.[\w.]+)(\([^`]*\))?`")
_SAME = "It is the same object as [`{name}`](#{anchor})."


def reference_pages() -> dict[str, str]:
    """The pages by their paths below docs/."""
    pages = {f"reference/{page.slug}.md": _page(page) for page in PAGES if page.slug != "errors"}
    return {"reference/index.md": _index(), **pages}


def anchor(name: str) -> str:
    """The anchor of an object's heading."""
    return re.sub(r"[^\w\- ]", "", name).lower().replace(" ", "-")


def linked(text: str, slug: str) -> str:
    """Markdown in which the names of public objects are links."""

    def link(match: re.Match[str]) -> str:
        place = PLACES.get(match[1])
        if place is None:
            return match[0]
        return f"[{match[0]}]({'' if place == slug else f'{place}.md'}#{anchor(match[1])})"

    return _MENTION.sub(link, text)


def _index() -> str:
    parts = [
        "# API reference",
        "Each page has the signature, the arguments, the errors and a short example of its "
        "objects. A test runs all examples. They begin with these lines:",
        "```python\nimport torch\nfrom torch import nn\n\nimport fleetlight as fleet\n```",
        "In one process `fleet.init()` gives a job with a server inside, and "
        "`fleet.init(is_collective=True)` a job of one worker. So the examples run as they are, "
        "also in a notebook.",
    ]
    for page in PAGES:
        names = [
            f"- [`{name}`]({page.slug}.md#{anchor(name)}): {docstring_of(resolved(name)).summary}"
            for name in page.names
        ]
        parts += [f"## {page.title}", "\n".join(names)]
    return _text(parts)


def _page(page: Page) -> str:
    parts = [f"# {page.title}", page.about]
    first: dict[int, str] = {}
    for name in page.names:
        found = resolved(name)
        parts.append(f"## {name}")
        if id(found) in first:
            other = first[id(found)]
            parts.append(_SAME.format(name=other, anchor=anchor(other)))
            continue
        first[id(found)] = name
        parts += described(name, found)
    return linked(_text(parts), page.slug)


def _text(parts: list[str]) -> str:
    return "\n\n".join(part for part in parts if part) + "\n"


def described(name: str, found: Any) -> Iterator[str]:
    """The blocks of Markdown about an object, below its heading."""
    doc = docstring_of(found)
    is_settings = inspect.isclass(found) and issubclass(found, Settings)
    if not is_settings:
        # no program, so not the language of those
        yield f"```py\n{signature(name, found)}\n```"
    yield from _body(doc)
    if is_settings and name != "fleet.DistributedStrategy":
        yield _fields(found)
    if inspect.isclass(found):
        methods = list(methods_of(found))
        if methods:
            yield "**Methods and properties**"
            yield "\n".join(_method(one, value) for one, value in methods)
    if doc.example:
        yield "**Example**"
        yield f"```pycon\n{doc.example}\n```"


def _body(doc: Docstring) -> Iterator[str]:
    yield _fenced(doc.text)
    for title, entries in (("Arguments", doc.arguments), ("Raises", doc.raises)):
        if title == "Raises":
            for word, sentence in (("Returns", doc.returns), ("Yields", doc.yields)):
                if sentence and sentence != "Nothing.":
                    yield f"**{word}** {sentence}"
        if entries:
            yield f"**{title}**"
            yield "\n".join(f"- `{one}`: {text}" for one, text in entries.items())


def _fenced(text: str) -> str:
    """Markdown with fences in place of indented code."""
    blocks = []
    for block in text.split("\n\n"):
        lines = block.splitlines()
        if lines and all(line.startswith("    ") for line in lines):
            blocks.append("```text\n" + "\n".join(line[4:] for line in lines) + "\n```")
        else:
            blocks.append(block)
    return "\n\n".join(blocks)


def _fields(config: type[Settings]) -> str:
    rows = [
        f"- `{field.name}`: {field.metadata['rules'].doc}" for field in dataclasses.fields(config)
    ]
    return "\n".join(["**Fields**, with more in [all settings](settings.md)", "", *rows])


def _method(name: str, value: Any) -> str:
    text = " ".join((inspect.getdoc(value) or "").split())
    inner = getattr(value, "__func__", value)
    if not inspect.isfunction(inner):
        return f"- `{name}`: {text}"
    return f"- `{name}{_arguments(inner, long=False)}`: {text}"


def signature(name: str, found: Any) -> str:
    """The call of an object, on several lines where it is long."""
    if isinstance(found, type) and issubclass(found, BaseException):
        return f"class {name}"
    try:
        line = f"{name}{_arguments(found, long=False)}"
        return line if len(line) <= _WIDTH else f"{name}{_arguments(found, long=True)}"
    except ValueError:
        return name


def _arguments(found: Any, *, long: bool) -> str:
    """The parameters without `self`, and what a function returns."""
    made = inspect.signature(found)
    parameters = [one for one in made.parameters.values() if one.name not in ("self", "cls")]
    shown = _shown(parameters, long)
    joined = "\n".join(["(", *(f"    {one}," for one in shown), ")"]) if long and shown else None
    text = joined or f"({', '.join(shown)})"
    if inspect.isclass(found) or made.return_annotation is inspect.Signature.empty:
        return text
    return f"{text} -> {_type(made.return_annotation)}"


def _shown(parameters: list[inspect.Parameter], typed: bool) -> list[str]:
    texts, keywords = [], False
    for one in parameters:
        if one.kind is one.VAR_POSITIONAL:
            keywords = True
        if one.kind is one.KEYWORD_ONLY and not keywords:
            texts.append("*")
            keywords = True
        texts.append(_parameter(one, typed))
    return texts


def _parameter(one: inspect.Parameter, typed: bool) -> str:
    stars = {"VAR_POSITIONAL": "*", "VAR_KEYWORD": "**"}.get(one.kind.name, "")
    text = stars + one.name
    has_type = typed and one.annotation is not one.empty
    if has_type:
        text += f": {_type(one.annotation)}"
    if one.default is not one.empty:
        text += f"{' = ' if has_type else '='}{_default(one.default)}"
    return text


def _type(annotation: Any) -> str:
    return annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)


def _default(value: Any) -> str:
    # the address of a function differs each time
    if inspect.isfunction(value):
        return str(value.__name__)
    return repr(value).replace("'", '"')
