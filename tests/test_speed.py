"""The instrument that measures speed."""

import importlib.util
import itertools
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


# --------------------------------------------------------------------------------------------- the JAX scripts
SMALL = dict(num_envs=2, num_steps=4, num_minibatches=2, update_epochs=1, width=8)


@pytest.fixture
def gymnax_vsop():
    """The script, with quick compilation: most of the time of these tests."""
    pytest.importorskip("gymnax")
    script = load("vsop_gymnax")
    script.jax.config.update("jax_disable_most_optimizations", True)
    return script


def test_gymnax_windows_count_the_steps_of_all_seeds(gymnax_vsop, monkeypatch):
    ticks = itertools.count(0, 0.125)
    monkeypatch.setattr(speed, "clock", lambda: next(ticks))
    run = speed.training("vsop_gymnax", "CartPole-v1", 3, SMALL)
    assert [next(run) for _ in range(3)] == [iterations * 8 * 3 / 0.125 for iterations in (1, 4, 16)]


def test_gymnax_rates_are_the_best_windows_after_the_warm_up():
    runs = [iter([9.0, 9.0, 1.0, 3.0, 2.0, 9.0]), iter([0.0, 0.0, 5.0, 4.0, 4.0, 9.0])]
    assert speed.best_rates(runs, repeats=3) == [3.0, 5.0]


def test_gymnax_arithmetic_by_hand(gymnax_vsop):
    """Two operations per weight; backward twice that, but for the observations, which need no gradient."""
    first, second, actor, critic = 2 * 400 * 512, 2 * 512 * 512, 2 * 512 * 3, 2 * 512
    forward = 2 * first + 2 * second + actor + critic
    backward = 2 * forward - 2 * first
    args = gymnax_vsop.Args(env_id="Breakout-MinAtar", width=512, update_epochs=9)
    assert speed.gymnax_flops(gymnax_vsop, args) == forward + 9 * (forward + backward)


def test_measures_gymnax_minatar_against_its_limit(gymnax_vsop, monkeypatch):
    monkeypatch.setattr(speed, "product_rate", lambda ones: 1e9)
    row = speed.measure_minatar("a3c_gymnax", num_seeds=2, repeats=1, **SMALL | dict(num_steps=64, num_minibatches=8))
    assert row["limit"] == 1e9 / row["flops"] and row["share"] == row["rate"] / row["limit"] > 0


@pytest.mark.slow
def test_measures_gymnax_processes_and_start(gymnax_vsop):
    assert speed.measure_processes(2, repeats=1, **SMALL) > 0
    cold, warm = speed.measure_start()
    assert 1 < warm < cold


def test_gymnax_report():
    rates = [[100.0, 2000.0, 3000.0], [10.0, 20.0, 40.0], [1.0, 1.0, 1.0], [1.0, 1.0, 1.0]]
    seeds = [dict(script=name, task=task, rates=row) for (name, task), row in zip(speed.GYMNAX_GRID, rates)]
    minatar = [dict(script="a3c_gymnax", task="T", rate=50.0, limit=200.0, share=0.25, flops=4e6, product=1e11)]
    results = dict(seeds=seeds, processes=[1000.0, 1900.0], start=[9.0, 4.0], continuous=5.0, minatar=minatar)
    text = speed.gymnax_report(results)
    assert "| vsop_gymnax, CartPole-v1 | 100 | 2,000 | 3,000 | **30.0** |" in text
    assert "1,900 steps/s, 1.90 times" in text and "9.0 s" in text and "4.0 s" in text and "2.0, 4.0, 8.0 times" in text
    assert "| a3c_gymnax, T | 50 | 200 | **25%** | 4.0 | 100 |" in text
    assert "vsop_continuous" not in speed.gymnax_report(results | dict(continuous=None))


def test_missing_gymnax_is_one_line(monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(sys, "argv", ["speed.py", "gymnax"])
    with pytest.raises(SystemExit) as stop:
        speed.main()
    error = capsys.readouterr().err
    assert stop.value.code == 2 and "requirements-gymnax.txt" in error and error.count("\n") == 1


def test_committed_results_of_gymnax_agree_with_their_page():
    results = json.loads((speed.RESULTS / "speed_gymnax.json").read_text())
    assert [(row["script"], row["task"]) for row in results["seeds"]] == speed.GYMNAX_GRID
    assert tuple(row["script"] for row in results["minatar"]) == speed.GYMNAX_SCRIPTS
    assert (speed.RESULTS / "speed_gymnax.md").read_text() == speed.gymnax_report(results) + "\n"
