"""The grid and its report."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
import tyro
from conftest import ROOT, load, wait_for
from rliable import library, metrics

sys.path.insert(0, str(ROOT / "benchmark"))
import report
import run as runner

EXPERIMENTS = sorted(path.stem for path in (ROOT / "benchmark" / "experiments").glob("*.toml"))
TINY = "--num-steps 64 --num-minibatches 2 --update-epochs 1 --width 8 --no-compile --checkpoint-every 5"


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_commands_of_the_experiments_are_legal(name):
    experiment = runner.load_experiment(name)
    assert len(experiment.tasks) == (16 if name == "procgen" else 10)
    for command in experiment.methods.values():
        script, *flags = shlex.split(command)
        tyro.cli(load(script.removesuffix(".py")).Args, args=[*flags, "--env-id", experiment.tasks[0], "--seed", "3"])


def test_parallel_rollouts_have_the_same_size():
    for command in runner.load_experiment("parallel").methods.values():
        sizes = [int(re.search(rf"--num-{what} (\d+)", command)[1]) for what in ("envs", "steps")]
        assert sizes[0] * sizes[1] == 2048


def test_experiments_share_runs(tmp_path):
    def folders(name, **options):
        return {run.folder for run in runner.grid(runner.Args(name, folder=tmp_path, **options))}

    assert len(folders("baselines", seeds=2)) == 100
    assert len(folders("baselines", seeds=2, methods=("VSOP",)) & folders("timelimit", seeds=2)) == 20
    assert not folders("baselines", total_timesteps=10) & folders("baselines", total_timesteps=20)


@pytest.fixture
def experiment(tmp_path):
    path = tmp_path / "tiny.toml"
    path.write_text(
        'tasks = ["Pendulum-v1"]\n[methods]\n'
        f'"VSOP" = "vsop_continuous.py {TINY}"\n"PPO" = "ppo_continuous.py {TINY}"\n'
    )
    return path


def command(experiment, *options):
    return [sys.executable, str(ROOT / "benchmark" / "run.py"), str(experiment), *map(str, options)]


def start(experiment, *options):
    line = command(experiment, "--folder", experiment.parent / "grid", *options)
    return subprocess.Popen(line, cwd=experiment.parent, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def training(folder):
    """Ids of the training processes of a grid."""
    lines = subprocess.run(["ps", "-eo", "pid,cmd"], capture_output=True, text=True).stdout.splitlines()
    links = [Path(f"/proc/{line.split()[0]}/cwd") for line in lines if "_continuous.py" in line]
    return [int(link.parent.name) for link in links if link.exists() and str(folder) in os.readlink(link)]


def test_a_killed_grid_goes_on_where_it_was(experiment, tmp_path):
    """A run that is killed alone is resumed at once, a killed grid by the same command; finished runs are skipped."""
    options = ("--seeds", 1, "--total-timesteps", 64 * 1000, "--jobs", 2)
    process = start(experiment, *options)
    wait_for(lambda: len(list(tmp_path.glob("grid/*/runs/*/checkpoint.pt"))) == 2)
    os.kill(training(tmp_path)[0], signal.SIGKILL)
    wait_for(lambda: any("--resume" in path.read_text() for path in tmp_path.glob("grid/*/log.txt")))
    process.kill()
    process.communicate()
    wait_for(lambda: not training(tmp_path))  # none is left behind
    before = [torch.load(path, weights_only=True)["step"] for path in tmp_path.glob("grid/*/runs/*/checkpoint.pt")]
    assert max(before) > 0 and not list(tmp_path.glob("grid/*/finished"))
    process = start(experiment, *options)
    out, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    assert "2 runs, 0 of them finished before" in out and "2 of 2 runs finished" in out
    assert len(list(tmp_path.glob("grid/*/runs/*"))) == 2  # resumed, not begun again
    out, _ = start(experiment, *options).communicate(timeout=60)
    assert "2 runs, 2 of them finished before" in out


def test_ctrl_c_leaves_checkpoints(experiment, tmp_path):
    process = start(experiment, "--seeds", 1, "--total-timesteps", 64 * 5000, "--methods", "VSOP")
    wait_for(lambda: list(tmp_path.glob("grid/*/runs/*/checkpoint.pt")))
    time.sleep(1)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130 and errors == "stopped; the same command goes on\n", errors
    (log,) = tmp_path.glob("grid/*/log.txt")
    assert "stopped at step" in log.read_text() and not training(tmp_path)


@pytest.mark.parametrize("options, expected", [
    (("nothing",), "there is no experiment 'nothing'; there are baselines"),
    (("baselines", "--tasks", "Hoper-v4"), "the experiment has no task 'Hoper-v4'; it has Ant-v4"),
    (("baselines", "--methods", "SAC"), "the experiment has no method 'SAC'; it has VSOP"),
    (("baselines", "--address", "127.0.0.1:1"), "there is no Ray cluster at 127.0.0.1:1: "),
    (("baselines", "--jobs", "0"), "--jobs must be at least 1, got 0"),
    (("baselines", "--seeds", "0"), "--seeds must be at least 1, got 0"),
])  # fmt: skip
def test_bad_input_is_one_line(options, expected, tmp_path):
    done = subprocess.run(command(*options), cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith(f"error: {expected}") and done.stderr.count("\n") == 1, (
        done.stderr
    )


def test_a_run_that_cannot_work_is_reported(experiment, tmp_path):
    experiment.write_text(f'tasks = ["Pendulum-v1"]\n[methods]\nX = "vsop_continuous.py {TINY} --learning-rate -1"\n')
    process = start(experiment, "--seeds", 1, "--total-timesteps", 640)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 1 and "X, Pendulum-v1, seed 1: failed with exit code 2, see " in errors
    (log,) = tmp_path.glob("grid/*/log.txt")
    assert log.read_text().count("$ ") == 1  # a bad argument is not tried again


@pytest.mark.slow
def test_two_nodes(experiment):
    """A cluster of two Ray nodes on the loopback, which share this machine's files."""
    env = os.environ | dict(RAY_AUTH_MODE="disabled")
    ray = (Path(sys.executable).parent / "ray", "start", "--num-cpus=1", "--disable-usage-stats", "--block")
    address = "127.0.0.1:6399"
    with tempfile.TemporaryDirectory() as folder:  # sockets need a short path
        head = (
            "--head",
            "--port=6399",
            "--node-ip-address=127.0.0.1",
            "--include-dashboard=false",
            f"--temp-dir={folder}",
        )
        nodes = [subprocess.Popen([*ray, *head], env=env, stdout=subprocess.DEVNULL)]
        try:
            time.sleep(15)
            nodes.append(subprocess.Popen([*ray, f"--address={address}"], env=env, stdout=subprocess.DEVNULL))
            time.sleep(15)
            options = ("--seeds", "3", "--total-timesteps", "6400", "--address", address, "--folder", "grid")
            line = command(experiment, *options)
            done = subprocess.run(line, cwd=experiment.parent, env=env, capture_output=True, text=True, timeout=300)
            assert "6 of 6 runs finished" in done.stdout, done.stderr
            assert all(node.poll() is None for node in nodes)
        finally:
            for node in nodes:
                node.terminate()
                node.wait()


def test_curve_is_the_mean_of_the_last_hundred_episodes():
    rng = np.random.default_rng(0)
    steps, returns = np.cumsum(rng.integers(1, 30, size=500)), rng.normal(size=500)
    grid, found = report.curve(steps, returns, 7000)
    assert grid[0] == 70 and grid[-1] == 7000 and len(grid) == 100
    for step, value in zip(grid, found):
        known = returns[steps <= step][-100:]
        assert np.isnan(value) if not len(known) else value == pytest.approx(known.mean())


def test_interval_covers_the_mean():
    rng = np.random.default_rng(0)
    inside = 0
    for seed in range(200):
        low, high = report.interval(rng.normal(size=20), seed=seed)
        inside += low < 0 < high
    assert 170 < inside < 200
    assert all(np.isnan(report.interval([1.0])))


def test_profile_and_probability_are_those_of_rliable():
    rng = np.random.default_rng(0)
    x, y = rng.integers(5, size=(3, 4)), rng.integers(5, size=(2, 4))  # integers, so that there are ties
    y[:, 3] = x[0, 3]
    thresholds = np.linspace(-1, 5, 13)
    np.testing.assert_allclose(report.profile(x, thresholds), library.score_distributions(x, thresholds))
    expected = metrics.probability_of_improvement(x, y)
    assert report.probability_of_improvement(x, y) == pytest.approx(expected)


def test_scores_and_normalization():
    table = pd.DataFrame(dict(
        method="PPO", task="Hopper-v4", seed=[1, 1, 2, 2], total=100, minutes=1.0, step=[50, 100, 50, 100],
        value=[1.0, 3.0, 5.0, 7.0],
    ))  # fmt: skip
    rows = report.scores(table)
    assert rows["final"].tolist() == [3.0, 7.0] and rows["area"].tolist() == [2.0, 6.0]
    found = report.matrices(rows, "final", ["PPO", "VSOP"], ["Hopper-v4"])
    np.testing.assert_array_equal(found["PPO"], [[3.0], [7.0]])
    assert "VSOP" not in found


def test_a_method_with_a_task_missing_takes_none_from_the_others(tmp_path, monkeypatch):
    tasks = ["Hopper-v4", "Reacher-v4"]
    runs = [(method, task) for method in ("VSOP", "PPO", "A3C") for task in tasks][:-1]
    columns = dict(seed=1, total=100, minutes=1.0, step=100, value=1.0)
    table = pd.DataFrame([dict(method=method, task=task) | columns for method, task in runs])
    monkeypatch.setattr(report, "REPS", 10)
    reference = dict(
        random=dict.fromkeys(tasks, 0.0), ppo=report.scores(table).set_index("task")[["final", "area"]][2:4]
    )
    monkeypatch.setattr(report, "references", lambda total: reference)
    page = report.section(table, 100, runner.load_experiment("baselines"), tmp_path)
    assert "What follows is over the tasks that PPO has: Hopper-v4, Reacher-v4." in page
    assert "What follows is of the methods that have all these tasks: VSOP, PPO." in page
    aggregates = page[page.index("## Final return over all tasks") + 1]
    assert "| VSOP | 1.00" in aggregates and "| PPO | 1.00" in aggregates and "A3C" not in aggregates


@pytest.mark.parametrize("name", ["baselines", "mechanisms"])
def test_every_method_has_a_published_value_for_every_task(name):
    experiment, published = runner.load_experiment(name), report.published(1_000_000)
    assert not {(m, t) for m in experiment.methods for t in experiment.tasks} - set(published)


def test_histograms_hold_the_advantages(tmp_path):
    """Against numpy's histogram of the values; the log has them in buckets of its own."""
    from torch.utils.tensorboard import SummaryWriter

    rng, folder = np.random.default_rng(0), tmp_path / "runs" / "run"
    values = {step: rng.normal(0.05, 0.1, size=20_000) for step in range(1000, 7000, 1000)}
    with SummaryWriter(str(folder)) as writer:
        for step, x in values.items():
            writer.add_histogram("vsop/advantages", x, step)
            writer.add_histogram("vsop/relu_advantages", np.maximum(x, 0.0), step)
    (folder / "checkpoint.pt").touch()
    report.save_histograms(tmp_path / "found.json", runner.Run("VSOP", "Humanoid-v4", 1, [], tmp_path, 6000))
    found = json.loads((tmp_path / "found.json").read_text())
    for tag, change in (("vsop/advantages", lambda x: x), ("vsop/relu_advantages", lambda x: np.maximum(x, 0.0))):
        assert [row["step"] for row in found["tags"][tag]] == list(values)
        for row in found["tags"][tag]:
            counts, _ = np.histogram(change(values[row["step"]]), found["edges"])
            np.testing.assert_allclose(np.cumsum(row["shares"]), np.cumsum(counts) / 20_000, atol=0.02)


@pytest.mark.parametrize("name", sorted(path.parent.name for path in ROOT.glob("benchmark/results/*/curves.csv.gz")))
def test_the_committed_table_alone_makes_the_committed_page(name, tmp_path, monkeypatch):
    results = ROOT / "benchmark" / "results"
    page = (results / name / "README.md").read_text()
    monkeypatch.setattr(report, "RESULTS", tmp_path / "results")
    subprocess.run(["cp", "-r", str(results), str(tmp_path / "results")], check=True)
    for path in (tmp_path / "results" / name).glob("*.png"):
        path.unlink()
    (tmp_path / "results" / name / "README.md").unlink()
    report.main(report.Args(name, folder=tmp_path / "nothing"))
    assert (tmp_path / "results" / name / "README.md").read_text() == page
    for image in re.findall(r"\]\((\w+\.png)\)", page):
        assert (tmp_path / "results" / name / image).stat().st_size > 10_000
