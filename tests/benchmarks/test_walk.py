# SPDX-License-Identifier: Apache-2.0
"""A newcomer reaches the result of each first task by the commands of the pages."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from benchmarks.walk import MOST_COMMANDS, TASKS, FirstTask, Walked, main, walk
from pages.printed.blocks import SHELL
from pages.printed.terminal import Printed


def named(name: str) -> FirstTask:
    [task] = [task for task in TASKS if task.name == name]
    return task


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_task_takes_few_commands(task: FirstTask) -> None:
    commands = [one for block in task.blocks() if block.language in SHELL for one in block.commands]
    assert 1 <= len(commands) <= MOST_COMMANDS


@pytest.mark.long
@pytest.mark.multiprocess
@pytest.mark.timeout(300)
@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_newcomer_reaches_the_result(task: FirstTask, tmp_path: Path) -> None:
    walked = walk(task, tmp_path)
    assert task.is_done(walked), walked.text


def walked(folder: Path, *outputs: tuple[str, int]) -> Walked:
    return Walked(folder, [Printed("command", text, code) for text, code in outputs], 1.0)


def test_cause_of_a_death_must_be_printed(tmp_path: Path) -> None:
    line = "fleetrun: failed: worker 1 of 2 exited with code 1 after 2 s: ValueError: bad\n"
    cause = "ValueError: bad\n"
    is_done = named("why a worker died").is_done
    assert is_done(walked(tmp_path, (cause + line, 1), (cause, 0)))
    assert not is_done(walked(tmp_path, (line.partition(": ValueError")[0], 1), (cause, 0)))
    assert not is_done(walked(tmp_path, (cause + line, 1), ("nothing", 0)))


def test_resumed_job_makes_each_epoch_once(tmp_path: Path) -> None:
    stop = "fleetrun: stopped at step 7, saved in ckpt\n"
    resume = "[fleet worker 0] resuming from ckpt, saved at step 7\n"
    first, second = "epoch 0: a\nepoch 1: a\n", "epoch 2: a\nepoch 3: a\n"
    is_done = named("resume a job").is_done
    assert is_done(walked(tmp_path, (first + stop, 0), (resume + second, 0)))
    assert not is_done(walked(tmp_path, (first + stop, 0), (resume + first + second, 0)))
    assert not is_done(walked(tmp_path, (first + stop, 0), (second, 0)))


def test_a_task_that_fails_is_in_the_table(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    task = dataclasses.replace(
        named("export a model"), headings=("The same script, distributed",), is_done=lambda _: False
    )
    monkeypatch.setattr("benchmarks.walk.TASKS", (task,))
    assert main(["--rounds", "1", "--dry"]) == 1
    assert "| export a model | 0 | met |" in capsys.readouterr().out
