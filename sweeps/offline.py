"""Run a W&B sweep file without W&B, using Optuna.

    python sweeps/offline.py sweeps/vsop_continuous.yaml --trials 100 --jobs 2

Arguments after `--` are added to the command of every trial, for example for a quick study:

    python sweeps/offline.py sweeps/vsop_continuous.yaml --study-name hop -- --tasks Hopper-v4 --total-timesteps 100000

Trials are stored in a database: an SQLite file, or with --storage any database that Optuna supports, which several
processes and machines can share. Run the same command again to resume: a trial that was interrupted or whose process
died is repeated, except for the runs it had finished. At the end the best arguments are printed as a command, and
trials.csv, history.png and importance.png are written to --folder.
"""

import os
import shlex
import sys
import threading
import time
import warnings
from pathlib import Path

from objective import RunFailed, Stopped, evaluate, note, parse

# Fitting the Gaussian process gains nothing from more threads, which training needs.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["MPLBACKEND"] = "Agg"

import optuna
import sqlalchemy
import yaml
from common import Parser, catch_signals, fail, plain_name, positive, stopped
from optuna.storages import RetryHeartbeatStaleTrialCallback
from optuna.trial import TrialState

optuna.logging.set_verbosity(optuna.logging.ERROR)
warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)

HEARTBEAT = 10  # seconds between heartbeats of a trial
GRACE = 60  # seconds without one after which a trial counts as dead
FAILURES = 3  # failed trials in a row that stop the sweep
DONE = (TrialState.COMPLETE, TrialState.PRUNED)
STORAGE_ERRORS = (sqlalchemy.exc.SQLAlchemyError, optuna.exceptions.StorageInternalError)


def parse_arguments(words: list):
    parser = Parser(__doc__)
    add = parser.add_argument
    add("file", type=Path, help="a W&B sweep file")
    add("--trials", type=positive, default=100, help="finished trials of the study, over all processes (default: 100)")
    add("--jobs", type=positive, default=1, help="trials at the same time (default: 1)")
    add("--study-name", type=plain_name, help="name of the study (default: that of the file)")
    add("--folder", type=Path, help="where logs, runs and results go (default: runs/sweeps/<study name>)")
    add("--storage", help="URL of the database, such as postgresql+psycopg://user:password@host/name (default: SQLite)")
    add("--prune", action="store_true", help="stop a trial below the median of the others after three runs or more")
    args = parser.parse_args(words)
    args.study_name = args.study_name or args.file.stem
    args.folder, args.storage = places(args)
    return args


def places(args) -> tuple:
    """Folder and storage of a study."""
    folder = (args.folder or Path("runs", "sweeps", args.study_name)).resolve()
    return folder, args.storage or f"sqlite:///{folder / 'study.db'}"


# ------------------------------------------------------------------------------------------------------ sweep file


def suggest(trial, name: str, spec: dict):
    """Samples one parameter. The values are W&B's; but W&B samples both ends of a q_uniform range half as often."""
    if "values" in spec:
        return trial.suggest_categorical(name, spec["values"])
    low, high = spec["min"], spec["max"]
    if spec["distribution"] == "q_uniform":
        return float(f"{trial.suggest_float(name, low, high, step=spec['q']):.12g}")  # without rounding errors
    if spec["distribution"] == "int_uniform":
        return trial.suggest_int(name, low, high)
    if spec["distribution"] == "log_uniform_values":
        return trial.suggest_float(name, low, high, log=True)
    raise ValueError(f"distribution {spec['distribution']} is not supported")


def load_sweep(path: Path, extra: list) -> dict:
    """The arguments of objective.py, with ${args} where the values go; the parameters; the direction."""
    try:
        content = yaml.safe_load(path.read_text())
        command = list(map(str, content["command"]))
        words = [*command[command.index("${program}") + 1 :], *extra]
        if content["method"] != "bayes" or "early_terminate" in content:
            raise ValueError("the method must be bayes, without early_terminate (offline: --prune)")
        parameters, trial = content["parameters"], optuna.create_study().ask()
        arguments(words, {name: suggest(trial, name, spec) for name, spec in parameters.items()})
        return dict(words=words, parameters=parameters, direction=content["metric"]["goal"])
    except (AttributeError, KeyError, TypeError, ValueError, yaml.YAMLError) as error:
        fail(f"{path}: {'missing ' * isinstance(error, KeyError)}{' '.join(str(error).split())}")


def arguments(words: list, values: dict):
    """Of sweeps/objective.py for a trial with these values, and those for the script."""
    filled = []
    for word in words:
        filled += [f"--{name}={value}" for name, value in values.items()] if word == "${args}" else [word]
    return parse(filled)


# ----------------------------------------------------------------------------------------------------------- study


class Storage(optuna.storages.RDBStorage):
    """Lets one thread at a time start a trial: SQLite would give the same interrupted trial to two of them."""

    lock = threading.Lock()

    def set_trial_state_values(self, *args, **kwargs) -> bool:
        with self.lock:
            return super().set_trial_state_values(*args, **kwargs)


def open_study(url: str, name: str, sweep: dict | None = None, prune=False) -> optuna.Study:
    """Opens the study of the sweep, or creates it. Without a sweep, it must exist."""
    life = dict(heartbeat_interval=HEARTBEAT, grace_period=GRACE)
    life |= dict(heartbeat_stale_trial_callback=RetryHeartbeatStaleTrialCallback())
    for attempt in range(5):
        try:
            url = sqlalchemy.make_url(url)
            sqlite = url.drivername == "sqlite"
            if sqlite and sweep:
                Path(url.database).parent.mkdir(parents=True, exist_ok=True)
            # Processes wait for each other at an SQLite file; a connection to a server may be lost overnight.
            engine = dict(connect_args=dict(timeout=60)) if sqlite else dict(pool_pre_ping=True)
            storage = Storage(url.render_as_string(hide_password=False), engine, **life)
            if sweep is None:
                return optuna.load_study(study_name=name, storage=storage)
            # The first runs of a trial say little of the tasks that follow, and fewer than five trials have no median.
            median = optuna.pruners.MedianPruner(n_startup_trials=5, n_warmup_steps=3)
            study = optuna.create_study(
                study_name=name, storage=storage, direction=sweep["direction"], load_if_exists=True,
                sampler=optuna.samplers.GPSampler(),
                pruner=median if prune else optuna.pruners.NopPruner(),
            )  # fmt: skip
            break
        except KeyError:
            fail(f"--storage: there is no study {name!r} at {url}")  # which hides its password
        except (*STORAGE_ERRORS, ImportError, RuntimeError) as error:
            if attempt == 4 or sweep is None or isinstance(error, (sqlalchemy.exc.ArgumentError, ImportError)):
                fail(f"--storage: {' '.join(str(error.__cause__ or error).split())[:200]}")
            time.sleep(0.5)  # another process may be creating the tables
    if study.user_attrs.get("sweep", sweep) != sweep:
        fail(f"--study-name: {name!r} is the study of another sweep or other arguments")
    study.set_user_attr("sweep", sweep)
    return study


def count(study: optuna.Study, *states) -> int:
    return len(study.get_trials(deepcopy=False, states=states))


class Worker:
    """Runs trials until the study has enough, or until `stop` is set."""

    def __init__(self, args, study: optuna.Study, sweep: dict):
        self.args, self.study, self.sweep = args, study, sweep
        self.stop, self.failures, self.reason = threading.Event(), 0, None

    def work(self):
        options = dict(catch=(RunFailed, Stopped), callbacks=[self.after_trial])
        while not self.stop.is_set() and count(self.study, *DONE) < self.args.trials:
            optuna.storages.fail_stale_trials(self.study)
            free = self.args.trials - count(self.study, *DONE, TrialState.RUNNING)
            if free < 1:
                self.stop.wait(1)  # trials of other processes; one of them may fail or be dead
                continue
            try:
                self.study.optimize(self.run_trial, n_trials=free, n_jobs=min(self.args.jobs, free), **options)
            except ValueError as error:
                if "Cannot tell" not in str(error):  # another process declared one of our trials dead: it was paused
                    raise

    def run_trial(self, trial) -> float:
        values = {name: suggest(trial, name, spec) for name, spec in self.sweep["parameters"].items()}
        trial.set_user_attr("values", values)
        # A repeated trial uses the folder of the first attempt, and so the runs that were finished in it.
        history = RetryHeartbeatStaleTrialCallback.retry_history(self.study.trials[trial.number])
        folder = self.args.folder / f"trial-{[*history, trial.number][0]}"
        folder.mkdir(parents=True, exist_ok=True)

        def after_run(result):
            trial.report(result["so_far"][-1], len(result["so_far"]))
            if result["objective"] is None and trial.should_prune():
                raise optuna.TrialPruned

        try:
            return evaluate(*arguments(self.sweep["words"], values), folder, after_run, self.stop)["objective"]
        except RunFailed as error:
            trial.set_user_attr("error", f"{error} ({os.path.relpath(folder)})")
            raise

    def after_trial(self, study, trial):
        error = trial.user_attrs.get("error")
        if trial.state == TrialState.FAIL and not error:  # interrupted
            RetryHeartbeatStaleTrialCallback()(study, trial)
        else:
            self.failures = self.failures + 1 if error else 0
            outcome = f"failed: {error}" if error else f"{trial.state.name.lower()}, objective {trial.value:.4f}"
            best = f"; best: {study.best_value:.4f}" if count(study, TrialState.COMPLETE) else ""
            print(f"{count(study, *DONE)}/{self.args.trials} trial {trial.number} {outcome}{best}", flush=True)
        if self.failures >= FAILURES:
            self.reason = f"{FAILURES} trials in a row failed, the last with: {error}"
            self.stop.set()
        if self.stop.is_set() or count(study, *DONE, TrialState.RUNNING) >= self.args.trials:
            study.stop()  # work() starts another one if one of the running trials fails


# --------------------------------------------------------------------------------------------------------- results


def command_line(study: optuna.Study, trial) -> str:
    """Trains with the values of a trial."""
    args, flags = arguments(study.user_attrs["sweep"]["words"], trial.user_attrs["values"])
    return shlex.join(["python", args.script, "--env-id", args.tasks[0], *flags])


def write_results(study: optuna.Study, folder: Path):
    import matplotlib.pyplot as plt
    from optuna.visualization.matplotlib import plot_optimization_history, plot_param_importances

    folder.mkdir(parents=True, exist_ok=True)
    table = study.trials_dataframe(attrs=("number", "state", "value", "duration", "params"))
    failed = [trial.number for trial in study.trials if "error" in trial.user_attrs]  # the others were interrupted
    table = table[table["state"].isin(["COMPLETE", "PRUNED"]) | table["number"].isin(failed)]
    table["state"] = table["state"].str.lower()
    table["duration"] = (table["duration"].dt.total_seconds() / 60).round(1)
    names = dict(number="trial", value="objective", duration="minutes")
    table = table.rename(columns=lambda name: names.get(name, name.removeprefix("params_")))
    table.to_csv(folder / "trials.csv", index=False, float_format="%.6g")
    plots = dict(history=plot_optimization_history)
    if count(study, TrialState.COMPLETE) > 1:
        plots["importance"] = plot_param_importances
    for name, plot in plots.items():
        plot(study)
        plt.gcf().set_size_inches(8, 4.5)
        plt.savefig(folder / f"{name}.png", dpi=130, bbox_inches="tight")
        plt.close("all")


def main():
    words = sys.argv[1:]
    cut = words.index("--") if "--" in words else len(words)
    args = parse_arguments(words[:cut])
    sweep = load_sweep(args.file, words[cut + 1 :])
    note(arguments(sweep["words"], {})[0])
    args.folder.mkdir(parents=True, exist_ok=True)
    study = open_study(args.storage, args.study_name, sweep, args.prune)
    if running := count(study, TrialState.RUNNING):
        print(f"{running} trials in other processes; a dead one is repeated after {GRACE} seconds", flush=True)
    worker = Worker(args, study, sweep)
    received = catch_signals(worker.stop.set)
    try:
        worker.work()
    except STORAGE_ERRORS as error:
        fail(f"--storage: {' '.join(str(error.__cause__ or error).split())[:200]}")
    if received:
        stopped(received)
    if worker.reason:
        print(f"error: {worker.reason}", file=sys.stderr)
        sys.exit(1)
    write_results(study, args.folder)
    best = study.best_trial
    print(f"the best is trial {best.number} with objective {best.value:.4f}; tables and plots are in {args.folder}")
    print(command_line(study, best))


if __name__ == "__main__":
    main()
