"""The instrument that measures speed."""

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
from conftest import ROOT, load

sys.path.insert(0, str(ROOT / "benchmark"))
import speed


def test_an_unknown_part_is_refused():
    command = [sys.executable, str(ROOT / "benchmark" / "speed.py"), "atari"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and "atari" in done.stderr and done.stderr.count("\n") == 1


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


@pytest.mark.slow
def test_measures_a_script_and_prints_its_row():
    settings = dict(num_steps=2048, num_minibatches=1, update_epochs=1, compile=False)
    row = speed.in_a_process(speed.measure_script, "ppo_continuous", "Pendulum-v1", settings, 2)
    assert row["rate"] < row["raw"] and row["share"] == pytest.approx(row["rate"] / row["raw"])
    assert sum(row["parts"].values()) == pytest.approx(1 / row["rate"])
    assert all(row["parts"][part] > 0 for part in ("environment", "policy", "advantage", "update"))
    assert row["parts"]["rest"] >= 0 and 50 < row["memory"] < 2000 and row["startup"] > 0.5
    head, _, line = speed.table([row]).splitlines()
    assert head.count("|") == line.count("|") and line.startswith("| ppo, Pendulum-v1 | ")


def test_arithmetic_of_the_network_by_hand():
    """Two operations per weight and position; backward twice that, but for the frames, which need no gradient."""
    script = load("vsop_procgen")
    args = script.Args(update_epochs=3)
    agent = script.Agent(SimpleNamespace(num_actions=15), args)
    shapes = [(3, 16, 64), *[(16, 16, 32)] * 4, (16, 32, 32), *[(32, 32, 16)] * 4, (32, 32, 16), *[(32, 32, 8)] * 4]
    forward = [2 * 9 * channels * out * side**2 for channels, out, side in shapes]
    forward += [2 * 2048 * 256, 2 * 256 * 15, 2 * 256]
    backward = 2 * sum(forward) - forward[0]
    assert speed.flops(args, agent) == pytest.approx(3 * sum(forward) + 3 * (sum(forward) + backward), rel=0.01)
    assert 0.6e9 < speed.flops(args, agent) < 0.8e9


def test_committed_results_of_the_games_agree_with_their_page():
    rows = json.loads((ROOT / "benchmark" / "results" / "speed_procgen.json").read_text())
    assert [(row["script"], row["layout"]) for row in rows] == [
        (name, layout) for name in speed.GAME_SCRIPTS for layout in speed.LAYOUTS
    ]
    table = speed.game_table(rows)
    assert table in (ROOT / "benchmark" / "results" / "speed_procgen.md").read_text()


def test_committed_results_are_of_all_scripts_and_agree_with_their_page():
    results = json.loads((ROOT / "benchmark" / "results" / "speed.json").read_text())
    assert [(row["script"], row["task"]) for row in results["rows"][:7]] == [goal[:2] for goal in speed.GOALS]
    table = speed.table(results["rows"])
    assert table in (ROOT / "benchmark" / "results" / "speed.md").read_text()
