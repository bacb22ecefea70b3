# SPDX-License-Identifier: Apache-2.0
"""The page of the command line, from the parsers of `fleetrun` and `fleetlight`."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from fleetlight.cli import arguments, fleetlight

_ABOUT = """\
# Command line

The commands and their flags, from the code. [The launcher](../launcher.md) explains what `fleetrun`
does with them."""


def commands_page() -> dict[str, str]:
    """The page by its path below docs/."""
    parts = [_ABOUT, *_fleetrun(), *_fleetlight()]
    return {"reference/commands.md": "\n\n".join(parts) + "\n"}


def _fleetrun() -> Iterator[str]:
    parser = arguments.parser()
    yield "## fleetrun"
    yield _usage("fleetrun [flags] train.py [arguments of the script]")
    for group in parser._action_groups:
        if listed := _flags(group._group_actions):
            yield f"### {_title(group.title)}"
            yield listed


def _fleetlight() -> Iterator[str]:
    for name, about, parser in _commands(fleetlight.parser(), "fleetlight"):
        yield f"## {name}"
        yield _sentence(about or parser.description or "")
        yield _usage(" ".join(parser.format_usage().replace("usage: ", "").split()))
        if listed := _flags(parser._actions):
            yield listed


def _commands(
    parser: argparse.ArgumentParser, prefix: str
) -> Iterator[tuple[str, str, argparse.ArgumentParser]]:
    """The commands below a parser, with what their list says about them."""
    for action in parser._actions:
        if not isinstance(action, argparse._SubParsersAction):
            continue
        helps = {one.dest: one.help for one in action._choices_actions}
        for name, inner in action.choices.items():
            below = list(_commands(inner, f"{prefix} {name}"))
            yield from below or [(f"{prefix} {name}", helps.get(name) or "", inner)]


def _flags(actions: list[argparse.Action]) -> str:
    """A list of the flags and arguments that have a help text."""
    lines = []
    for action in actions:
        is_shown = action.help not in (None, argparse.SUPPRESS) and action.dest != "help"
        if is_shown and not isinstance(action, argparse._SubParsersAction):
            lines.append(f"- {_name(action)}: {_text(action)}")
    return "\n".join(lines)


def _name(action: argparse.Action) -> str:
    value = action.metavar or (action.dest.upper() if action.option_strings else action.dest)
    if isinstance(value, tuple):
        value = " ".join(value)
    if not action.option_strings:
        return f"`{value}`"
    shown = "" if action.nargs == 0 else f" {value}"
    return ", ".join(f"`{one}{shown}`" for one in action.option_strings)


def _text(action: argparse.Action) -> str:
    values = {**vars(action), "prog": "fleetrun"}
    return " ".join((action.help or "").replace("%%", "%%%%").split()) % values


def _usage(line: str) -> str:
    return f"```text\n{line}\n```"


def _title(title: str | None) -> str:
    names = {"positional arguments": "What runs", "options": "Other", "optional arguments": "Other"}
    return _sentence(names.get(title or "", title or "")).removesuffix(".")


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:].removesuffix('.')}." if text else ""
