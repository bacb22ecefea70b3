# SPDX-License-Identifier: Apache-2.0
"""Scripts by which shells complete commands and flags, generated from the parsers."""

from __future__ import annotations

import argparse
import dataclasses
import shlex
from collections.abc import Iterator, Sequence

from fleetlight.launch import backends

SHELLS = ("bash", "zsh", "fish")
#: the values of flags whose parser takes any text
_VALUES = {"--on": backends.names}


@dataclasses.dataclass(frozen=True)
class _Flag:
    """One option of a command, with all its spellings."""

    names: tuple[str, ...]
    help: str
    takes_value: bool
    values: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class _Command:
    """A command with its flags, and what may follow."""

    #: `fleetlight table stats`
    path: str
    help: str
    flags: tuple[_Flag, ...]
    commands: tuple[str, ...] = ()
    #: the values of an argument
    values: tuple[str, ...] = ()
    #: True if all words after the first argument belong to another program
    runs_program: bool = False


def script(shell: str, parsers: Sequence[argparse.ArgumentParser]) -> str:
    """The script of a shell for the commands of these parsers."""
    commands = [command for parser in parsers for command in _commands(parser, parser.prog, "")]
    programs = [parser.prog for parser in parsers]
    if shell == "fish":
        return "".join(f"{line}\n" for line in _fish(commands))
    bash = _BASH.format(
        words=_cases((command.path, [*_flags(command), *command.commands]) for command in commands),
        values=_cases(_values(commands)),
        taking=_cases((command.path, _taking(command)) for command in commands),
        running=" | ".join(shlex.quote(one.path) for one in commands if one.runs_program) or "''",
        programs=" ".join(programs),
    )
    return bash if shell == "bash" else _ZSH + bash


def _commands(parser: argparse.ArgumentParser, path: str, help_: str) -> Iterator[_Command]:
    """A command and those below it."""
    below = [one for one in parser._actions if isinstance(one, argparse._SubParsersAction)]
    arguments = [one for one in parser._actions if not one.option_strings and one not in below]
    yield _Command(
        path,
        help_,
        tuple(_flag(one) for one in parser._actions if _is_shown_flag(one)),
        tuple(name for one in below for name in one.choices),
        tuple(str(value) for one in arguments for value in one.choices or ()),
        any(one.nargs == argparse.REMAINDER for one in arguments),
    )
    for one in below:
        helps = {choice.dest: choice.help or "" for choice in one._choices_actions}
        for name, inner in one.choices.items():
            yield from _commands(inner, f"{path} {name}", helps.get(name, ""))


def _is_shown_flag(action: argparse.Action) -> bool:
    return bool(action.option_strings) and action.help != argparse.SUPPRESS


def _flag(action: argparse.Action) -> _Flag:
    names = tuple(action.option_strings)
    given = [values() for name, values in _VALUES.items() if name in names]
    values = tuple(map(str, action.choices or (given[0] if given else ())))
    text = (action.help or "") % {"default": action.default, "prog": ""}
    return _Flag(names, text, action.nargs != 0, values)


def _flags(command: _Command) -> list[str]:
    return [name for flag in command.flags for name in flag.names]


def _taking(command: _Command) -> list[str]:
    return [name for flag in command.flags if flag.takes_value for name in flag.names]


def _values(commands: Sequence[_Command]) -> Iterator[tuple[str, Sequence[str]]]:
    """The values of flags by `command flag`, and of arguments by `command`."""
    for command in commands:
        yield command.path, command.values
        for flag in command.flags:
            yield from ((f"{command.path} {name}", flag.values) for name in flag.names)


def _cases(rows: Iterator[tuple[str, Sequence[str]]]) -> str:
    """The branches of a `case` that print words."""
    return "".join(
        f"    {shlex.quote(name)}) echo {shlex.quote(' '.join(words))} ;;\n"
        for name, words in rows
        if words
    )


_ZSH = "autoload -Uz bashcompinit && bashcompinit\n"
_BASH = """\
# what may follow a command
_fleetlight_words() {{
  case "$1" in
{words}  esac
}}

# the values of a command's argument, or of a flag
_fleetlight_values() {{
  case "$1" in
{values}  esac
}}

# the flags that a value follows
_fleetlight_taking() {{
  case "$1" in
{taking}  esac
}}

_fleetlight() {{
  # zsh then numbers words from 0, and splits them, as bash does
  [[ -n "${{ZSH_VERSION:-}}" ]] && emulate -L ksh
  local word="${{COMP_WORDS[COMP_CWORD]}}" previous="" called="${{COMP_WORDS[0]##*/}}"
  local argument="" found n
  for ((n = 1; n < COMP_CWORD; n++)); do
    found="${{COMP_WORDS[n]}}"
    if [[ -n "$previous" ]]; then
      previous=""
    elif [[ "$found" == -* ]]; then
      [[ " $(_fleetlight_taking "$called") " == *" $found "* ]] && previous="$found"
    elif [[ -n "$(_fleetlight_words "$called $found")" ]]; then
      called="$called $found"
    else
      argument="$found"
    fi
  done
  COMPREPLY=()
  if [[ -n "$argument" ]]; then
    # the words after a script are its own
    case "$called" in
    {running}) return ;;
    esac
  fi
  if [[ -n "$previous" ]]; then
    found="$(_fleetlight_values "$called $previous")"
  elif [[ "$word" == -* ]]; then
    found="$(_fleetlight_words "$called")"
  else
    found="$(_fleetlight_values "$called")"
    for n in $(_fleetlight_words "$called"); do
      [[ "$n" == -* ]] || found="$found $n"
    done
  fi
  # without words the shell completes names of files
  COMPREPLY=($(compgen -W "$found" -- "$word"))
}}

complete -o bashdefault -o default -F _fleetlight {programs}
"""


def _fish(commands: Sequence[_Command]) -> Iterator[str]:
    """One line for each word."""
    for command in commands:
        program, *words = command.path.split()
        where = _fish_condition(words, command.commands)
        below = [one for one in commands if one.path.rpartition(" ")[0] == command.path]
        for one in below:
            name = one.path.rpartition(" ")[2]
            yield f"complete -c {program}{where} -f -a {name} -d {shlex.quote(one.help)}"
        if command.values:
            yield f"complete -c {program}{where} -f -a {shlex.quote(' '.join(command.values))}"
        for flag in command.flags:
            yield f"complete -c {program}{where} {_fish_flag(flag)}"


def _fish_condition(words: Sequence[str], below: Sequence[str]) -> str:
    seen = [f"__fish_seen_subcommand_from {word}" for word in words]
    if below:
        seen.append(f"not __fish_seen_subcommand_from {' '.join(below)}")
    return f" -n {shlex.quote('; and '.join(seen))}" if seen else ""


def _fish_flag(flag: _Flag) -> str:
    parts = [f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}" for name in flag.names]
    if flag.values:
        parts.append(f"-x -a {shlex.quote(' '.join(flag.values))}")
    elif flag.takes_value:
        parts.append("-r")
    return " ".join([*parts, f"-d {shlex.quote(flag.help)}"])
