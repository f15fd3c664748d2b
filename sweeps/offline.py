"""Run a W&B sweep file without W&B, on Optuna:

    python sweeps/offline.py sweeps/vsop_continuous.yaml --trials 100 --jobs 2

What follows `--` is added to the command of every trial, which changes what a trial is, for example to a quick one:

    python sweeps/offline.py sweeps/vsop_continuous.yaml --study-name hop -- --tasks Hopper-v4 --total-timesteps 100000

Trials are in a database: an SQLite file, or with --storage any that Optuna can use, which processes and machines can
share. The same command goes on where it was. A trial that was interrupted or whose process died is run again, with what
it had finished if its folder is there. At the end, and again when there is nothing left to do: the best arguments as a
command line, and trials.csv, history.png and importance.png in --folder.
"""

import csv
import ctypes
import json
import math
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
import warnings
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

# Fitting the Gaussian process gains nothing from more threads, which would be taken from the training.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import optuna
import sqlalchemy
import tyro
import yaml
from objective import RunFailed, fail, last_line, parse
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.storages import RetryHeartbeatStaleTrialCallback
from optuna.trial import TrialState

optuna.logging.set_verbosity(optuna.logging.ERROR)
warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)

HEARTBEAT = 10  # seconds between signs of life of a trial
GRACE = 60  # seconds without one after which a trial counts as dead
FAILURES = 3  # trials that fail one after another, and the sweep stops
DONE = (TrialState.COMPLETE, TrialState.PRUNED)
STORAGE_ERRORS = (sqlalchemy.exc.SQLAlchemyError, optuna.exceptions.StorageInternalError)
libc = ctypes.CDLL(None)


@dataclass
class Args:
    file: tyro.conf.Positional[Path]
    """a W&B sweep file"""
    trials: int = 100
    """finished trials that the study shall have, over all processes that share it"""
    jobs: int = 1
    """trials side by side"""
    study_name: str | None = None
    """name of the study, by default that of the file"""
    folder: Path | None = None
    """where logs, runs and results go, by default runs/sweeps/<study name>"""
    storage: str | None = None
    """URL of the database, such as postgresql+psycopg://user:password@host/name; by default study.db in the folder"""
    prune: bool = False
    """stop a trial that is worse than the median of the others after as many runs; not before ten are complete"""

    def __post_init__(self):
        for name in ("trials", "jobs"):
            if getattr(self, name) < 1:
                fail(f"--{name} must be at least 1, got {getattr(self, name)}")
        self.study_name = self.study_name or self.file.stem
        self.folder = (self.folder or Path("runs", "sweeps", self.study_name)).resolve()
        self.storage = self.storage or f"sqlite:///{self.folder / 'study.db'}"


# ------------------------------------------------------------------------------------------------------------ file


class Sweep(NamedTuple):
    method: str
    goal: str
    command: list
    parameters: dict  # name: an Optuna distribution, or [the value] of a constant


def on_grid(x: float, q: float) -> float:
    """W&B's rounding, without the noise in the last digits."""
    return float(f"{round(x / q) * q:.12g}")


def distribution(name: str, spec: dict):
    """What Optuna calls a parameter of a W&B sweep. The values are exactly W&B's. Only W&B draws the two ends of a
    quantized range half as often as what lies between, and Optuna as often."""
    if not isinstance(spec, dict):
        fail(f"parameter {name}: {spec!r} is no description of a parameter")
    spec = dict(spec)
    low, high = spec.get("min"), spec.get("max")
    kind = spec.pop("distribution", None) or (
        "constant" if "value" in spec
        else "categorical_w_probabilities" if "probabilities" in spec
        else "categorical" if "values" in spec
        else "nested" if "parameters" in spec
        else "int_uniform" if isinstance(low, int) and isinstance(high, int)
        else "uniform"
    )  # fmt: skip
    needed = {
        "constant": {"value"}, "categorical": {"values"}, "int_uniform": {"min", "max"}, "uniform": {"min", "max"},
        "q_uniform": {"min", "max"}, "log_uniform": {"min", "max"}, "log_uniform_values": {"min", "max"},
    }  # fmt: skip
    if kind not in needed:
        fail(f"parameter {name}: distribution {kind} has no exact counterpart in Optuna")
    if missing := needed[kind] - set(spec):
        fail(f"parameter {name}: {kind} needs {' and '.join(sorted(missing))}")
    if unknown := set(spec) - needed[kind] - ({"q"} if kind == "q_uniform" else set()):
        fail(f"parameter {name}: {kind} has no {' and no '.join(sorted(map(str, unknown)))}")
    if kind == "constant":
        return [spec["value"]]
    try:
        if kind == "categorical":
            with warnings.catch_warnings():
                warnings.simplefilter("error")  # values that a database cannot hold
                return CategoricalDistribution(spec["values"])
        if not low < high:
            raise ValueError(f"min {low} is not less than max {high}")
        if kind == "int_uniform":
            return IntDistribution(low, high)
        if kind == "q_uniform":
            q = spec.get("q", 1.0)
            ends = on_grid(low, q), on_grid(high, q)
            return IntDistribution(*map(int, ends), step=q) if isinstance(q, int) else FloatDistribution(*ends, step=q)
        if kind == "log_uniform":  # whose ends are given as exponents
            return FloatDistribution(math.exp(low), math.exp(high), log=True)
        return FloatDistribution(low, high, log=kind == "log_uniform_values")
    except (TypeError, ValueError, OverflowError, ZeroDivisionError, UserWarning) as error:
        fail(f"parameter {name}: {str(error).partition(chr(10))[0]}")


def load_sweep(path: Path, extra: list) -> Sweep:
    try:
        content = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError) as error:
        fail(f"cannot read {path}: {getattr(error, 'strerror', None) or error}")
    except yaml.YAMLError as error:
        fail(f"{path} is no YAML: {' '.join(str(error).split())}")
    if not isinstance(content, dict):
        fail(f"{path} is no sweep file")
    known = "program method metric command parameters name description project entity run_cap".split()
    for key in content:
        if key == "early_terminate":
            fail(f"{path}: early_terminate is W&B's; offline it is --prune")
        if key not in known:
            fail(f"{path}: unknown key {key!r}")
    if content.get("method") not in ("bayes", "random", "grid"):
        fail(f"{path}: method {content.get('method')!r} is unknown; there are bayes, random and grid")
    metric = content.get("metric")
    if not isinstance(metric, dict) or metric.get("name") != "objective":
        fail(f"{path}: the metric must be 'objective', which is what sweeps/objective.py reports")
    if metric.get("goal", "minimize") not in ("minimize", "maximize"):
        fail(f"{path}: the goal is to minimize or to maximize, got {metric['goal']!r}")
    parameters = content.get("parameters")
    if not isinstance(parameters, dict) or not parameters:
        fail(f"{path} has no parameters")
    program = str(content.get("program"))
    if Path(program).name != "objective.py" or not Path(program).is_file():
        fail(f"{path}: the program must be sweeps/objective.py, seen from the current folder, got {program}")
    command = content.get("command") or ["${env}", "${interpreter}", "${program}", "${args}"]
    if not isinstance(command, list):
        fail(f"{path}: the command must be a list")
    command = [program if str(word) == "${program}" else str(word) for word in command] + extra
    if program not in command:
        fail(f"{path}: the command lacks ${{program}}")
    distributions = {str(name): distribution(name, spec) for name, spec in parameters.items()}
    arguments(command, {name: found[0] for name, found in distributions.items() if isinstance(found, list)})  # or fail
    return Sweep(content["method"], metric.get("goal", "minimize"), command, distributions)


def fill(command: list, values: dict) -> list:
    """The command with its macros filled in, as W&B's agent does it."""
    macros = {
        "env": ["/usr/bin/env"],
        "interpreter": [sys.executable],
        "args": [f"--{name}={value}" for name, value in values.items()],
        "args_no_hyphens": [f"{name}={value}" for name, value in values.items()],
        "args_no_equals": [word for name, value in values.items() for word in (f"--{name}", str(value))],
        "args_no_boolean_flags": [
            f"--{name}" if value is True else f"--{name}={value}"
            for name, value in values.items()
            if value is not False
        ],
        "args_json": [json.dumps(values)],
    }
    line = []
    for word in command:
        word = re.sub(r"\$\{envvar:([A-Z0-9_]*)\}", lambda found: os.environ.get(found[1], found[1]), word)
        if not re.fullmatch(r"\$\{.*\}", word):
            line.append(word)
        elif word[2:-1] in macros:
            line += macros[word[2:-1]]
        else:
            fail(f"the command has {word}, which is not supported offline")
    return line


def arguments(command: list, values: dict):
    """The arguments of sweeps/objective.py in a command, and the flags it hands to the script."""
    line = fill(command, values)
    program = next(i for i, word in enumerate(line) if Path(word).name == "objective.py")
    return parse(line[program + 1 :])


# ----------------------------------------------------------------------------------------------------------- study


def make_sampler(sweep: Sweep):
    if sweep.method == "bayes":
        return optuna.samplers.GPSampler()
    if sweep.method == "random":
        return optuna.samplers.RandomSampler()
    return optuna.samplers.GridSampler(grid(sweep))


def grid(sweep: Sweep) -> dict:
    space = {}
    for name, found in sweep.parameters.items():
        if isinstance(found, CategoricalDistribution):
            space[name] = list(found.choices)
        elif not isinstance(found, list) and found.step:
            count = round((found.high - found.low) / found.step) + 1
            space[name] = [type(found.low)(f"{found.low + k * found.step:.12g}") for k in range(count)]
        elif not isinstance(found, list):
            fail(f"parameter {name}: a grid needs values, or a step")
    return space


def suggest(trial: optuna.Trial, sweep: Sweep) -> dict:
    values = {}
    for name, found in sweep.parameters.items():
        if isinstance(found, list):
            values[name] = found[0]
        elif isinstance(found, CategoricalDistribution):
            values[name] = trial.suggest_categorical(name, found.choices)
        elif isinstance(found, IntDistribution):
            values[name] = trial.suggest_int(name, found.low, found.high, step=found.step)
        else:
            x = trial.suggest_float(name, found.low, found.high, step=found.step, log=found.log)
            values[name] = on_grid(x, found.step) if found.step else x
    return values


def open_study(url: str, name: str, sweep: Sweep | None = None) -> optuna.Study:
    """The study of the sweep, made if need be. Without a sweep, one that must be there."""
    try:
        parsed = sqlalchemy.make_url(url)
    except sqlalchemy.exc.ArgumentError:
        fail(f"--storage: {url!r} is no URL of a database")
    shown = parsed.render_as_string(hide_password=True)
    sqlite = parsed.drivername == "sqlite"
    if sqlite and parsed.database:
        if sweep is None and not Path(parsed.database).exists():
            fail(f"there is no study at {shown}")
        try:
            Path(parsed.database).parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            fail(f"cannot write to {Path(parsed.database).parent}: {error.strerror}")
    # Workers that meet at an SQLite file wait for each other; a connection to a server may have died overnight.
    engine = dict(connect_args=dict(timeout=60)) if sqlite else dict(pool_pre_ping=True)
    life = dict(heartbeat_interval=HEARTBEAT, grace_period=GRACE)
    life |= dict(heartbeat_stale_trial_callback=RetryHeartbeatStaleTrialCallback())
    for attempt in range(5):
        try:
            storage = optuna.storages.RDBStorage(url, engine, **life)
            if sweep is None:
                return optuna.load_study(study_name=name, storage=storage)
            study = optuna.create_study(study_name=name, storage=storage, direction=sweep.goal, load_if_exists=True)
            break
        except KeyError:
            fail(f"there is no study {name!r} at {shown}")
        except ImportError as error:
            fail(f"--storage {shown}: {error}")
        except (*STORAGE_ERRORS, RuntimeError) as error:
            if attempt == 4:
                fail(f"cannot use the storage {shown}: {one_line(error)}")
            time.sleep(0.5)  # another process may be making the tables at this moment
    what = dict(command=sweep.command, parameters={name: str(found) for name, found in sweep.parameters.items()})
    if study.user_attrs.get("sweep", what) != what:
        fail(f"study {name!r} at {shown} is of another sweep or other arguments: give another --study-name")
    study.set_user_attr("sweep", what)
    return study


# ---------------------------------------------------------------------------------------------------------- trials


def one_line(error: Exception) -> str:
    return " ".join(str(error.__cause__ or error).split())[:200]


class Interrupted(Exception):
    pass


class Workers:
    """Threads, as the work is done by the processes of the trials. They have in common when to stop, and why."""

    def __init__(self, args: Args, sweep: Sweep, storage):
        self.args, self.sweep, self.storage = args, sweep, storage
        self.stop, self.lock = threading.Event(), threading.Lock()
        self.turn = threading.Lock()  # to begin a trial: each counts those that run, and the sampler learns from them
        self.failures, self.reason = 0, None

    def work(self):
        """Until the study has its trials. One more is begun only if it cannot be one too many."""
        pruner = optuna.pruners.MedianPruner(n_startup_trials=10) if self.args.prune else optuna.pruners.NopPruner()
        try:
            study = optuna.load_study(
                study_name=self.args.study_name, storage=self.storage, sampler=make_sampler(self.sweep), pruner=pruner
            )
            while not self.stop.is_set():
                with ExitStack() as turn:
                    turn.enter_context(self.turn)
                    optuna.storages.fail_stale_trials(study)
                    states = [trial.state for trial in study.get_trials(deepcopy=False)]
                    done = sum(states.count(state) for state in DONE)
                    if done >= self.args.trials:
                        return
                    if done + states.count(TrialState.RUNNING) < self.args.trials:
                        self.run_one(study, turn)
                        continue
                self.stop.wait(0.5)  # one of those that run may yet fail
        except STORAGE_ERRORS as error:
            self.give_up(f"the storage failed: {one_line(error)}")
        except Exception as error:  # a thread would die without a word, and the others go on
            self.give_up(f"{type(error).__name__}: {one_line(error)}")

    def give_up(self, reason: str):
        with self.lock:
            self.reason = self.reason or reason
        self.stop.set()

    def run_one(self, study, turn: ExitStack):
        found = []

        def objective(trial):
            found.append(trial)
            return self.run_trial(study, trial, turn)

        try:
            study.optimize(objective, n_trials=1, catch=(RunFailed, Interrupted))
        except ValueError as error:
            if "Cannot tell" not in str(error):
                raise
            print(f"trial {found[0].number} was silent for too long and is run again", flush=True)
            return
        trial = study.get_trials(deepcopy=False)[found[0].number]
        if trial.state == TrialState.FAIL and "error" not in trial.user_attrs:
            if "values" in trial.user_attrs:
                RetryHeartbeatStaleTrialCallback()(study, trial)
            return
        with self.lock:
            self.failures = self.failures + 1 if trial.state == TrialState.FAIL else 0
        print(self.outcome(study, trial), flush=True)
        if trial.state == TrialState.FAIL:
            first = not study.get_trials(deepcopy=False, states=DONE)
            if first or self.failures >= FAILURES:
                what = "the first trial failed" if first else f"{FAILURES} trials in a row failed, the last"
                self.give_up(f"{what} with: {trial.user_attrs['error']}")

    def outcome(self, study, trial) -> str:
        done = study.get_trials(deepcopy=False, states=DONE)
        line = f"{len(done)}/{self.args.trials} trial {trial.number}: "
        if trial.state == TrialState.FAIL:
            return line + f"failed: {trial.user_attrs['error']}"
        line += f"{'stopped early at' if trial.state == TrialState.PRUNED else 'objective'} {trial.value:.4f}"
        if any(other.state == TrialState.COMPLETE for other in done):
            line += f", best {study.best_value:.4f} in trial {study.best_trial.number}"
        return line

    def run_trial(self, study, trial, turn: ExitStack) -> float:
        others = study.get_trials(deepcopy=False, states=(*DONE, TrialState.RUNNING))
        if sum(x.state in DONE or x.number < trial.number for x in others) >= self.args.trials:
            raise Interrupted  # another process began one in the same moment
        values = suggest(trial, self.sweep)
        trial.set_user_attr("values", values)
        turn.close()
        # One that is run again is given its old folder, and so the runs that were finished in it.
        history = RetryHeartbeatStaleTrialCallback.retry_history(study.get_trials(deepcopy=False)[trial.number])
        folder = self.args.folder / f"trial-{[*history, trial.number][0]}"
        command = [*fill(self.sweep.command, values), "--folder", str(folder)]
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "objective.json").unlink(missing_ok=True)
        with open(folder / "log.txt", "a") as log:
            log.write(f"$ {shlex.join(command)}\n")
            log.flush()
            process = subprocess.Popen(
                command,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=lambda: libc.prctl(1, signal.SIGTERM),  # PR_SET_PDEATHSIG: a killed sweep leaves no orphan
            )
            reported = 0
            try:
                while True:
                    code = process.poll()
                    result = read_result(folder)
                    for step in range(reported, len(result["so_far"])):
                        trial.report(result["so_far"][step], step)
                    reported = len(result["so_far"])
                    if code is not None:
                        break
                    if self.args.prune and trial.should_prune():
                        raise optuna.TrialPruned
                    if self.stop.wait(0.2):
                        raise Interrupted
            finally:
                process.terminate()
                process.wait()
        if code or result["objective"] is None:
            trial.set_user_attr("error", f"{last_line(folder / 'log.txt')} ({os.path.relpath(folder / 'log.txt')})")
            raise RunFailed
        return result["objective"]


def read_result(folder: Path) -> dict:
    path = folder / "objective.json"
    return json.loads(path.read_text()) if path.exists() else dict(objective=None, so_far=[])


# ---------------------------------------------------------------------------------------------------------- results


def command_line(study: optuna.Study, trial) -> str:
    """To train with the values of a trial."""
    args, flags = arguments(study.user_attrs["sweep"]["command"], trial.user_attrs["values"])
    return shlex.join(["python", args.script, "--env-id", args.tasks[0], *flags])


def write_results(study: optuna.Study, folder: Path):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from optuna.visualization.matplotlib import plot_optimization_history, plot_param_importances

    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "trials.csv", "w", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        names = study.user_attrs["sweep"]["parameters"]
        table.writerow(["trial", "state", "objective", "minutes", *names])
        for trial in study.get_trials(deepcopy=False):
            if not trial.state.is_finished() or "values" not in trial.user_attrs:
                continue
            interrupted = trial.state == TrialState.FAIL and "error" not in trial.user_attrs
            state = "interrupted" if interrupted else trial.state.name.lower()
            value = "" if trial.value is None else f"{trial.value:.6g}"
            minutes = f"{trial.duration.total_seconds() / 60:.1f}"
            table.writerow([trial.number, state, value, minutes, *(trial.user_attrs["values"][name] for name in names)])
    plots = dict(history=plot_optimization_history)
    if len(study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))) > 1:
        plots["importance"] = plot_param_importances
    for name, plot in plots.items():
        plot(study)
        plt.gcf().set_size_inches(8, 4.5)
        plt.savefig(folder / f"{name}.png", dpi=130, bbox_inches="tight")
        plt.close("all")


def main():
    words = sys.argv[1:]
    cut = words.index("--") if "--" in words else len(words)
    args = tyro.cli(Args, description=__doc__, args=words[:cut])
    sweep = load_sweep(args.file, words[cut + 1 :])
    if sweep.method == "grid":
        args.trials = min(args.trials, math.prod(map(len, grid(sweep).values())))
    study = open_study(args.storage, args.study_name, sweep)
    if running := len(study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))):
        print(f"{running} trials in other processes; those that are dead are run again, in a minute or so", flush=True)
    workers = Workers(args, sweep, study._storage)
    signals = []

    def on_signal(number, frame):
        signals.append(number)
        workers.stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, on_signal)
    threading.excepthook = lambda error: workers.give_up(f"the storage failed: {error.exc_value}")  # of a heartbeat
    threads = [threading.Thread(target=workers.work) for _ in range(min(args.jobs, args.trials))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if signals:
        print("stopped; the same command goes on", file=sys.stderr)
        sys.exit(128 + signals[0])
    if workers.reason:
        print(f"error: {workers.reason}", file=sys.stderr)
        sys.exit(1)
    write_results(study, args.folder)
    best = study.best_trial
    print(f"the best is trial {best.number} with objective {best.value:.4f}; tables and plots are in {args.folder}")
    print(command_line(study, best))


if __name__ == "__main__":
    main()
