"""The sweep files, with W&B's code and offline."""

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
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import optuna
import pandas as pd
import pytest
import tyro
import yaml
from conftest import ROOT, alive, cli_args, load, wait_for
from optuna.trial import TrialState
from sweeps.config import schema_violations_from_proposed_config
from sweeps.params import HyperParameter
from wandb.sdk.launch.sweeps import utils as agent

sys.path[:0] = [str(ROOT / "sweeps"), str(ROOT / "benchmark")]
import common
import objective
import offline

FILES = sorted(path.stem for path in (ROOT / "sweeps").glob("*.yaml"))
TUNED = sorted(f"tuned/{path.stem}" for path in (ROOT / "sweeps" / "tuned").glob("*.yaml"))
PENDULUM = "--tasks InvertedPendulum-v4 --seeds 1 --total-timesteps 320 --num-steps 64 --width 8 --no-compile --no-cuda"
TINY = {
    "continuous": PENDULUM.split(),
    "procgen": "--total-timesteps 64 --num-envs 2 --num-steps 32 --no-compile --no-cuda".split(),
}


def content(name) -> dict:
    return yaml.safe_load((ROOT / "sweeps" / f"{name}.yaml").read_text())


def sample(spec, seed=0):
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=seed))
    return lambda: offline.suggest(study.ask(), "x", spec)


# ----------------------------------------------------------------------------------------------------------- files


def test_every_torch_script_has_a_sweep():
    scripts = {path.stem for kind in ("continuous", "procgen") for path in ROOT.glob(f"*_{kind}.py")}
    assert len(scripts) == 7 and scripts == set(FILES)


@pytest.mark.parametrize("name", FILES + TUNED)
def test_wandb_accepts_the_file(name):
    config = content(name)
    assert schema_violations_from_proposed_config(config) == []
    assert config["method"] == "bayes" and config["metric"] == dict(name="objective", goal="maximize")
    assert (ROOT / config["program"]).is_file()
    config["parameters"]["gae-lambda"]["maximum"] = 2
    assert schema_violations_from_proposed_config(config)


@pytest.mark.parametrize("name", FILES + TUNED)
def test_parameters_are_arguments_with_legal_values_at_both_ends(name):
    """The defaults, which the paper found, are in the space."""
    script = Path(name).name
    settings, default = cli_args(script), load(script).Args()
    for parameter, spec in content(name)["parameters"].items():
        found = getattr(default, parameter.replace("-", "_"))
        ends = spec["values"] if "values" in spec else (spec["min"], spec["max"])
        for value in ends:
            args = tyro.cli(settings, args=[f"--{parameter}={value}"])
            assert getattr(args, parameter.replace("-", "_")) == pytest.approx(value)
        assert found in ends if "values" in spec else spec["min"] <= found <= spec["max"]
        if "q" in spec:
            assert found / spec["q"] == pytest.approx(round(found / spec["q"]))


def test_the_space_is_the_papers():
    space = content("vsop_continuous")["parameters"]
    rate, gae_lambda, minibatches, epochs, norm, dropout = space.values()
    assert (rate["min"], rate["max"], rate["q"]) == (1e-4, 1e-3, 5e-5)
    assert (gae_lambda["min"], gae_lambda["max"]) == (0.5, 1.0)
    assert minibatches["values"] == [1, 2, 4, 8, 16, 32, 64]
    assert (epochs["min"], epochs["max"]) == (1, 10)
    assert (dropout["min"], dropout["max"]) == (0.0, 0.1)
    assert "ent-coef" in content("vsop_procgen")["parameters"]
    assert "max-grad-norm" not in content("vsop_procgen")["parameters"]


@pytest.mark.parametrize("name", FILES)
def test_the_tasks_are_the_papers(name):
    args, flags = offline.arguments(offline.load_sweep(ROOT / "sweeps" / f"{name}.yaml", [])["words"], {})
    tasks = dict(continuous=["Reacher-v4", "Hopper-v4", "Humanoid-v4"], procgen=["bossfight"])
    assert args.script == f"{name}.py" and args.tasks == tasks[name.partition("_")[2]] and flags == []
    assert args.seeds == [1, 2] or name.endswith("procgen")


def test_vsop_and_ppo_are_tuned_with_the_same_budget():
    vsop, ppo = (content(name) for name in reversed(TUNED))
    assert vsop["parameters"].pop("dropout-rate") and vsop["parameters"] == ppo["parameters"]
    change = {"vsop_continuous.py": "ppo_continuous.py"}
    assert [change.get(word, word) for word in vsop["command"]] == ppo["command"]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name != "vsop_continuous" else []) for name in FILES]
)
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
    done = subprocess.run(line, cwd=ROOT, env=env, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "trial" / "objective.json").read_text())
    logged = next(tmp_path.glob("wandb/offline-run-*/run-def.wandb")).read_bytes()
    assert [[result["objective"]]] == list(result["returns"].values())
    assert b"objective" in logged and str(result["objective"]).encode() in logged


@pytest.mark.parametrize("spec", [
    dict(distribution="q_uniform", min=0.0001, max=0.001, q=0.00005),
    dict(distribution="int_uniform", min=1, max=10),
    dict(values=[1, 2, 4]),
])  # fmt: skip
def test_sampled_values_are_wandbs(spec):
    parameter, draw = HyperParameter("x", spec), sample(spec)
    wandbs = sorted({parameter.ppf(u) for u in np.linspace(1e-9, 1, 5001).tolist()})
    found = sorted({draw() for _ in range(20 * len(wandbs))})
    np.testing.assert_allclose(found, wandbs, rtol=1e-9)
    assert all(len(str(x)) < 8 for x in found)  # no rounding errors


def test_log_uniform_values_are_wandbs():
    spec = dict(distribution="log_uniform_values", min=1e-7, max=1e-2)
    wandbs, draw = HyperParameter("x", spec), sample(spec)
    found = np.array([draw() for _ in range(1000)])
    np.testing.assert_allclose([np.mean(found < wandbs.ppf(u)) for u in (0.1, 0.5, 0.9)], [0.1, 0.5, 0.9], atol=0.05)


# ------------------------------------------------------------------------------------------------------- objective


def test_the_objective_is_the_normalized_mean(tmp_path, monkeypatch):
    reference = pd.DataFrame(dict(random=[-40, 100], final=[-10, 300]), index=["A", "B"])
    monkeypatch.setattr(objective, "references", lambda steps: reference)
    returns = {("A", 1): -10, ("A", 2): -40, ("B", 1): 200, ("B", 2): 500, ("D", 1): 7.0}
    returns |= {("A", 3): -70, ("B", 3): 900}  # normalized -1 and 4, clipped to 0 and 2 unless the task is alone
    monkeypatch.setattr(objective, "train", lambda script, task, seed, *rest: returns[task, seed])
    options = "--script vsop_continuous.py --total-timesteps 1 --width 8 --tasks".split()
    args, flags = objective.parse([*options, "A", "B", "--seeds", "1", "2"])
    result = objective.evaluate(args, flags, tmp_path)
    assert result["so_far"] == pytest.approx([1.0, 0.75, 0.5, 0.875])
    assert result["objective"] == pytest.approx(0.875) and flags == ["--width", "8"]
    assert json.loads((tmp_path / "objective.json").read_text()) == result
    clipped, _ = objective.parse([*options, "A", "B", "--seeds", "3"])
    assert objective.evaluate(clipped, [], tmp_path)["so_far"] == [0.0, 1.0]
    alone, _ = objective.parse([*options, "B", "--seeds", "3"])
    assert objective.evaluate(alone, [], tmp_path)["objective"] == 4.0
    alone, _ = objective.parse([*options, "D", "--seeds", "1"])
    assert objective.evaluate(alone, [], tmp_path)["objective"] == 7.0  # no reference: the return
    with pytest.raises(SystemExit):
        objective.parse([*options, "A", "D", "--seeds", "1"])


def test_less_negative_is_better():
    known = common.references(1_000_000)
    zero, one = known.loc["Reacher-v4", ["random", "final"]]
    assert zero < one < 0 and objective.normalized("Reacher-v4", one, known) == pytest.approx(1.0)
    assert objective.normalized("Reacher-v4", zero, known) == pytest.approx(0.0)


@pytest.mark.parametrize("options, flag", [
    ("--script none.py --tasks A --seeds 1 --total-timesteps 1", "--script"),
    ("--script vsop_continuous.py --seeds 1 --total-timesteps 1", "--tasks"),
    ("--script vsop_continuous.py --tasks A --seeds x --total-timesteps 1", "--seeds"),
    ("--script vsop_continuous.py --tasks A --seeds 1 --total-timesteps 1 --seed=3", "--seed"),
    ("--script vsop_continuous.py --tasks A B --seeds 1 --total-timesteps 1", "--tasks"),
])  # fmt: skip
def test_bad_arguments_of_a_trial_are_one_line(options, flag, capsys):
    with pytest.raises(SystemExit) as stop:
        objective.parse(options.split())
    error = capsys.readouterr().err
    assert stop.value.code == 2 and error.startswith("error: ") and flag in error and error.count("\n") == 1


def test_the_error_in_a_log_is_found(tmp_path):
    log = tmp_path / "log.txt"
    log.write_text("$ x\n╭─ Error ─╮\n│ Unrecognized options: --widht │\n│ ───── │\n│ For help │\n╰───╯\n")
    assert common.last_line(log) == "Unrecognized options: --widht"
    log.write_text("step 1\nerror: unknown task 'Hoper-v4'\n\n")
    assert common.last_line(log) == "unknown task 'Hoper-v4'"


# --------------------------------------------------------------------------------------------------------- offline


@pytest.fixture
def sweep(tmp_path):
    """A file whose trials take a moment."""
    command = "${env} ${interpreter} ${program} --script tests/fake_script.py --tasks T --seeds 1".split()
    command += ["--total-timesteps", "1", "${args}"]
    rate = dict(distribution="q_uniform", min=0.0001, max=0.001, q=0.00005)
    file = dict(program="sweeps/objective.py", method="bayes", metric=dict(name="objective", goal="maximize"))
    path = tmp_path / "fake.yaml"
    path.write_text(yaml.safe_dump(file | dict(command=command, parameters={"learning-rate": rate})))
    return path


# A trial is dead after five seconds, and there are no plots, which take seconds of imports.
QUICK = "import offline; offline.HEARTBEAT, offline.GRACE, offline.write_results = 1, 5, print; offline.main()"


def start(file, *options):
    line = [sys.executable, "-c", QUICK, str(file), "--folder", str(file.parent / "sweep"), *map(str, options)]
    env = os.environ | dict(PYTHONPATH=str(ROOT / "sweeps"), FAKE_BROKEN=str(file.parent / "broken"))
    return subprocess.Popen(line, cwd=file.parent, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(*arguments, code=0):
    process = start(*arguments)
    out, errors = process.communicate(timeout=300)
    assert process.returncode == code, errors + out
    return out, errors


def study_of(file, name="fake"):
    return optuna.load_study(study_name=name, storage=f"sqlite:///{file.parent / 'sweep' / 'study.db'}")


def states(study):
    return [trial.state.name for trial in study.get_trials(deepcopy=False)]


@pytest.mark.slow
def test_a_sweep_of_a_real_script_runs_to_the_end(tmp_path):
    file = tmp_path / "vsop_continuous.yaml"
    shutil.copy(ROOT / "sweeps" / "vsop_continuous.yaml", file)
    out, _ = finish(file, "--trials", 2, "--jobs", 2, "--", *PENDULUM.split())
    study = study_of(file, "vsop_continuous")
    assert states(study) == ["COMPLETE"] * 2
    script, *flags = shlex.split(out.splitlines()[-1])[1:]
    args = tyro.cli(cli_args(script.removesuffix(".py")), args=flags)
    assert script == "vsop_continuous.py" and args.env_id == "InvertedPendulum-v4" and args.width == 8
    assert args.learning_rate == pytest.approx(study.best_params["learning-rate"])


def test_a_killed_sweep_resumes(sweep, tmp_path):
    """The trial is repeated with its values, its finished runs are not."""
    options = ("--trials", 2, "--", "--seeds", "1", "2", "--total-timesteps", "100")
    process = start(sweep, *options)
    wait_for(lambda: (tmp_path / "sweep" / "trial-1" / "objective.json").exists())
    process.kill()
    process.communicate()
    wait_for(lambda: not alive(tmp_path))
    assert states(study_of(sweep)) == ["COMPLETE", "RUNNING"]
    out, _ = finish(sweep, *options)
    study = study_of(sweep)
    assert states(study) == ["COMPLETE", "FAIL", "COMPLETE"]
    assert study.trials[1].params == study.trials[2].params
    log = (tmp_path / "sweep" / "trial-1" / "T__1" / "log.txt").read_text()
    assert log.count("$ ") == 1 and not (tmp_path / "sweep" / "trial-2").exists()
    offline.write_results(study, tmp_path / "results")
    with open(tmp_path / "results" / "trials.csv") as table:  # the interrupted trial did not fail
        assert [row["trial"] for row in csv.DictReader(table)] == ["0", "2"]
    again, _ = finish(sweep, *options)
    assert again.splitlines()[-1] == out.splitlines()[-1] and states(study_of(sweep)) == states(study)
    assert f"--learning-rate={study.best_params['learning-rate']:.12g}" in again.splitlines()[-1]


def test_a_signal_stops_the_trials(sweep, tmp_path):
    process = start(sweep, "--trials", 2, "--jobs", 2, "--", "--total-timesteps", "10000")
    wait_for(lambda: len(list(tmp_path.glob("sweep/trial-*/T__1/runs/*/checkpoint.pt"))) == 2)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130 and errors.count("\n") == 1, errors
    assert not alive(tmp_path)
    assert sorted(states(study_of(sweep))) == ["FAIL", "FAIL", "WAITING", "WAITING"]


def share(sweep, storage):
    """Two processes on one study: together they run the trials, at most one too many."""
    options = ("--trials", 4, "--storage", storage, "--", "--total-timesteps", "50")
    both = [start(sweep, *options) for _ in range(2)]
    outputs = [process.communicate(timeout=300) for process in both]
    assert [process.returncode for process in both] == [0, 0], outputs
    found = states(optuna.load_study(study_name="fake", storage=storage))
    assert 4 <= found.count("COMPLETE") <= 5 and "RUNNING" not in found
    assert all("/4 trial" in out and "the best is trial" in out for out, _ in outputs), outputs


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


@pytest.mark.slow
def test_two_processes_share_a_study_in_postgresql(sweep, postgres):
    share(sweep, postgres)


def test_a_sweep_that_fails_stops(sweep, tmp_path):
    (tmp_path / "broken").touch()
    out, errors = finish(sweep, "--trials", 9, code=1)
    assert "it is broken" in errors and errors.count("\n") == 1
    assert out.count("it is broken") == 3 and states(study_of(sweep)) == ["FAIL"] * 3
    offline.write_results(study_of(sweep), tmp_path / "results")
    assert (tmp_path / "results" / "trials.csv").read_text().count(",fail,") == 3


@pytest.fixture
def inside(monkeypatch, tmp_path):
    """Runs a program of sweeps/ in this process."""

    def call(main, *arguments):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", ["program", *map(str, arguments)])
        handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            main()
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)

    return call


def test_a_bad_trial_is_pruned_if_asked(sweep, tmp_path, inside, monkeypatch):
    extra = ["--seeds", "1", "2", "3", "4"]
    url = f"sqlite:///{tmp_path / 'sweep' / 'study.db'}"
    study = offline.open_study(url, "fake", offline.load_sweep(sweep, extra))
    space = {"learning-rate": optuna.distributions.FloatDistribution(0.0001, 0.001, step=0.00005)}
    good = dict(params={"learning-rate": 0.001}, distributions=space, user_attrs=dict(values={"learning-rate": 0.001}))
    for _ in range(5):
        study.add_trial(optuna.create_trial(value=100.0, intermediate_values=dict.fromkeys(range(1, 5), 100.0), **good))
    monkeypatch.setattr(offline, "write_results", print)
    inside(offline.main, sweep, "--folder", tmp_path / "sweep", "--trials", 6, "--prune", "--", *extra)
    assert study_of(sweep).trials[-1].state == TrialState.PRUNED
    runs = {path.name for path in (tmp_path / "sweep" / "trial-5").iterdir() if path.is_dir()}
    assert runs == {"T__1", "T__2", "T__3"}


def test_two_threads_never_start_the_same_trial(sweep, tmp_path):
    study = offline.open_study(f"sqlite:///{tmp_path / 'study.db'}", "fake", offline.load_sweep(sweep, []))
    for _ in range(60):
        study.enqueue_trial({"learning-rate": 0.0005})
    with ThreadPoolExecutor(2) as pool:
        trials = [
            x for numbers in pool.map(lambda _: [study.ask().number for _ in range(30)], range(2)) for x in numbers
        ]
    assert sorted(trials) == list(range(60))


def test_best_settings_are_compared_with_the_defaults(sweep, tmp_path, inside, capsys):
    import compare

    inside(offline.main, sweep, "--folder", tmp_path / "sweep", "--trials", 2)
    study = study_of(sweep)
    best = study.best_params["learning-rate"]
    with open(tmp_path / "sweep" / "trials.csv") as table:
        rows = list(csv.DictReader(table))
    assert [row["state"] for row in rows] == ["complete"] * 2
    assert max(float(row["objective"]) for row in rows) == pytest.approx(study.best_value, rel=1e-5)
    rates = [trial.params["learning-rate"] for trial in study.trials]
    assert [float(row["learning-rate"]) for row in rows] == pytest.approx(rates)
    options = ["fake", "--folder", tmp_path / "sweep", "--results", tmp_path / "results", "--jobs", 2]
    inside(compare.main, *options)
    page = (tmp_path / "results" / "fake" / "README.md").read_text()
    assert "2 complete trials" in page and "not used for tuning" not in page
    options.append("--seeds")
    inside(compare.main, *options, 11, 12)
    page = (tmp_path / "results" / "fake" / "README.md").read_text()
    assert "0.51 [0.51, 0.51]" in page and f"{best * 1000 - 0.5:.2f} [" in page
    for name in re.findall(r"\]\((\S+)\)", page):
        assert (tmp_path / "results" / "fake" / name).stat().st_size > 10_000
    assert (tmp_path / "results" / "fake" / "comparison.csv").read_text().count("\n") == 5
    capsys.readouterr()
    for main, *arguments in ((compare.main, *options, 1, 11), (compare.main, "none"), (compare.main, "../x", *options)):
        with pytest.raises(SystemExit) as stop:
            inside(main, *arguments)
        error = capsys.readouterr().err
        assert stop.value.code == 2 and error.startswith("error: ") and error.count("\n") == 1, error


def test_the_page_says_which_is_better(tmp_path, monkeypatch):
    """By the interval of the difference seed by seed."""
    import compare

    (tmp_path / "trials.csv").write_text("trial,state\n3,complete\n")
    monkeypatch.setattr(compare, "command_line", lambda study, trial: "python x.py")
    best = SimpleNamespace(number=3, value=1.0)
    own = SimpleNamespace(tasks=["T"], script="x.py", total_timesteps=1, seeds=[1], reference=pd.DataFrame())
    args = SimpleNamespace(study_name="x", seeds=[5, 6, 7, 8])
    verdicts = []
    for difference in (1.0, -1.0, np.array([1.0, -1.0, 1.0, -1.0])):
        returns = {("defaults", "T"): np.array([1.0, 2, 3, 4]), ("trial 3", "T"): np.array([1.0, 2, 3, 4]) + difference}
        study = SimpleNamespace(best_trial=best, direction=SimpleNamespace(name="MAXIMIZE"))
        verdicts.append(re.search(r"\*\*(.*)\*\*", compare.page(study, args, own, returns, tmp_path))[1])
    assert "better" in verdicts[0] and "worse" in verdicts[1] and len(set(verdicts)) == 3


def refused(capsys, inside, *arguments):
    with pytest.raises(SystemExit) as stop:
        inside(offline.main, *arguments)
    error = capsys.readouterr().err
    assert stop.value.code == 2 and error.startswith("error: ") and error.count("\n") == 1, error
    return error


@pytest.mark.parametrize("change", [
    dict(method="annealing"), dict(metric=3), dict(early_terminate=dict(type="hyperband", min_iter=3)),
    dict(parameters=3), dict(command="x"), dict(command=["${env}", "${args}"]),
    *(dict(parameters=dict(x=spec)) for spec in (
        dict(distribution="normal", mu=0, sigma=1), dict(distribution="q_uniform", min=1, max=2), dict(min=1, max=2),
        dict(distribution="int_uniform", min=2, max=1), dict(distribution="q_uniform", min="a", max=2, q=1), 3,
    )),
])  # fmt: skip
def test_a_bad_sweep_file_is_one_line(sweep, change, capsys, inside):
    sweep.write_text(yaml.safe_dump(yaml.safe_load(sweep.read_text()) | change))
    assert "fake.yaml" in refused(capsys, inside, sweep, "--folder", sweep.parent / "sweep")
    assert not (sweep.parent / "sweep").exists()


def test_bad_input_is_one_line(sweep, tmp_path, capsys, inside):
    folder = ("--folder", tmp_path / "sweep")
    assert "--jobs" in refused(capsys, inside, sweep, "--jobs", 0, *folder)
    assert "--study-name" in refused(capsys, inside, sweep, "--study-name", "../x")
    assert "--storage" in refused(capsys, inside, sweep, *folder, "--storage", "somewhere")
    error = refused(capsys, inside, sweep, *folder, "--storage", "postgresql+psycopg://me:secret@127.0.0.1:1/none")
    assert "--storage" in error and "secret" not in error
    (tmp_path / "bad.db").write_text("not a database" * 100)
    assert "--storage" in refused(capsys, inside, sweep, *folder, "--storage", f"sqlite:///{tmp_path / 'bad.db'}")
    (tmp_path / "bad.yaml").write_text("a: [")
    assert "bad.yaml" in refused(capsys, inside, tmp_path / "bad.yaml", *folder)
    assert "--seed" in refused(capsys, inside, sweep, *folder, "--", "--seed", "3")


def test_a_study_belongs_to_one_sweep(sweep, tmp_path, capsys, inside):
    offline.open_study(f"sqlite:///{tmp_path / 'study.db'}", "fake", offline.load_sweep(sweep, []))
    error = refused(capsys, inside, sweep, "--folder", tmp_path, "--trials", 2, "--", "--total-timesteps", "2")
    assert "--study-name" in error
