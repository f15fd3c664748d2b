"""Run the paper's experiments: every method of an experiment on every task with every seed.

    python benchmark/run.py baselines --seeds 3 --total-timesteps 1000000
    python benchmark/run.py timelimit --methods VSOP "VSOP as published" --tasks Hopper-v4

An experiment is a file in benchmark/experiments/ with tasks and command lines: open it, change it, or give one of your
own by its path. Each run is an ordinary command line in a folder of its own under --folder, where its log says how to
repeat it by hand. One run per core (or per share of a GPU), scheduled by Ray: on this machine, or with --address on a
cluster that shares the folder. The same command goes on where it was: finished runs are skipped, others resumed.
"""

import ctypes
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import tyro
from tqdm import tqdm

ROOT = Path(__file__).resolve().parent.parent
ATTEMPTS = 3  # per run; only deaths count that a resumed run may survive


def fail(message: str):
    print(f"error: {message}", file=sys.stderr)
    sys.exit(2)


@dataclass
class Args:
    experiment: tyro.conf.Positional[str]
    """name of a file in benchmark/experiments/, or path of one of your own"""
    seeds: int = 3
    """seeds 1 to this"""
    total_timesteps: int = 3_000_000
    """steps of each run"""
    tasks: tuple[str, ...] = ()
    """only these tasks of the experiment"""
    methods: tuple[str, ...] = ()
    """only these methods of the experiment"""
    folder: Path = Path("benchmark/runs")
    """where the runs are; experiments that have a run in common share it"""
    jobs: int | None = None
    """runs side by side on this machine; by default one per core"""
    address: str | None = None
    """address of a Ray cluster, or 'auto' for the one this machine belongs to"""
    gpus_per_run: float = 0.0
    """share of a GPU that a run takes, for example 0.25; without one the runs are on CPU"""

    def __post_init__(self):
        for name, least in (("seeds", 1), ("total_timesteps", 1), ("jobs", 1), ("gpus_per_run", 0)):
            if getattr(self, name) is not None and getattr(self, name) < least:
                fail(f"--{name.replace('_', '-')} must be at least {least}, got {getattr(self, name)}")


class Experiment(NamedTuple):
    name: str
    tasks: list
    methods: dict  # name: command line


class Run(NamedTuple):
    method: str
    task: str
    seed: int
    command: list
    folder: Path
    total: int


def load_experiment(name: str) -> Experiment:
    path = Path(name) if name.endswith(".toml") else Path(__file__).parent / "experiments" / f"{name}.toml"
    if not path.is_file():
        known = ", ".join(sorted(x.stem for x in (Path(__file__).parent / "experiments").glob("*.toml")))
        fail(f"there is no experiment {name!r}; there are {known}")
    try:
        content = tomllib.loads(path.read_text())
        return Experiment(path.stem, list(content["tasks"]), dict(content["methods"]))
    except (tomllib.TOMLDecodeError, KeyError, TypeError, ValueError) as error:
        fail(f"{path} is no experiment: {type(error).__name__}: {error}")


def chosen(wanted, known, what):
    for name in wanted:
        if name not in known:
            fail(f"the experiment has no {what} {name!r}; it has {', '.join(known)}")
    return [name for name in known if name in wanted] if wanted else list(known)


def grid(args: Args) -> list:
    """Seed by seed, so that what is there when time runs out can be compared."""
    experiment = load_experiment(args.experiment)
    runs = []
    for seed in range(1, args.seeds + 1):
        for task in chosen(args.tasks, experiment.tasks, "task"):
            for method in chosen(args.methods, experiment.methods, "method"):
                line = experiment.methods[method]
                script, *flags = shlex.split(line)
                own = ["--env-id", task, "--seed", str(seed), "--total-timesteps", str(args.total_timesteps)]
                name = re.sub(r"[^\w.=-]+", "_", line.replace(".py", "").replace(" --", "__"))
                folder = args.folder.resolve() / f"{task.replace('/', '-')}__{name}__{seed}__{args.total_timesteps}"
                command = [str(ROOT / script), *flags, *own]
                if not Path(command[0]).is_file():
                    fail(f"method {method!r} is of {script}, which does not exist")
                runs.append(Run(method, task, seed, command, folder, args.total_timesteps))
    return runs


def finished(run: Run) -> bool:
    return (run.folder / "finished").exists()


def execute(command: list, folder: Path, gpu: bool) -> str:
    """Runs a command line to its end, resuming it if it dies. Returns what became of it."""
    folder.mkdir(parents=True, exist_ok=True)

    def end_with_parent():
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG: a lost scheduler leaves no orphan

    for _ in range(ATTEMPTS):
        checkpoints = sorted(folder.glob("runs/*/checkpoint.pt"), key=lambda path: path.stat().st_mtime)
        line = [sys.executable, *command, *([] if gpu else ["--no-cuda"])]
        if checkpoints:
            line = [sys.executable, command[0], "--resume", str(checkpoints[-1].parent.relative_to(folder))]
        with open(folder / "log.txt", "a") as log:
            log.write(f"$ {shlex.join(line)}\n")
            log.flush()
            process = subprocess.Popen(
                line,
                cwd=folder,
                stdout=log,
                stderr=subprocess.STDOUT,
                preexec_fn=end_with_parent,
                start_new_session=True,
            )
            try:
                while (code := process.poll()) is None:
                    time.sleep(0.2)  # and not wait(), which the interrupt that cancels a Ray task does not reach
            except KeyboardInterrupt:
                process.terminate()
                process.wait()
                return "stopped"
        if code == 0:
            (folder / "finished").touch()
            return "finished"
        if code in (1, 2):  # a loss that is not finite, or a bad argument: the same would happen again
            break
    return f"failed with exit code {code}, see {folder / 'log.txt'}"


PROGRESS = re.compile(r"^step (\d+)/", re.M)


def steps_done(run: Run) -> int:
    """From the lines that a script writes every half minute."""
    if finished(run):
        return run.total
    path = run.folder / "log.txt"
    if not path.exists():
        return 0
    with open(path, "rb") as file:
        file.seek(max(0, path.stat().st_size - 4000))
        found = PROGRESS.findall(file.read().decode(errors="replace"))
    return int(found[-1]) if found else 0


class Display:
    """A bar over the steps of all runs on a terminal, elsewhere a line a minute."""

    def __init__(self, runs: list):
        self.runs, self.start, self.next_line = runs, time.time(), time.time() + 60
        self.initial = sum(map(steps_done, runs))
        total = sum(run.total for run in runs)
        options = dict(unit="step", unit_scale=True, disable=not sys.stdout.isatty(), file=sys.stdout)
        self.bar = tqdm(total=total, initial=self.initial, **options)

    def update(self):
        done = max(self.bar.n if not self.bar.disable else 0, sum(map(steps_done, self.runs)))
        ready = f"{sum(map(finished, self.runs))}/{len(self.runs)} runs"
        self.bar.set_postfix_str(ready, refresh=False)
        self.bar.update(done - self.bar.n)
        if self.bar.disable and time.time() > self.next_line and done > self.initial:
            rate = (done - self.initial) / (time.time() - self.start)
            left = time.strftime("%H:%M:%S", time.gmtime((self.bar.total - done) / rate))
            print(f"{ready}, {done / self.bar.total:.1%} of the steps, {rate:.0f} steps/s, {left} left", flush=True)
            self.next_line = time.time() + 60


def main(args: Args):
    import ray

    runs = grid(args)
    todo = [run for run in runs if not finished(run)]
    print(f"{len(runs)} runs, {len(runs) - len(todo)} of them finished before, in {args.folder}", flush=True)
    if not todo:
        return
    if args.address and args.address != "auto":  # Ray itself would try for minutes
        host, _, port = args.address.rpartition(":")
        try:
            socket.create_connection((host.rpartition("/")[2], int(port)), timeout=5.0).close()
        except (OSError, ValueError) as error:
            fail(f"there is no Ray cluster at {args.address}: {error}")
    try:
        resources = {} if args.address else dict(num_cpus=args.jobs or os.cpu_count(), include_dashboard=False)
        ray.init(args.address or "local", log_to_driver=False, logging_level="ERROR", **resources)
    except (ConnectionError, RuntimeError) as error:
        fail(f"cannot use the Ray cluster at {args.address}: {str(error).partition(chr(10))[0]}")
    remote = ray.remote(num_cpus=1, num_gpus=args.gpus_per_run, max_retries=ATTEMPTS)(execute)
    waiting = {remote.remote(run.command, run.folder, args.gpus_per_run > 0): run for run in todo}
    display, failures = Display(runs), []
    try:
        while waiting:
            ready, _ = ray.wait(list(waiting), timeout=5.0)
            for reference in ready:
                run = waiting.pop(reference)
                outcome = ray.get(reference)
                if outcome != "finished":
                    failures.append(f"{run.method}, {run.task}, seed {run.seed}: {outcome}")
            display.update()
    except KeyboardInterrupt:
        for reference in waiting:
            ray.cancel(reference)
        ray.wait(list(waiting), num_returns=len(waiting), timeout=60)
        display.bar.close()
        print("stopped; the same command goes on", file=sys.stderr)
        sys.exit(130)
    display.bar.close()
    ray.shutdown()
    print(f"{sum(map(finished, runs))} of {len(runs)} runs finished")
    if failures:
        print("\n".join(failures), file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main(tyro.cli(Args))
