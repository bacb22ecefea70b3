# SPDX-License-Identifier: Apache-2.0
"""The output of the launcher: prefixes, tables and the arguments."""

from fleetlight.launch.screen import Prefixed, arguments_block, boxed


def test_only_whole_lines_get_a_prefix() -> None:
    shown: list[bytes] = []
    prefixed = Prefixed("worker 1", shown.append)
    prefixed(b"on")
    assert shown == []
    prefixed(b"e\ntwo\nthr")
    assert b"".join(shown) == b"[worker 1] one\n[worker 1] two\n"
    prefixed(b"ee")
    prefixed.finish()
    prefixed.finish()
    assert b"".join(shown[1:]) == b"[worker 1] three\n"


def test_table_is_a_box() -> None:
    text = boxed(("Distributed Envs", "Value"), [("FLEET_INDEX", "0"), ("FLEET_MASTER", "h:1")])
    lines = text.splitlines()
    assert len({len(line) for line in lines}) == 1
    assert lines[1].replace(" ", "") == "|DistributedEnvs|Value|"
    assert lines[3] == "| FLEET_INDEX      | 0     |"


def test_long_value_keeps_both_ends() -> None:
    text = boxed(("a", "b"), [("x", "begin" + "-" * 200 + "end")], width=60)
    assert all(len(line) == 60 for line in text.splitlines())
    assert "begin" in text
    assert "... " not in text
    assert "end |" in text


def test_arguments_are_listed() -> None:
    text = arguments_block([("script", "t.py")])
    assert text.splitlines()[0] == "-----------  Configuration Arguments -----------"
    assert "script: t.py" in text
