"""The instrument that measures speed."""

import json
import sys

import pytest
from conftest import ROOT

sys.path.insert(0, str(ROOT / "benchmark"))
import speed


def test_best_window_after_the_warm_up():
    windows = speed.Windows()
    times = [0.0, 100.0, 200.0, 203.0, 205.0, 209.0]  # the windows of 100 s are the warm-up
    windows.marks = [(2048 * i, t, dict(update=t / 2)) for i, t in enumerate(times)]
    rate, parts = windows.best()
    assert rate == 2048 / 2.0 and parts == dict(update=1.0 / 2048)


def test_marks_are_2048_steps_apart():
    windows = speed.Windows()
    for step in range(0, 10_000, 5):
        windows.mark(step)
    assert [mark[0] for mark in windows.marks] == [0, 2050, 4100, 6150, 8200]


def test_measures_a_script_and_prints_its_row():
    settings = dict(num_steps=2048, num_minibatches=1, update_epochs=1, compile=False)
    row = speed.in_a_process(speed.measure_script, "ppo_continuous", "Pendulum-v1", settings, 2)
    assert row["rate"] < row["raw"] and row["share"] == pytest.approx(row["rate"] / row["raw"])
    assert sum(row["parts"].values()) == pytest.approx(1 / row["rate"])
    assert all(row["parts"][part] > 0 for part in ("environment", "policy", "advantage", "update"))
    assert row["parts"]["rest"] >= 0 and 50 < row["memory"] < 2000 and row["startup"] > 0.5
    head, _, line = speed.table([row]).splitlines()
    assert head.count("|") == line.count("|") and line.startswith("| ppo, Pendulum-v1 | ")


def test_committed_results_are_of_all_scripts_and_agree_with_the_readme():
    results = json.loads((ROOT / "benchmark" / "results" / "speed.json").read_text())
    assert [(row["script"], row["task"]) for row in results["rows"][:7]] == [goal[:2] for goal in speed.GOALS]
    table = speed.table(results["rows"])
    assert table in (ROOT / "benchmark" / "results" / "speed.md").read_text()
    assert table in (ROOT / "README.md").read_text()
