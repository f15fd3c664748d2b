"""The sweep files, on W&B's side and offline."""

import csv
import json
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import optuna
import pytest
import tyro
import yaml
from conftest import ROOT, load, wait_for
from optuna.trial import TrialState
from sweeps.config import schema_violations_from_proposed_config
from sweeps.params import HyperParameter
from wandb.sdk.launch.sweeps import utils as agent

sys.path.insert(0, str(ROOT / "sweeps"))
import objective
import offline

FILES = sorted(path.stem for path in (ROOT / "sweeps").glob("*.yaml"))
PENDULUM = "--tasks InvertedPendulum-v4 --seeds 1 --total-timesteps 320 --num-steps 64 --width 8 --no-compile --no-cuda"
TINY = {
    "continuous": PENDULUM.split(),
    "procgen": "--total-timesteps 64 --num-envs 2 --num-steps 32 --no-compile --no-cuda".split(),
}


def content(name) -> dict:
    return yaml.safe_load((ROOT / "sweeps" / f"{name}.yaml").read_text())


# ----------------------------------------------------------------------------------------------------------- files


def test_every_training_script_has_a_sweep():
    scripts = {path.stem for path in ROOT.glob("*.py") if "\ndef train(args: Args)" in path.read_text()}
    assert len(scripts) == 7 and scripts == set(FILES)


@pytest.mark.parametrize("name", FILES)
def test_wandb_accepts_the_file(name):
    config = content(name)
    assert schema_violations_from_proposed_config(config) == []
    assert config["method"] == "bayes" and config["metric"] == dict(name="objective", goal="maximize")
    assert (ROOT / config["program"]).is_file()
    config["parameters"]["gae-lambda"]["maximum"] = 2
    assert schema_violations_from_proposed_config(config)


@pytest.mark.parametrize("name", FILES)
def test_parameters_are_arguments_with_legal_values_at_both_ends(name):
    """By W&B's own idea of the ends, and by ours. The defaults, which the paper found, are in the space."""
    script, default = load(name), load(name).Args()
    for parameter, spec in content(name)["parameters"].items():
        found = offline.distribution(parameter, spec)
        wandbs = HyperParameter(parameter, spec)
        ends = found.choices if "values" in spec else (found.low, found.high, wandbs.ppf(1e-9), wandbs.ppf(1.0))
        for value in ends:
            args = tyro.cli(script.Args, args=[f"--{parameter}={value}"])
            assert getattr(args, parameter.replace("-", "_")) == pytest.approx(value)
        assert found._contains(found.to_internal_repr(getattr(default, parameter.replace("-", "_"))))


def test_the_space_is_the_papers():
    rate, gae_lambda, minibatches, epochs, norm, dropout = (
        offline.distribution(*item) for item in content("vsop_continuous")["parameters"].items()
    )
    assert (rate.low, rate.high, rate.step) == (1e-4, 1e-3, 5e-5)
    assert (gae_lambda.low, gae_lambda.high) == (0.5, 1.0)
    assert minibatches.choices == (1, 2, 4, 8, 16, 32, 64)
    assert (epochs.low, epochs.high) == (1, 10)
    assert (dropout.low, dropout.high) == (0.0, 0.1)
    assert "ent-coef" in content("vsop_procgen")["parameters"]
    assert "max-grad-norm" not in content("vsop_procgen")["parameters"]


@pytest.mark.parametrize("name", FILES)
def test_the_tasks_are_the_papers(name, monkeypatch):
    monkeypatch.chdir(ROOT)
    args, flags = offline.arguments(offline.load_sweep(Path("sweeps", f"{name}.yaml"), []).command, {})
    tasks = dict(continuous=["Reacher-v4", "Hopper-v4", "Humanoid-v4"], procgen=["bossfight"])
    assert args.script == f"{name}.py" and args.tasks == tasks[name.partition("_")[2]] and flags == []
    assert args.seeds == [1, 2] or name.endswith("procgen")


@pytest.mark.parametrize("name", FILES)
def test_the_command_runs_as_wandbs_agent_runs_it(name, tmp_path):
    """Values and command line by W&B's own code; what is logged is found in an offline run."""
    config = content(name)
    random.seed(0)
    values = {key: dict(value=HyperParameter(key, spec).sample()) for key, spec in config["parameters"].items()}
    macros = agent.create_sweep_command_args(dict(args=values))
    macros |= dict(env=["/usr/bin/env"], interpreter=[sys.executable], program=[config["program"]])
    line = []
    for word in map(str, agent.create_sweep_command(config["command"])):
        line += macros[word[2:-1]] if word.startswith("${") else [word]
    line += [*TINY[name.partition("_")[2]], "--folder", str(tmp_path / "trial")]
    env = os.environ | dict(WANDB_SWEEP_ID="abc", WANDB_RUN_ID="def", WANDB_MODE="offline", WANDB_DIR=str(tmp_path))
    done = subprocess.run(line, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "trial" / "objective.json").read_text())
    logged = next(tmp_path.glob("wandb/offline-run-*/run-def.wandb")).read_bytes()
    assert [[result["objective"]]] == list(result["returns"].values())
    assert b"objective" in logged and str(result["objective"]).encode() in logged


# --------------------------------------------------------------------------------------------------- distributions


@pytest.mark.parametrize("spec", [
    dict(distribution="q_uniform", min=0.0001, max=0.001, q=0.00005),
    dict(distribution="q_uniform", min=0.5, max=1.0, q=0.002),
    dict(distribution="q_uniform", min=0.14, max=0.97, q=0.1),
    dict(distribution="q_uniform", min=1, max=20, q=5),
    dict(distribution="q_uniform", min=1, max=7.4),
    dict(distribution="int_uniform", min=1, max=10),
    dict(min=-2, max=3),
    dict(values=[1, 2, 4]),
    dict(distribution="categorical", values=["a", True, 0.5]),
])  # fmt: skip
def test_discrete_values_are_wandbs(spec):
    parameter = HyperParameter("x", spec)
    wandbs = {parameter.ppf(u) for u in np.linspace(1e-9, 1, 5001).tolist()}
    sweep = offline.Sweep("random", "maximize", [], dict(x=offline.distribution("x", spec)))
    values = offline.grid(sweep)["x"]
    if "values" in spec:
        assert set(values) == wandbs
        assert [type(x) for x in values] == [type(x) for x in spec["values"]]
    else:
        np.testing.assert_allclose(values, sorted(wandbs), rtol=1e-9)
        assert isinstance(values[0], int) == isinstance(next(iter(wandbs)), int | np.integer)
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    drawn = {offline.suggest(study.ask(), sweep)["x"] for _ in range(20 * len(values) if len(values) < 50 else 10)}
    assert drawn <= set(values) and (len(values) > 50 or drawn == set(values))


@pytest.mark.parametrize("spec", [
    dict(distribution="uniform", min=0, max=2),
    dict(min=0.0, max=2),
    dict(distribution="log_uniform", min=-7, max=-2),
    dict(distribution="log_uniform_values", min=1e-7, max=1e-2),
])  # fmt: skip
def test_continuous_distributions_are_wandbs(spec):
    wandbs, ours = HyperParameter("x", spec), offline.distribution("x", spec)
    np.testing.assert_allclose([ours.low, ours.high], [wandbs.ppf(0.0), wandbs.ppf(1.0)])
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    sweep = offline.Sweep("random", "maximize", [], dict(x=ours))
    drawn = [offline.suggest(study.ask(), sweep)["x"] for _ in range(1000)]
    shares = [np.mean(np.array(drawn) < wandbs.ppf(u)) for u in (0.1, 0.5, 0.9)]
    np.testing.assert_allclose(shares, [0.1, 0.5, 0.9], atol=0.05)


def test_a_constant_is_no_part_of_the_search():
    sweep = offline.Sweep("random", "maximize", [], dict(x=offline.distribution("x", dict(value=[1, 2]))))
    trial = optuna.create_study().ask()
    assert offline.suggest(trial, sweep) == dict(x=[1, 2]) and trial.params == {}


@pytest.mark.parametrize("method, sampler", dict(bayes="GPSampler", random="RandomSampler", grid="GridSampler").items())
def test_methods_are_samplers(method, sampler):
    sweep = offline.Sweep(method, "maximize", [], dict(x=offline.distribution("x", dict(min=1, max=3))))
    assert type(offline.make_sampler(sweep)).__name__ == sampler


def test_macros_are_filled_in_as_by_wandbs_agent(monkeypatch):
    values = {"learning-rate": 0.1, "yes": True, "no": False, "n": 3, "text": "a b"}
    theirs = agent.create_sweep_command_args(dict(args={key: dict(value=x) for key, x in values.items()}))
    for macro in ("args", "args_no_hyphens", "args_no_equals", "args_no_boolean_flags", "args_json"):
        assert offline.fill(["x", f"${{{macro}}}"], values) == ["x", *theirs[macro]]
    monkeypatch.setenv("SOME", "thing")
    words = ["a${envvar:SOME}b", "${envvar:NONE_SUCH}"]
    assert offline.fill(words, {}) == agent.create_sweep_command(words.copy()) == ["athingb", "NONE_SUCH"]


# ------------------------------------------------------------------------------------------------------- objective


def test_the_objective_is_the_normalized_mean(tmp_path, monkeypatch):
    (tmp_path / "random.json").write_text(
        '{"scores": {"A": {"mean": -40}, "Pusher-v5": {"mean": 100}, "C": {"mean": 1}}}'
    )
    published = dict(read_from_plots_approximate=dict(PPO_at_1_million={"A": -10, "Pusher-v4": 300, "D": 1}))
    (tmp_path / "published.json").write_text(json.dumps(published))
    monkeypatch.setattr(objective, "RESULTS", tmp_path)
    returns = {("A", 1): -10, ("A", 2): -40, ("Pusher-v5", 1): 200, ("Pusher-v5", 2): 500, ("D", 1): 7.0}
    monkeypatch.setattr(objective, "train", lambda script, task, seed, *rest: returns[task, seed])
    options = "--script vsop_continuous.py --total-timesteps 1 --width 8 --tasks".split()
    args, flags = objective.parse([*options, "A", "Pusher-v5", "--seeds", "1", "2"])
    result = objective.evaluate(args, flags, tmp_path)
    assert result["so_far"] == pytest.approx([1.0, 0.75, 0.5, 0.875])
    assert result["objective"] == pytest.approx(0.875) and flags == ["--width", "8"]
    assert json.loads((tmp_path / "objective.json").read_text()) == result
    alone, _ = objective.parse([*options, "D", "--seeds", "1"])
    assert objective.evaluate(alone, [], tmp_path)["objective"] == 7.0
    with pytest.raises(SystemExit):
        objective.parse([*options, "A", "D", "--seeds", "1"])


def test_the_papers_tasks_have_references():
    known = objective.references()
    assert len(known) == 10 and known["Reacher-v4"] == (-42.948, -6.5) and known["Hopper-v4"] == (19.43, 2200)
    assert objective.normalized("Reacher-v4", -6.5, known) == pytest.approx(1.0)  # less negative is better
    assert objective.normalized("Reacher-v4", -42.948, known) == pytest.approx(0.0)


@pytest.mark.parametrize("options, expected", [
    ("--script none.py --tasks A --seeds 1 --total-timesteps 1", "there is no script none.py"),
    ("--script vsop_continuous.py --seeds 1 --total-timesteps 1", "the following arguments are required: --tasks"),
    ("--script vsop_continuous.py --tasks A --seeds x --total-timesteps 1", "argument --seeds: invalid int value: 'x'"),
    ("--script vsop_continuous.py --tasks A --seeds 1 --total-timesteps 1 --seed=3", "--seed=3: a sweep has --tasks"),
    ("--script vsop_continuous.py --tasks A B --seeds 1 --total-timesteps 1", "A has no reference scores"),
])  # fmt: skip
def test_bad_arguments_of_a_trial_are_one_line(options, expected, capsys):
    with pytest.raises(SystemExit) as stop:
        objective.parse(options.split())
    error = capsys.readouterr().err
    assert stop.value.code == 2 and error.startswith(f"error: {expected}") and error.count("\n") == 1


def test_what_a_failed_run_says_is_found(tmp_path):
    log = tmp_path / "log.txt"
    log.write_text(
        "$ x\n╭─ Unrecognized options ─╮\n│ Unrecognized options: --widht │\n│ ───── │\n│ For help │\n╰───╯\n"
    )
    assert objective.last_line(log) == "Unrecognized options: --widht"
    log.write_text("step 1\nerror: unknown task 'Hoper-v4'\n\n")
    assert objective.last_line(log) == "unknown task 'Hoper-v4'"
    log.write_text("")
    assert objective.last_line(log) == "no output"


# --------------------------------------------------------------------------------------------------------- offline

FAKE = '''
"""Stands for a training script: an episode whose return is the learning rate in thousandths, and a while to wait."""
import argparse, os, sys, time
from pathlib import Path
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

parser = argparse.ArgumentParser()
parser.add_argument("--env-id")
parser.add_argument("--seed", type=int)
parser.add_argument("--total-timesteps", type=int)
parser.add_argument("--learning-rate", type=float, default=0.0005)
parser.add_argument("--resume")
args = parser.parse_args()
if os.path.exists(os.environ.get("FAKE_BROKEN", "")):
    sys.exit("error: it is broken")
folder = Path("runs", "x")
folder.mkdir(parents=True, exist_ok=True)
(folder / "checkpoint.pt").touch()
writer = EventFileWriter(str(folder))
value = args.learning_rate * 1000 + args.seed / 1000
summary = Summary(value=[Summary.Value(tag="charts/episodic_return", simple_value=value)])
writer.add_event(Event(step=1, summary=summary))
writer.close()
time.sleep(args.total_timesteps / 10)
'''


@pytest.fixture
def sweep(tmp_path):
    """A file whose trials take a second."""
    (tmp_path / "fake_continuous.py").write_text(FAKE)
    command = ["${env}", "${interpreter}", "${program}", "--script", str(tmp_path / "fake_continuous.py")]
    command += "--tasks T --seeds 1 --total-timesteps 0 ${args}".split()
    rate = dict(distribution="q_uniform", min=0.0001, max=0.001, q=0.00005)
    metric = dict(name="objective", goal="maximize")
    program = "sweeps/objective.py"
    file = dict(program=program, method="random", metric=metric, command=command, parameters={"learning-rate": rate})
    path = tmp_path / "fake.yaml"
    path.write_text(yaml.safe_dump(file))
    return path


QUICK = "import offline; offline.HEARTBEAT, offline.GRACE = 1, 3; offline.main()"  # dead after three seconds


def start(file, *options, **env):
    line = [sys.executable, "-c", QUICK, str(file), "--folder", str(file.parent / "sweep"), *map(str, options)]
    env = os.environ | dict(PYTHONPATH=str(ROOT / "sweeps"), FAKE_BROKEN=str(file.parent / "broken")) | env
    return subprocess.Popen(line, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(*arguments, code=0):
    process = start(*arguments)
    out, errors = process.communicate(timeout=300)
    assert process.returncode == code, errors + out
    return out, errors


def study_of(file, name="fake"):
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna.load_study(study_name=name, storage=f"sqlite:///{file.parent / 'sweep' / 'study.db'}")


def states(study):
    return [trial.state.name for trial in study.get_trials(deepcopy=False)]


def processes(folder):
    lines = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True).stdout.splitlines()
    return [line for line in lines if str(folder) in line and "ps -eo" not in line]


def test_a_sweep_of_a_real_script_runs_to_the_end(tmp_path):
    """The same file as W&B's, with the Gaussian process; and what is left at the end."""
    file = tmp_path / "vsop_continuous.yaml"
    shutil.copy(ROOT / "sweeps" / "vsop_continuous.yaml", file)
    out, _ = finish(file, "--trials", 2, "--jobs", 2, "--", *PENDULUM.split())
    study = study_of(file, "vsop_continuous")
    assert states(study) == ["COMPLETE"] * 2
    first, best = out.splitlines()[-2:]
    assert f"the best is trial {study.best_trial.number} with objective {study.best_value:.4f}" in first
    script, *flags = shlex.split(best)[1:]
    args = tyro.cli(load(script.removesuffix(".py")).Args, args=flags)
    assert script == "vsop_continuous.py" and args.env_id == "InvertedPendulum-v4" and args.width == 8
    assert args.learning_rate == pytest.approx(study.best_params["learning-rate"])
    with open(tmp_path / "sweep" / "trials.csv") as table:
        rows = list(csv.DictReader(table))
    assert [row["state"] for row in rows] == ["complete"] * 2
    assert max(float(row["objective"]) for row in rows) == pytest.approx(study.best_value, rel=1e-5)
    for name in ("history.png", "importance.png"):
        image = (tmp_path / "sweep" / name).read_bytes()
        assert image.startswith(b"\x89PNG") and len(image) > 10_000


def test_a_killed_sweep_goes_on(sweep, tmp_path):
    """Nothing is left behind, the trial is run again with its own values, what it had finished is not."""
    options = ("--trials", 2, "--", "--seeds", "1", "2", "--total-timesteps", "10")
    process = start(sweep, *options)
    wait_for(lambda: (tmp_path / "sweep" / "trial-1" / "objective.json").exists())
    process.kill()
    process.communicate()
    wait_for(lambda: not processes(tmp_path))
    assert states(study_of(sweep)) == ["COMPLETE", "RUNNING"]
    out, _ = finish(sweep, *options)
    study = study_of(sweep)
    assert states(study) == ["COMPLETE", "FAIL", "COMPLETE"]
    assert study.trials[1].params == study.trials[2].params
    log = (tmp_path / "sweep" / "trial-1" / "T__1" / "log.txt").read_text()
    assert log.count("$ ") == 1 and not (tmp_path / "sweep" / "trial-2").exists()
    again, _ = finish(sweep, *options)
    assert again == "\n".join(out.splitlines()[-2:]) + "\n" and states(study_of(sweep)) == states(study)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_the_trials(sweep, tmp_path, number):
    process = start(sweep, "--trials", 2, "--jobs", 2, "--", "--total-timesteps", "600")
    wait_for(lambda: len(list(tmp_path.glob("sweep/trial-*/T__1/runs/x/events*"))) == 2)
    process.send_signal(number)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 128 + number and errors == "stopped; the same command goes on\n"
    assert not processes(tmp_path)
    assert sorted(states(study_of(sweep))) == ["FAIL", "FAIL", "WAITING", "WAITING"]


def share(sweep, storage):
    """Two processes on one study: together they run the trials, and no more."""
    options = ("--trials", 4, "--storage", storage, "--", "--total-timesteps", "5")
    both = [start(sweep, *options) for _ in range(2)]
    outputs = [process.communicate(timeout=300) for process in both]
    assert [process.returncode for process in both] == [0, 0], outputs
    study = optuna.load_study(study_name="fake", storage=storage)
    assert states(study).count("COMPLETE") == 4 and "RUNNING" not in states(study)
    for out, _ in outputs:
        assert "/4 trial" in out and "the best is trial" in out
    assert sum("/4 trial" in line for out, _ in outputs for line in out.splitlines()) == 4


def test_two_processes_share_a_study(sweep, tmp_path):
    share(sweep, f"sqlite:///{tmp_path / 'shared.db'}")


@pytest.fixture
def postgres():
    """URL of an empty database: $SWEEPS_TEST_STORAGE, or that of a server which is started for the test."""
    if url := os.environ.get("SWEEPS_TEST_STORAGE"):
        yield url
        return
    path = os.pathsep.join([os.environ["PATH"], *map(str, Path("/usr/lib/postgresql").glob("*/bin"))])
    initdb, server = shutil.which("initdb", path=path), shutil.which("postgres", path=path)
    if not initdb or not server:
        pytest.skip("there is no PostgreSQL server")
    with tempfile.TemporaryDirectory() as folder:
        user = {}
        if os.getuid() == 0:  # which the server refuses to run as
            shutil.chown(folder, "postgres", "postgres")
            user = dict(user="postgres", group="postgres", extra_groups=[])
        data = f"{folder}/data"
        quiet = dict(stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=folder)
        subprocess.run([initdb, "-D", data, "-U", "sweeper", "-A", "trust"], check=True, **quiet, **user)
        options = ["-c", "listen_addresses=", "-c", "fsync=off", "-k", folder]
        process = subprocess.Popen([server, "-D", data, *options], **quiet, **user)
        try:
            wait_for(lambda: Path(folder, ".s.PGSQL.5432").exists())
            yield f"postgresql+psycopg://sweeper@/postgres?host={folder}"
        finally:
            process.send_signal(signal.SIGINT)
            process.wait()


def test_two_processes_share_a_study_in_postgresql(sweep, postgres):
    share(sweep, postgres)


def test_a_sweep_that_fails_stops(sweep, tmp_path):
    """At its first trial, and after three in a row."""
    (tmp_path / "broken").touch()
    out, errors = finish(sweep, code=1)
    assert errors.startswith("error: the first trial failed with: T, seed 1: it is broken (")
    assert errors.count("\n") == 1 and states(study_of(sweep)) == ["FAIL"]
    (tmp_path / "broken").unlink()
    finish(sweep, "--trials", 1)
    (tmp_path / "broken").touch()
    out, errors = finish(sweep, "--trials", 9, code=1)
    assert errors.startswith("error: 3 trials in a row failed, the last with: ") and errors.count("\n") == 1
    assert out.count("it is broken") == 3 and states(study_of(sweep)) == ["FAIL", "COMPLETE", *["FAIL"] * 3]


def test_a_trial_that_is_clearly_worse_is_stopped_if_asked(sweep, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    extra = ["--seeds", "1", "2"]
    study = offline.open_study(f"sqlite:///{tmp_path / 'sweep' / 'study.db'}", "fake", offline.load_sweep(sweep, extra))
    space = {"learning-rate": optuna.distributions.FloatDistribution(0.0001, 0.001, step=0.00005)}
    for _ in range(10):
        good = dict(
            params={"learning-rate": 0.001}, distributions=space, user_attrs=dict(values={"learning-rate": 0.001})
        )
        study.add_trial(optuna.create_trial(value=100.0, intermediate_values={0: 100.0, 1: 100.0}, **good))
    out, _ = finish(sweep, "--trials", 11, "--prune", "--", *extra)
    assert study_of(sweep).trials[-1].state == TrialState.PRUNED and "11/11 trial 10: stopped early at" in out
    assert not (tmp_path / "sweep" / "trial-10" / "T__2" / "finished").exists()
    assert not offline.Args(sweep).prune


def test_a_grid_is_gone_through_once(sweep):
    file = yaml.safe_load(sweep.read_text())
    file |= dict(method="grid", parameters={"learning-rate": dict(values=[0.0002, 0.0007])})
    sweep.write_text(yaml.safe_dump(file))
    finish(sweep, "--trials", 50)
    study = study_of(sweep)
    assert sorted(trial.params["learning-rate"] for trial in study.trials) == [0.0002, 0.0007]
    assert study.best_value == pytest.approx(0.701)


def test_best_settings_are_compared_with_the_defaults(sweep, tmp_path, monkeypatch, capsys):
    import compare

    finish(sweep, "--trials", 2)
    best = study_of(sweep).best_params["learning-rate"]
    monkeypatch.chdir(ROOT)
    folders = ["--folder", str(tmp_path / "sweep"), "--results", str(tmp_path / "results")]
    monkeypatch.setattr(sys, "argv", ["compare.py", "fake", "--seeds", "11", "12", "--jobs", "2", *folders])
    compare.main()
    page = (tmp_path / "results" / "fake" / "README.md").read_text()
    assert "0.51 [0.51, 0.51]" in page and f"{best * 1000 - 0.5:.2f} [" in page
    assert ("better" if best > 0.0005 else "worse" if best < 0.0005 else "cannot be told") in page
    assert all((tmp_path / "results" / "fake" / name).exists() for name in re.findall(r"\]\((\S+)\)", page))
    assert (tmp_path / "results" / "fake" / "comparison.csv").read_text().count("\n") == 5
    monkeypatch.setattr(sys, "argv", ["compare.py", "fake", "--seeds", "1", "11", *folders])
    with pytest.raises(SystemExit):
        compare.main()
    assert capsys.readouterr().err == "error: seed 1 was used for tuning\n"


def refused(monkeypatch, capsys, *arguments):
    """The line that is left of a command, in this process."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", ["offline.py", *map(str, arguments)])
    with pytest.raises(SystemExit) as stop:
        offline.main()
    error = capsys.readouterr().err
    assert stop.value.code == 2 and error.startswith("error: ") and error.count("\n") == 1, error
    return error


@pytest.mark.parametrize("change, expected", [
    (dict(method="annealing"), "method 'annealing' is unknown"),
    (dict(metric=dict(name="loss")), "the metric must be 'objective'"),
    (dict(metric=dict(name="objective", goal="up")), "the goal is to minimize or to maximize, got 'up'"),
    (dict(early_terminate=dict(type="hyperband", min_iter=3)), "early_terminate is W&B's; offline it is --prune"),
    (dict(parametres={}), "unknown key 'parametres'"),
    (dict(parameters={}), "has no parameters"),
    (dict(program="train.py"), "the program must be sweeps/objective.py"),
    (dict(command=["${env}", "${interpreter}", "${program}", "${args_json_file}"]), "${args_json_file}, which is not"),
    (dict(command=["${env}", "python", "${args}"]), "the command lacks ${program}"),
    (dict(method="grid", parameters=dict(x=dict(min=0.0, max=1.0))), "parameter x: a grid needs values"),
    *((dict(parameters=dict(x=spec)), f"parameter x: {message}") for spec, message in (
        (dict(distribution="normal", mu=0, sigma=1), "distribution normal has no exact counterpart"),
        (dict(distribution="beta"), "distribution beta has no"),
        (dict(distribution="inv_log_uniform_values", min=1, max=2), "distribution inv_log_uniform_values has no"),
        (dict(distribution="q_log_uniform_values", min=1, max=2, q=1), "distribution q_log_uniform_values has no"),
        (dict(distribution="unifrom", min=1, max=2), "distribution unifrom has no"),
        (dict(values=[1, 2], probabilities=[0.1, 0.9]), "distribution categorical_w_probabilities has no"),
        (dict(parameters=dict(y=dict(value=1))), "distribution nested has no"),
        (dict(distribution="q_uniform", min=1), "q_uniform needs max"),
        (dict(min=1, max=2, q=3), "int_uniform has no q"),
        (dict(min=2, max=1), "min 2 is not less than max 1"),
        (dict(min="1e-4", max="1e-3"), ""),
        (dict(values=[[1], [2]]), "Choices for a categorical distribution"),
        (3, "3 is no description"),
    )),
])  # fmt: skip
def test_what_a_file_may_not_say_is_refused_by_name(sweep, change, expected, monkeypatch, capsys):
    sweep.write_text(yaml.safe_dump(yaml.safe_load(sweep.read_text()) | change))
    assert expected in refused(monkeypatch, capsys, sweep, "--folder", sweep.parent / "sweep")
    assert not (sweep.parent / "sweep").exists()


def test_bad_input_is_one_line(sweep, tmp_path, monkeypatch, capsys):
    folder = ("--folder", tmp_path / "sweep")
    assert "cannot read" in refused(monkeypatch, capsys, tmp_path / "none.yaml", *folder)
    assert "--jobs must be at least 1, got 0" in refused(monkeypatch, capsys, sweep, "--jobs", 0, *folder)
    assert "is no URL" in refused(monkeypatch, capsys, sweep, *folder, "--storage", "somewhere")
    url = "postgresql+psycopg://me:secret@127.0.0.1:1/none"
    error = refused(monkeypatch, capsys, sweep, *folder, "--storage", url)
    assert "cannot use the storage" in error and "secret" not in error
    (tmp_path / "bad.db").write_text("no database at all" * 100)
    error = refused(monkeypatch, capsys, sweep, *folder, "--storage", f"sqlite:///{tmp_path / 'bad.db'}")
    assert "file is not a database" in error
    (tmp_path / "bad.yaml").write_text("a: [")
    assert "is no YAML" in refused(monkeypatch, capsys, tmp_path / "bad.yaml", *folder)
    (tmp_path / "list.yaml").write_text("[1, 2]")
    assert "is no sweep file" in refused(monkeypatch, capsys, tmp_path / "list.yaml", *folder)
    assert "--seed: a sweep has" in refused(monkeypatch, capsys, sweep, *folder, "--", "--seed", "3")


def test_a_study_is_of_one_sweep(sweep, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    offline.open_study(f"sqlite:///{tmp_path / 'sweep' / 'study.db'}", "fake", offline.load_sweep(sweep, []))
    folder = ("--folder", sweep.parent / "sweep")
    error = refused(monkeypatch, capsys, sweep, *folder, "--trials", 2, "--", "--total-timesteps", "1")
    assert "is of another sweep or other arguments: give another --study-name" in error
    assert states(study_of(sweep)) == []
