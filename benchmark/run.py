"""Run the paper's experiments: every method of an experiment on every task with every seed.

    python benchmark/run.py baselines --seeds 3 --total-timesteps 1000000
    python benchmark/run.py timelimit --methods VSOP "VSOP as published" --tasks Hopper-v4
    python benchmark/run.py classic --tasks Pendulum-v1 --seeds 100

An experiment is a file in benchmark/experiments/ with tasks and command lines. Change it, or pass the path of your own.
With `seeds_per_run` in the file, a run trains that many seeds in one process: the JAX scripts do.
Each run is an ordinary command in its own folder under --folder; log.txt there shows the command. Ray schedules one run
per core (or per share of a GPU) on this machine, or with --address on a cluster that shares the folder. Run the same
command again to resume: finished runs are skipped.
"""

import argparse
import os
import re
import shlex
import signal
import socket
import sys
import time
import tomllib
from pathlib import Path
from typing import NamedTuple

from common import ATTEMPTS, ROOT, TASKS, Parser, catch_signals, execute, fail, interrupt, positive, stopped
from tqdm import tqdm

FOLDER = Path("benchmark", "runs")


class Experiment(NamedTuple):
    name: str
    tasks: list
    methods: dict  # name: command line
    seeds: int = 3
    total_timesteps: int = 3_000_000
    seeds_per_run: int = 0  # 0: the scripts train one seed and have no --num-seeds


class Run(NamedTuple):
    method: str
    task: str
    seed: int  # the first
    command: list
    folder: Path
    total: int  # steps of each seed
    num_seeds: int = 1


def share(text: str) -> float:
    if not 0 <= float(text) <= 1:
        raise argparse.ArgumentTypeError(f"must be between 0 and 1, got {text}")
    return float(text)


def parse():
    parser = Parser(__doc__)
    add = parser.add_argument
    add("experiment", help="name of a file in benchmark/experiments/, or the path of your own")
    add("--seeds", type=positive, metavar="N", help="seeds 1 to N (default: the experiment's, or 3)")
    add("--total-timesteps", type=positive, help="steps of each seed (default: the experiment's, or 3000000)")
    add("--tasks", nargs="+", default=(), help="only these tasks of the experiment")
    add("--methods", nargs="+", default=(), help="only these methods of the experiment")
    add("--folder", type=Path, default=FOLDER, help=f"folder of the runs, which experiments share (default: {FOLDER})")
    add("--jobs", type=positive, default=os.cpu_count(), help="runs at the same time (default: one per core)")
    add("--address", help="address of a Ray cluster, or 'auto' for the one this machine belongs to")
    add("--gpus-per-run", type=share, default=0.0, help="share of a GPU per run, such as 0.25 (default: 0, CPU only)")
    return parser.parse_args()


def load_experiment(name: str) -> Experiment:
    folder = ROOT / "benchmark" / "experiments"
    path = Path(name) if name.endswith(".toml") else folder / f"{name}.toml"
    if not path.is_file():
        fail(f"unknown experiment {name!r}; available: {', '.join(sorted(x.stem for x in folder.glob('*.toml')))}")
    try:
        content = tomllib.loads(path.read_text())
        tasks, methods = content["tasks"], dict(content["methods"])
        tasks = TASKS.get(tasks) if isinstance(tasks, str) else tasks
        if not tasks or not all(isinstance(task, str) for task in tasks):
            raise ValueError(f"tasks must be a list of names or one of {', '.join(TASKS)}")
        for method, line in methods.items():
            if not isinstance(line, str) or not shlex.split(line):
                raise ValueError(f"method {method!r} must be a command line, got {line!r}")
            if not (ROOT / shlex.split(line)[0]).is_file():
                raise ValueError(f"method {method!r}: there is no script {shlex.split(line)[0]}")
        numbers = {name: content[name] for name in ("seeds", "total_timesteps", "seeds_per_run") if name in content}
        for name, x in numbers.items():
            if type(x) is not int or x < 1:
                raise ValueError(f"{name} must be a positive integer, got {x!r}")
    except (KeyError, TypeError, ValueError) as error:
        fail(f"{path}: {'missing ' * isinstance(error, KeyError)}{error}")
    return Experiment(path.stem, tasks, methods, **numbers)


def select(wanted, known, what):
    for name in wanted:
        if name not in known:
            fail(f"--{what}: the experiment has no {name!r}; available: {', '.join(known)}")
    return [name for name in known if name in wanted] if wanted else list(known)


def folder_name(task: str, line: str, seed, total) -> str:
    method = re.sub(r"[^\w.=*-]+", "_", line.replace(".py", "").replace(" --", "__"))
    return f"{task.replace('/', '-')}__{method}__{seed}__{total}"


def grid(experiment: Experiment, seeds: int, total: int, folder: Path, tasks=(), methods=()) -> list:
    """Seed by seed, so that an unfinished grid can be compared."""
    runs, block = [], experiment.seeds_per_run or 1
    for seed in range(1, seeds + 1, block):
        count = min(block, seeds + 1 - seed)
        for task in select(tasks, experiment.tasks, "tasks"):
            for method in select(methods, experiment.methods, "methods"):
                line = experiment.methods[method] + f" --num-seeds {count}" * bool(experiment.seeds_per_run)
                script, *flags = shlex.split(line)
                own = ["--env-id", task, "--seed", str(seed), "--total-timesteps", str(total)]
                path = folder.resolve() / folder_name(task, line, seed, total)
                runs.append(Run(method, task, seed, [str(ROOT / script), *flags, *own], path, total, count))
    return runs


def find_runs(experiment, folder) -> list:
    """The finished runs of the experiment, of any length."""
    runs = []
    for method, line in experiment.methods.items():
        for task in experiment.tasks:
            name = folder_name(task, line + " --num-seeds *" * bool(experiment.seeds_per_run), "[0-9]*", "[0-9]*")
            for path in sorted(folder.glob(f"{name}/finished")):
                *_, flags, seed, total = path.parent.name.split("__")
                count = int(flags.rpartition("_")[2]) if experiment.seeds_per_run else 1
                runs.append(Run(method, task, int(seed), [], path.parent, int(total), count))
    return runs


def finished(run: Run) -> bool:
    return (run.folder / "finished").exists()


PROGRESS = re.compile(r"^step (\d+)/", re.M)


def steps_done(run: Run) -> int:
    """Of all seeds, from the lines that a script prints every half minute."""
    path = run.folder / "log.txt"
    if finished(run) or not path.exists():
        return run.total * run.num_seeds * finished(run)
    with open(path, "rb") as file:
        file.seek(max(0, path.stat().st_size - 4000))
        found = PROGRESS.findall(file.read().decode(errors="replace"))
    return int(found[-1]) if found else 0


class Display:
    """A progress bar over the steps of all runs on a terminal, otherwise a line per minute."""

    def __init__(self, runs: list):
        self.runs, self.start, self.next_line = runs, time.time(), time.time() + 60
        self.initial = sum(map(steps_done, runs))
        total = sum(run.total * run.num_seeds for run in runs)
        options = dict(unit="step", unit_scale=True, disable=not sys.stdout.isatty(), file=sys.stdout)
        self.bar = tqdm(total=total, initial=self.initial, **options)

    def update(self):
        done = max(self.bar.n if not self.bar.disable else 0, sum(map(steps_done, self.runs)))
        ready = f"{sum(map(finished, self.runs))}/{len(self.runs)} runs"
        self.bar.set_postfix_str(ready, refresh=False)
        self.bar.update(done - self.bar.n)
        if self.bar.disable and time.time() > self.next_line and done > self.initial:
            rate = (done - self.initial) / (time.time() - self.start)
            left = tqdm.format_interval((self.bar.total - done) / rate)
            print(f"{ready}, {done / self.bar.total:.1%} of the steps, {rate:.0f} steps/s, {left} left", flush=True)
            self.next_line = time.time() + 60


def start_ray(args):
    import ray

    if args.address and args.address != "auto":  # Ray itself would try for minutes
        host, _, port = args.address.rpartition(":")
        try:
            socket.create_connection((host.rpartition("/")[2], int(port)), timeout=5.0).close()
        except (OSError, ValueError) as error:
            fail(f"--address: no Ray cluster at {args.address}: {error}")
    # A shell ignores SIGINT in background jobs. Ray's workers would inherit that, and could not be cancelled.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        resources = {} if args.address else dict(num_cpus=args.jobs, include_dashboard=False)
        ray.init(args.address or "local", log_to_driver=False, logging_level="ERROR", **resources)
    except (ConnectionError, RuntimeError) as error:
        fail(f"cannot start Ray: {str(error).partition(chr(10))[0]}")
    if args.gpus_per_run > ray.cluster_resources().get("GPU", 0):
        fail(f"--gpus-per-run {args.gpus_per_run}: Ray finds no GPU")
    return ray


def main():
    args = parse()
    experiment = load_experiment(args.experiment)
    seeds, total = args.seeds or experiment.seeds, args.total_timesteps or experiment.total_timesteps
    runs = grid(experiment, seeds, total, args.folder, args.tasks, args.methods)
    todo = [run for run in runs if not finished(run)]
    args.folder.mkdir(parents=True, exist_ok=True)
    print(f"{len(runs)} runs in {args.folder}, {len(runs) - len(todo)} already finished", flush=True)
    if not todo:
        return
    ray = start_ray(args)
    received = catch_signals(interrupt)
    remote = ray.remote(num_cpus=1, num_gpus=args.gpus_per_run, max_retries=ATTEMPTS)(execute)
    device = ["--cuda" if args.gpus_per_run else "--no-cuda"] * (not experiment.seeds_per_run)  # JAX needs no flag
    display, failures = Display(runs), []
    waiting = {remote.remote([*run.command, *device], run.folder): run for run in todo}
    try:
        while waiting:
            ready, _ = ray.wait(list(waiting), timeout=5.0)
            for reference in ready:
                run = waiting.pop(reference)
                outcome = ray.get(reference)
                if outcome != "finished":
                    failures.append(f"{run.method}, {run.task}, seed {run.seed} {outcome} ({run.folder / 'log.txt'})")
            display.update()
    except KeyboardInterrupt:
        for reference in waiting:
            ray.cancel(reference)
        ray.wait(list(waiting), num_returns=len(waiting), timeout=60)
        display.bar.close()
        stopped(received)
    display.bar.close()
    ray.shutdown()
    print(f"{sum(map(finished, runs))} of {len(runs)} runs finished")
    if failures:
        print("\n".join(failures), file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
