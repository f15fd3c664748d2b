"""The grid of runs and its report."""

import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import tyro
from conftest import ROOT, alive, cli_args, load, scalars, wait_for
from PIL import Image
from rliable import metrics
from scipy import stats

sys.path.insert(0, str(ROOT / "benchmark"))
import common
import off_policy
import report
import run as runner

EXPERIMENTS = sorted(path.stem for path in (ROOT / "benchmark" / "experiments").glob("*.toml"))
FAKE = "tests/fake_script.py"


# ----------------------------------------------------------------------------------------------------- experiments


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_commands_of_the_experiments_are_legal(name):
    experiment = runner.load_experiment(name)
    assert len(experiment.tasks) == dict(procgen=16, classic=4, minatar=4, tuned=7, candidates=5).get(name, 10)
    if experiment.seeds_per_run:
        pytest.importorskip("gymnax")
    for command in experiment.methods.values():
        script, *flags = shlex.split(command)
        flags += ["--env-id", experiment.tasks[0], "--seed", "3"]
        if script == "benchmark/off_policy.py":
            off_policy.parse(flags)
        else:
            tyro.cli(cli_args(script.removesuffix(".py")), args=flags)


def test_parallel_rollouts_have_the_same_size():
    for command in runner.load_experiment("parallel").methods.values():
        sizes = [int(re.search(rf"--num-{what} (\d+)", command)[1]) for what in ("envs", "steps")]
        assert sizes[0] * sizes[1] == 2048


def test_experiments_share_runs(tmp_path):
    def folders(name, seeds=2, total=100, **options):
        runs = runner.grid(runner.load_experiment(name), seeds, total, tmp_path, **options)
        return {run.folder for run in runs}

    assert len(folders("baselines")) == 140
    assert len(folders("baselines", methods=("VSOP",)) & folders("timelimit")) == 20
    assert not folders("baselines", total=10) & folders("baselines", total=20)


def test_seeds_in_blocks(tmp_path):
    """The last block may be smaller. Names are those of runs that exist already."""
    runs = runner.grid(runner.load_experiment("minatar"), 5, 1_000_000, tmp_path, ["Breakout-MinAtar"], ["VSOP"])
    own = "--env-id Breakout-MinAtar --seed 3 --total-timesteps 1000000"
    assert runs[1].command == [str(ROOT / "vsop_gymnax.py"), "--num-seeds", "2", *own.split()]
    names = [f"Breakout-MinAtar__vsop_gymnax__num-seeds_{block}__1000000" for block in ("2__1", "2__3", "1__5")]
    assert [run.folder.name for run in runs] == names


# ------------------------------------------------------------------------------------------------------------ runs


def start_execute(folder, steps):
    code = "import sys; from common import Path, execute; print(execute(sys.argv[2:], Path(sys.argv[1])))"
    own = ["--env-id", "T", "--seed", "1", "--total-timesteps", str(steps)]
    line = [sys.executable, "-c", code, str(folder), str(ROOT / FAKE), *own]
    env = os.environ | dict(PYTHONPATH=str(ROOT / "benchmark"))
    return subprocess.Popen(line, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_killed_run_is_resumed(tmp_path):
    process = start_execute(tmp_path, 100)
    wait_for(lambda: list(tmp_path.glob("runs/*/checkpoint.pt")))
    os.kill(int(*alive(tmp_path)), signal.SIGKILL)
    assert process.communicate(timeout=60)[0] == "finished\n"
    assert (tmp_path / "log.txt").read_text().count("$ ") == 2 and len(list(tmp_path.glob("runs/*"))) == 1


def test_two_processes_do_not_train_the_same_run_twice(tmp_path):
    both = [start_execute(tmp_path, 50) for _ in range(2)]
    assert [process.communicate(timeout=60)[0] for process in both] == ["finished\n"] * 2
    assert (tmp_path / "log.txt").read_text().count("$ ") == 1


@pytest.fixture
def experiment(tmp_path):
    path = tmp_path / "tiny.toml"
    path.write_text(f'tasks = ["T"]\n[methods]\nA = "{FAKE}"\nB = "{FAKE} --learning-rate 1e-3"\n')
    return path


def in_background():
    """Shells ignore SIGINT in background jobs."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def start(experiment, *options):
    line = [sys.executable, str(ROOT / "benchmark" / "run.py"), str(experiment), "--folder", "grid", *map(str, options)]
    env = os.environ | {f"FAKE_{name.upper()}": str(experiment.parent / name) for name in ("broken", "fast")}
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    return subprocess.Popen(line, cwd=experiment.parent, env=env, preexec_fn=in_background, **pipes)


def report_of(experiment) -> str:
    line = [sys.executable, str(ROOT / "benchmark" / "report.py"), str(experiment), "--folder", "grid"]
    subprocess.run(line, cwd=experiment.parent, check=True, capture_output=True)
    return (experiment.parent / "grid" / "report" / experiment.stem / "README.md").read_text()


def test_a_grid_resumes_after_a_kill_and_after_a_signal(experiment, tmp_path):
    """No run is left behind, none starts again from the beginning, finished runs are skipped."""
    steps = 3000
    options = ("--seeds", 1, "--total-timesteps", steps, "--jobs", 2)
    process = start(experiment, *options)
    wait_for(lambda: len(list(tmp_path.glob("grid/*/runs/*/checkpoint.pt"))) == 2)
    time.sleep(0.5)
    process.kill()
    process.communicate()
    wait_for(lambda: not alive(tmp_path))
    assert not list(tmp_path.glob("grid/*/finished"))

    logs = list(tmp_path.glob("grid/*/log.txt"))
    process = start(experiment, *options)
    wait_for(lambda: all(re.search(r"--resume.*\nstep ", log.read_text().rpartition("$ ")[2]) for log in logs))
    process.send_signal(signal.SIGTERM)
    out, errors = process.communicate(timeout=40)
    assert process.returncode == 143 and errors.count("\n") == 1, errors
    assert all("stopped at step" in log.read_text().splitlines()[-1] for log in logs) and not alive(tmp_path)

    (tmp_path / "fast").touch()
    process = start(experiment, *options)
    out, errors = process.communicate(timeout=120)
    assert process.returncode == 0 and "2 of 2 runs finished" in out, errors
    assert len(list(tmp_path.glob("grid/*/runs/*"))) == 2
    for log in logs:
        done = [int(step) for step in re.findall(rf"^step (\d+)/{steps}", log.read_text(), re.M)]
        assert done[-1] == steps and len(done) < 1.5 * steps
    out, _ = start(experiment, *options).communicate(timeout=60)
    assert "2 already finished" in out

    page = report_of(experiment)
    assert "| A | 0.50 |" in page and "| B | 1.00 |" in page


def test_a_run_of_several_seeds(experiment, tmp_path):
    """The experiment's own seeds and steps, in blocks; resumed after a signal; reported seed by seed."""
    text = experiment.read_text()
    experiment.write_text("seeds = 3\ntotal_timesteps = 2000\nseeds_per_run = 2\n" + text)
    process = start(experiment, "--jobs", 4)
    wait_for(lambda: len(list(tmp_path.glob("grid/*/runs/*/checkpoint.npz"))) == 4)
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=40)[0].startswith("4 runs") and process.returncode == 143
    (tmp_path / "fast").touch()
    out, errors = start(experiment).communicate(timeout=120)
    assert "4 of 4 runs finished" in out and len(list(tmp_path.glob("grid/*/runs/*"))) == 4, errors
    assert all("step 4000/4000" in log.read_text() for log in tmp_path.glob("grid/*__num-seeds_2__1__2000/log.txt"))
    page = report_of(experiment)
    assert "| T | 3 | 0.50 (0.00) | 1.00 (0.00) |" in page
    assert "| A | 2 | 2.00 |" in page and "| B | 1 | 1.00 |" in page
    table = pd.read_csv(tmp_path / "grid" / "report" / "tiny" / "curves.csv.gz")
    finals = table[table["method"] == "A"].groupby("seed")["value"].last()
    assert finals.to_dict() == {1: 0.501, 2: 0.502, 3: 0.503}


@pytest.mark.slow
def test_ctrl_c_leaves_checkpoints_of_a_real_script(experiment, tmp_path):
    flags = "--num-steps 64 --no-compile"
    experiment.write_text(f'tasks = ["Pendulum-v1"]\n[methods]\nVSOP = "vsop_continuous.py {flags}"\n')
    process = start(experiment, "--seeds", 1, "--total-timesteps", 10_000_000)
    wait_for(lambda: list(tmp_path.glob("grid/*/runs/*/checkpoint.pt")))
    time.sleep(5)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=120)
    (log,) = tmp_path.glob("grid/*/log.txt")
    assert process.returncode == 130 and errors.count("\n") == 1 and "stopped at step" in log.read_text()


def test_a_run_that_fails_is_reported(experiment, tmp_path):
    (tmp_path / "broken").touch()
    process = start(experiment, "--seeds", 1, "--total-timesteps", 10, "--methods", "A")
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 1, errors
    (log,) = tmp_path.glob("grid/*/log.txt")
    assert "it is broken" in errors and errors.count("\n") == 1
    assert log.read_text().count("$ ") == 1  # a bad argument is not tried again


@pytest.mark.slow
def test_two_nodes(experiment):
    """A cluster of two Ray nodes on the loopback, which share this machine's files."""
    env = os.environ | dict(RAY_AUTH_MODE="disabled")
    options = dict(env=env, stdout=subprocess.DEVNULL, start_new_session=True)
    ray = (Path(sys.executable).parent / "ray", "start", "--num-cpus=1", "--disable-usage-stats", "--block")
    address = "127.0.0.1:6399"
    with tempfile.TemporaryDirectory() as folder:  # sockets need a short path
        head = ["--head", "--port=6399", "--node-ip-address=127.0.0.1", "--include-dashboard=false"]
        nodes = [subprocess.Popen([*ray, *head, f"--temp-dir={folder}"], **options)]
        try:
            time.sleep(15)
            nodes.append(subprocess.Popen([*ray, f"--address={address}"], **options))
            time.sleep(15)
            process = start(experiment, "--seeds", "3", "--total-timesteps", "100", "--address", address)
            out, errors = process.communicate(timeout=300)
            assert "6 of 6 runs finished" in out, errors
            assert all(node.poll() is None for node in nodes)
        finally:
            for node in nodes:
                node.terminate()
                node.wait()
                with contextlib.suppress(ProcessLookupError):  # Ray's agents may outlive their node
                    os.killpg(node.pid, signal.SIGKILL)


# ------------------------------------------------------------------------------------------------------- bad input


def refused(monkeypatch, capsys, main, *arguments) -> str:
    """The one line on stderr with which a program ends."""
    monkeypatch.setattr(sys, "argv", ["program", *map(str, arguments)])
    with pytest.raises(SystemExit) as stop:
        main()
    error = capsys.readouterr().err
    assert stop.value.code == 2 and error.startswith("error: ") and error.count("\n") == 1, error
    return error


@pytest.mark.parametrize("options", [
    "--tasks Hoper-v4", "--methods DQN", "--address 127.0.0.1:1", "--jobs 0", "--seeds x", "--total-timesteps inf",
    "--gpus-per-run nan", "--gpus-per-run 2", "--nothing 1",
])  # fmt: skip
def test_a_bad_flag_is_one_line(options, tmp_path, monkeypatch, capsys):
    arguments = ["baselines", "--folder", tmp_path, *options.split()]
    assert options.split()[0] in refused(monkeypatch, capsys, runner.main, *arguments)


@pytest.mark.parametrize("text", [
    "A=5", 'tasks = "x', 'tasks = "x"\n[methods]\nA = "vsop_continuous.py"', 'tasks = "mujoco"\n[methods]\nA = 5',
    'tasks = "mujoco"\n[methods]\nA = "vsop_continuous.py \'"', 'tasks = "mujoco"\n[methods]\nA = "nothing.py"',
    'tasks = "mujoco"\nmethods = 3', "tasks = [1]\n[methods]", 'tasks = ["T"]\nseeds = 0\n[methods]',
    'tasks = ["T"]\nseeds_per_run = "2"\n[methods]',
])  # fmt: skip
def test_a_bad_experiment_is_one_line(text, tmp_path, monkeypatch, capsys):
    (tmp_path / "bad.toml").write_text(text)
    assert "bad.toml" in refused(monkeypatch, capsys, runner.main, tmp_path / "bad.toml", "--folder", tmp_path)
    assert "nothing" in refused(monkeypatch, capsys, runner.main, "nothing")


def test_gpus_without_a_gpu_are_refused(tmp_path, monkeypatch, capsys):
    import ray

    monkeypatch.setattr(ray, "init", lambda *args, **options: None)
    monkeypatch.setattr(ray, "cluster_resources", lambda: dict(CPU=2.0))
    options = ("baselines", "--folder", tmp_path, "--gpus-per-run", 0.5)
    assert "--gpus-per-run" in refused(monkeypatch, capsys, runner.main, *options)


@pytest.mark.parametrize("program, package", [("benchmark/run.py", "ray"), ("sweeps/offline.py", "optuna")])
def test_a_missing_package_is_one_line(program, package, tmp_path):
    (tmp_path / f"{package}.py").write_text(f"raise ModuleNotFoundError('No module named {package}')")
    line = [sys.executable, str(ROOT / program), "baselines", "--folder", str(tmp_path / "grid")]
    done = subprocess.run(line, env=os.environ | dict(PYTHONPATH=str(tmp_path)), capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
    assert package in done.stderr


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "file").touch()
    line = [sys.executable, str(ROOT / "benchmark" / "run.py"), "baselines", "--folder", str(tmp_path / "file" / "x")]
    done = subprocess.run(line, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith("error: ") and done.stderr.count("\n") == 1


# ---------------------------------------------------------------------------------------------------------- report


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


def test_probability_of_improvement_is_that_of_rliable():
    rng = np.random.default_rng(0)
    x, y = rng.integers(5, size=(3, 4)), rng.integers(5, size=(2, 4))  # integers, so that there are ties
    y[:, 3] = x[0, 3]
    assert report.probability_of_improvement(x, y) == pytest.approx(metrics.probability_of_improvement(x, y))


def test_scores():
    table = pd.DataFrame(dict(
        method="PPO", task="Hopper-v4", seed=[1, 1, 2, 2], total=100, minutes=1.0, step=[50, 100, 50, 100],
        value=[1.0, 3.0, 5.0, 7.0],
    ))  # fmt: skip
    rows = report.scores(table)
    assert rows["final"].tolist() == [3.0, 7.0] and rows["area"].tolist() == [2.0, 6.0]
    found = report.matrices(rows, "final", ["PPO", "VSOP"], ["Hopper-v4"])
    np.testing.assert_array_equal(found["PPO"], [[3.0], [7.0]])
    assert "VSOP" not in found


def rows_of(finals: dict, task="T"):
    """A table of scores: the final returns of each method by seed."""
    rows = [(method, task, seed, x) for method, values in finals.items() for seed, x in enumerate(values, 1)]
    return pd.DataFrame(rows, columns=["method", "task", "seed", "final"])


def test_ranks():
    """Differences count seed by seed. Ties share a rank, and the next one counts all of them."""
    luck = np.array([0.0, 50.0, -50.0, 20.0])  # of a seed, the same for all methods: only paired tests see past it
    finals = dict(A=luck, B=luck + [0.1, -0.1, 0.1, -0.1], C=luck - [2.0, 2.1, 1.9, 2.0], D=luck - [9.0, 8.8, 9.1, 9.0])
    assert report.ranks(rows_of(finals), list("ABCD"), "T") == [1, 1, 3, 4]
    assert report.ranks(rows_of(finals), list("DCA"), "T") == [3, 2, 1]
    assert report.ranks(rows_of(dict(A=luck, B=luck)), list("AB"), "T") == [1, 1]


def test_what_differs_from_the_published_means_is_marked(monkeypatch):
    monkeypatch.setattr(report, "published", lambda: {("A", "T"): [10.0], ("B", "T"): [10.0]})
    table = report.error_table(rows_of(dict(A=[11.0, 13.0], B=[12.0, 14.0], C=[1.0, 1.0])), list("ABC"), ["T"])
    assert table.splitlines()[2:] == [
        "| T | 2 | 12.0 (1.00) | 13.0 (1.00) * | 1.00 (0.00) |", "| published | 20 | 10.0 | 10.0 |  |",
    ]  # fmt: skip


def test_methods_are_compared_on_the_seeds_that_all_have():
    rows = rows_of(dict(A=[1.0, 2.0, 3.0], B=[4.0, 5.0]))
    other = rows_of(dict(A=[1.0, 2.0, 3.0]), task="U")
    shared = report.shared_seeds(pd.concat([rows, other]))
    assert shared.groupby(["task", "method"]).size().to_dict() == {("T", "A"): 2, ("T", "B"): 2, ("U", "A"): 3}


def test_ppo_is_read_at_the_number_of_steps(tmp_path, monkeypatch):
    """From the shortest runs that are long enough, as the mean over seeds; other methods do not count."""
    rows = [
        ("PPO", "A", seed, total, step, value + seed)
        for seed in (1, 2)
        for total in (100, 200)
        for step, value in ((total // 2, total), (total, 2 * total))
    ]
    rows += [("VSOP", "A", 1, 100, 100, 9e9), ("PPO", "B", 1, 100, 100, -9.0), ("PPO", "C", 1, 100, 100, 1.0)]
    (tmp_path / "x").mkdir()
    pd.DataFrame(rows, columns="method task seed total step value".split()).to_csv(tmp_path / "x" / "curves.csv.gz")
    (tmp_path / "random.json").write_text('{"scores": {"A": {"mean": -40}, "B": {"mean": 0}}}')
    monkeypatch.setattr(common, "RESULTS", tmp_path)
    assert common.references(100).loc["A"].tolist() == [-40, 201.5, 151.5, 100]
    assert common.references(50).loc["A"].tolist() == [-40, 101.5, 101.5, 100]
    assert common.references(130).loc["A"].tolist() == [-40, 201.5, 201.5, 200]
    assert list(common.references(100).index) == ["A"] and not len(common.references(201))  # B is below random


def test_committed_pages_share_runs_of_the_same_command(tmp_path, monkeypatch):
    """Only those: of another task or length, or of a method that only has the same name, no row is taken."""
    rows = [dict(method=m, task=t, seed=1, total=n, minutes=1.0, step=n, value=5.0) for m, t, n in (
        ("VSOP", "Hopper-v4", 10), ("VSOP", "Hopper-v4", 30), ("VSOP", "CartPole-v1", 10), ("PPO", "Hopper-v4", 10))
    ]  # fmt: skip
    (tmp_path / "baselines").mkdir()
    pd.DataFrame(rows).to_csv(tmp_path / "baselines" / "curves.csv.gz", index=False)
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    vsop = runner.load_experiment("baselines").methods["VSOP"]
    experiment = runner.Experiment("own", ["Hopper-v4"], {"ours": vsop, "PPO": "ppo_continuous.py --gamma 0.5"})
    own = dict(method="PPO", task="Hopper-v4", seed=2, total=10, minutes=1.0, step=10, value=4.0)
    pd.DataFrame([own]).to_csv(tmp_path / "own.csv.gz", index=False)
    for _ in range(2):
        table = report.update_table(tmp_path / "own.csv.gz", [], False, report.other_pages(experiment))
        assert table[report.KEYS].values.tolist() == [["PPO", "Hopper-v4", 2, 10], ["ours", "Hopper-v4", 1, 10]]


def test_committed_runs_have_ppo_on_all_tasks():
    for steps in (300_000, 1_000_000):
        assert set(common.TASKS["mujoco"]) <= set(common.references(steps).index)


@pytest.mark.parametrize("complete", [("VSOP", "PPO"), ("VSOP",)])
def test_a_method_without_all_tasks_is_compared_on_those_it_has(complete, tmp_path, monkeypatch):
    """The others on all tasks, if there are two of them."""
    tasks, methods = ["Hopper-v4", "Reacher-v4", "Swimmer-v4"], (*complete, "A3C")
    runs = [(method, task) for method in methods for task in tasks][:-1]
    columns = dict(seed=1, total=100, minutes=1.0, step=100, value=1.0)
    table = pd.DataFrame([dict(method=method, task=task) | columns for method, task in runs])
    monkeypatch.setattr(report, "REPS", 10)
    reference = pd.DataFrame(dict(random=0.0, final=1.0, area=1.0, length=100), index=tasks)
    monkeypatch.setattr(report, "references", lambda total: reference)
    figure, page = report.section(table, 100, runner.load_experiment("baselines"), tmp_path)
    parts = [part for part in "\n".join(page).split("\n## ") if part.startswith("Over")]
    expected = [(3, complete, ""), (2, methods, "_shared")][len(complete) == 1 :]
    for part, (count, names, _) in zip(parts, expected, strict=True):
        assert part.startswith(f"Over {count} tasks, {len(names)} methods")
        assert all((f"| {method} | 1.00" in part) == (method in names) for method in methods)
    assert figure == f"![aggregates of the final return](baselines_return_100{expected[0][2]}.png)"
    for image in re.findall(r"\]\((\w+\.png)\)", "\n".join(page)):
        assert (tmp_path / image).stat().st_size > 10_000


@pytest.mark.parametrize("name", ["baselines", "mechanisms"])
def test_every_method_has_a_published_value_for_every_task(name):
    experiment = runner.load_experiment(name)
    assert not {(m, t) for m in experiment.methods for t in experiment.tasks} - set(common.published())


def test_the_authors_own_aggregate():
    """0 is a random policy, 1 is their PPO; the interquartile mean leaves out a quarter of the tasks at each end."""
    random, theirs = json.loads((common.RESULTS / "random.json").read_text())["scores"], common.published(1_000_000)
    x = []
    for task in common.TASKS["mujoco"]:
        zero, (vsop,), (ppo,) = random[task]["mean"], theirs["VSOP", task], theirs["PPO", task]
        x.append((vsop - zero) / (ppo - zero))
    row = f"| {np.median(x):.2f} | {stats.trim_mean(x, 0.25):.2f} | {np.mean(x):.2f} |"
    table = report.authors_table(runner.load_experiment("baselines"))
    assert f"| VSOP at 1,000,000 {row}" in table and f"| {sum(y > 1 for y in x)} of 10 |" in table
    assert report.authors_table(runner.load_experiment("classic")) == ""  # no random policy was measured there


def test_tables_of_claims():
    """Ours beside the published values of the same length. Of fewer than three seeds the runs are shown."""
    experiment = runner.Experiment("x", ["Own-v0", "Hopper-v4"], dict.fromkeys(("VSOP", "PPO", "A3C", "SAC"), "x.py"))
    rows = rows_of(dict(VSOP=[1.0, 2.0], PPO=[5.0, 5.0, 5.0], A3C=[7.0]), task="Hopper-v4")
    page = report.claim_tables(rows, experiment, ["VSOP", "PPO", "A3C"], 1_000_000)
    assert page[::2] == [f"### VSOP against {name}" for name in ("PPO", "A3C", "SAC")]
    head, _, *lines = page[1].splitlines()
    assert head == "| task | VSOP | PPO | VSOP, published at 1,000,000 | PPO, published at 1,000,000 |"
    assert lines == ["| Hopper-v4 | 1.00 and 2.00 | 5.00 [5.00, 5.00] | 1,700 | 2,200 |"]
    assert page[3].splitlines()[2] == "| Hopper-v4 | 1.00 and 2.00 | 7.00 | 1,827 | 962 [732, 1,202] |"
    assert page[5].splitlines()[0] == "| task | VSOP | VSOP, published at 3,000,000 | SAC, published at 3,000,000 |"


@pytest.mark.parametrize(
    "methods, head",
    [(["VSOP"], "VSOP | VSOP, published at 3,000,000"),
     (["A3C", "SAC"], "A3C | SAC | A3C, published at 3,000,000 | SAC, published at 3,000,000")],
)  # fmt: skip
def test_one_table_where_there_is_nothing_to_compare(methods, head):
    """A method alone, or without the first one."""
    experiment = runner.Experiment("x", ["Hopper-v4"], dict.fromkeys(("VSOP", "PPO", "A3C", "SAC"), "x.py"))
    rows = rows_of(dict.fromkeys(methods, [1.0]), task="Hopper-v4")
    title, table = report.claim_tables(rows, experiment, methods, 200_000)
    assert title == f"### {' against '.join(methods)}"
    assert table.splitlines()[0] == f"| task | {head} |" and table.splitlines()[2].startswith("| Hopper-v4 | 1.00 |")


def test_counts_of_tasks():
    """Y is worse in the mean on A, B and C, of those on A and B with all seeds. On D it is better, on E not run."""
    returns = dict(A=([3, 4], [1, 2]), B=([3, 4], [1]), C=([3, 4], [1, 5]), D=([3, 4], [9]), E=([3], []))
    rows = pd.concat(rows_of(dict(zip(("X", "Y"), values)), task=task) for task, values in returns.items())
    title, table = report.count_table(rows, [("X", "Y"), ("X", "none")], list(returns))
    assert table.splitlines()[2:] == ["| Y against X | 4 | 3 | 2 | 1 | 0.62 |"]  # 10 of the 16 signs are as uneven
    assert report.count_table(rows, [("X", "Y")], ["A"]) == []


def test_variants_are_compared_with_their_method():
    experiment = runner.load_experiment("timelimit")
    rows = rows_of({method: [1.0] for method in experiment.methods}, task="Hopper-v4")
    page = report.claim_tables(rows, experiment, list(experiment.methods), 1_000_000)
    pairs = [("VSOP", "VSOP as published"), ("VSOP", "PPO"), ("PPO", "PPO as published")]
    assert page[::2] == [f"### {first} against {second}" for first, second in pairs]
    assert page[1].splitlines()[2] == "| Hopper-v4 | 1.00 | 1.00 | 1,700 |"


def test_histograms_contain_the_advantages(tmp_path):
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


def test_notes_come_after_the_figure_and_what_has_a_heading_after_the_tables(tmp_path, monkeypatch):
    monkeypatch.setattr(report.plt.Figure, "savefig", lambda *args: None)
    folder = tmp_path / "report" / "procgen"
    folder.mkdir(parents=True)
    (folder / "curves.csv.gz").write_bytes((common.RESULTS / "procgen" / "curves.csv.gz").read_bytes())
    (folder / "notes.md").write_text("It is good.\n\n## Details\n\nMore.\n")
    report.main(SimpleNamespace(experiment="procgen", folder=tmp_path, committed=False))
    page = (folder / "README.md").read_text()
    assert re.match(r"# ProcGen\n\n!\[.*\]\(\w+\.png\)\n\nIt is good\.\n\n", page)
    assert page.endswith("\n\n## Details\n\nMore.\n") and page.count(".png") == 1


def numbers_of(path):
    return [line for line in path.read_text().splitlines() if line.startswith("|")]


@pytest.mark.parametrize("name", sorted(path.parent.name for path in ROOT.glob("benchmark/results/*/curves.csv.gz")))
def test_the_committed_page_has_the_numbers_of_the_committed_table(name, tmp_path, monkeypatch):
    committed = ROOT / "benchmark" / "results" / name
    monkeypatch.setattr(report.plt.Figure, "savefig", lambda *args: None)
    (tmp_path / "report" / name).mkdir(parents=True)
    for file in ("curves.csv.gz", "notes.md"):
        (tmp_path / "report" / name / file).write_bytes((committed / file).read_bytes())
    report.main(SimpleNamespace(experiment=name, folder=tmp_path, committed=False))
    found = numbers_of(tmp_path / "report" / name / "README.md")
    assert found == numbers_of(committed / "README.md") and len(found) > 2


def cells(path) -> dict:
    """The cells of all rows that a page has for a task."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in numbers_of(path)]
    tasks = common.TASKS["mujoco"]
    return {task: [cell for first, *cells in rows if first == task for cell in cells] for task in tasks}


def test_the_tuned_experiment_has_the_settings_of_the_preset():
    script, *flags = runner.load_experiment("tuned").methods["VSOP, tuned"].split()
    args, preset = tyro.cli(cli_args("vsop_continuous"), args=flags), load("vsop_continuous").PRESETS["few-actions"]
    assert script == "vsop_continuous.py" and args == replace(cli_args("vsop_continuous")(), **preset)


def test_the_readme_has_the_numbers_of_the_pages():
    pages = [cells(ROOT / "benchmark" / "results" / name / "README.md") for name in ("timelimit", "tuned")]
    for task, (vsop, tuned, *others) in cells(ROOT / "README.md").items():
        assert len(others) == 4 and {vsop, *others} <= set(pages[0][task]), task
        assert tuned in (pages[1][task] or ["no preset"]), task
    aggregates = (ROOT / "benchmark" / "results" / "baselines" / "README.md").read_text()
    iqm = re.search(r"\| VSOP \|[^|]*\| (.*?) \|", aggregates.split("## Over")[1])[1]
    assert f"interquartile mean is {iqm}:" in (ROOT / "README.md").read_text()


# ------------------------------------------------------------------------------------------------------ off-policy


@pytest.mark.parametrize("algorithm", ["sac", "td3"])
def test_off_policy_baselines_log_what_the_scripts_log(algorithm, tmp_path, monkeypatch):
    settings = {"sac": off_policy.SAC_SETTINGS, "td3": off_policy.TD3_SETTINGS}[algorithm]
    monkeypatch.setitem(settings, "learning_starts", 400)
    monkeypatch.setitem(off_policy.SHARED, "batch_size", 8)
    models, make_model = [], off_policy.make_model
    monkeypatch.setattr(off_policy, "make_model", lambda *args: models.append(make_model(*args)) or models[0])
    monkeypatch.chdir(tmp_path)
    line = f"off_policy.py --algorithm {algorithm} --env-id Pendulum-v1 --seed 7 --total-timesteps 500 --no-cuda"
    monkeypatch.setattr(sys, "argv", line.split())
    off_policy.main()
    found, _ = scalars(tmp_path)
    assert [step for step, _ in found["charts/episodic_return"]] == [200, 400]
    assert all(-2000 < x < 0 for _, x in found["charts/episodic_return"])
    for tag in ("charts/SPS", "losses/actor_loss", "losses/critic_loss"):
        assert found[tag][-1][0] == 500 and np.isfinite(found[tag][-1][1])
    rates = [optimizer.param_groups[0]["lr"] for optimizer in (models[0].actor.optimizer, models[0].critic.optimizer)]
    assert rates == ([3e-4, 1e-3] if algorithm == "sac" else [3e-4, 3e-4])
    assert (256, 256) in [tuple(x.shape) for x in models[0].actor.parameters()]


@pytest.mark.parametrize("options", ["", "--algorithm ddpg", "--algorithm sac --seed -1", "--algorithm sac --env-id X"])
def test_a_bad_flag_of_the_off_policy_baselines_is_one_line(options, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert (options or "--algorithm").split()[-2:][0] in refused(monkeypatch, capsys, off_policy.main, *options.split())
    assert not list(tmp_path.iterdir())


def test_help_of_the_random_policy_measures_nothing():
    command = [sys.executable, str(ROOT / "benchmark" / "random_policy.py"), "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "random_policy.py" in done.stdout and "Ant-v4" not in done.stdout


# -------------------------------------------------------------------------------------------------------- policies


@pytest.mark.slow
def test_policies_are_collected_measured_and_filmed(tmp_path):
    """Of the longest run with seed 1."""
    tiny = "--num-steps 64 --num-minibatches 4 --update-epochs 1 --width 16 --no-compile".split()
    for run in runner.grid(runner.load_experiment("baselines"), 2, 128, tmp_path, ["Hopper-v4"], ["VSOP"]):
        assert common.execute([*run.command, *tiny], run.folder) == "finished"
    (longer,) = runner.grid(runner.load_experiment("baselines"), 1, 192, tmp_path, ["Hopper-v4"], ["VSOP"])
    assert common.execute([*longer.command, *tiny], longer.folder) == "finished"
    line = [sys.executable, ROOT / "benchmark" / "policies.py", "--folder", tmp_path, "--output", tmp_path / "policies"]
    done = subprocess.run(line, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    copied = (tmp_path / "policies" / "Hopper-v4.pt").read_bytes()
    assert copied == (common.latest_run(longer.folder) / "policy.pt").read_bytes()
    measured = re.findall(r"mean (-?[\d.]+), standard deviation ([\d.]+)\n", done.stdout)
    page = (tmp_path / "policies" / "README.md").read_text()
    row = re.search(r"\| Hopper-v4 \| 192 \| (\S+) \((\S+)\) \| (\S+) \((\S+)\) \| 1,827 \|", page).groups()
    assert [*map(float, row)] == pytest.approx([float(x) for pair in measured for x in pair], rel=0.01)
    with Image.open(tmp_path / "policies" / "policies.webp") as film:
        assert film.n_frames == 60 and film.size == (160, 160)


def test_no_policies_is_one_line(tmp_path):
    line = [sys.executable, ROOT / "benchmark" / "policies.py", "--folder", tmp_path, "--output", tmp_path / "none"]
    done = subprocess.run(line, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
