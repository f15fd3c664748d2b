"""One trial of a sweep: trains a script on every task with every seed, one run after another, and scores the returns.

    python sweeps/objective.py --script vsop_continuous.py --tasks Reacher-v4 Hopper-v4 --seeds 1 2 --learning-rate 3e-4

Its own flags are below; every other one goes to the script as it is. The files in sweeps/ name this program, and W&B's
agent or sweeps/offline.py runs it. A run counts by the mean return of its last 100 episodes (on ProcGen, of its last
100 test episodes), normalized so that 0 is a random policy (benchmark/results/random.json) and 1 is PPO after a million
steps as VSOP's authors published it (PPO_at_1_million in benchmark/results/published.json, read from their plots). The
objective is the mean over all runs. A task that lacks these references, such as ProcGen's bossfight, can only be swept
alone, and counts by its return.

The objective goes to --folder, as objective.json, with the mean so far after each run, and to W&B in a W&B sweep.
Runs that are finished in --folder are not run again.
"""

import argparse
import json
import math
import os
import re
import signal
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmark"))
from run import execute, fail

RESULTS = ROOT / "benchmark" / "results"
LAST = 100  # episodes that a return is the mean of


class RunFailed(Exception):
    pass


def parse(arguments: list):
    """The program's own arguments, and those of the script."""
    parser = argparse.ArgumentParser(
        description=__doc__, allow_abbrev=False, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.error = fail  # one line, without the usage
    parser.add_argument("--script", required=True, help="training script, by its path from the top folder")
    parser.add_argument("--tasks", nargs="+", required=True, help="its --env-id")
    parser.add_argument("--seeds", nargs="+", type=int, required=True, help="its --seed")
    parser.add_argument("--total-timesteps", "--total_timesteps", type=int, required=True, help="steps of each run")
    parser.add_argument("--folder", type=Path, help="where the runs and objective.json go; by default under runs/")
    args, flags = parser.parse_known_args(arguments)
    if not (ROOT / args.script).is_file():
        fail(f"there is no script {args.script}")
    for flag in flags:
        if re.match(r"--(env[-_]id|seed|resume)\b", flag):
            fail(f"{flag}: a sweep has --tasks and --seeds, and resumes its runs by itself")
    known = references()
    for task in args.tasks if len(args.tasks) > 1 else ():
        if task not in known:
            fail(f"{task} has no reference scores, and cannot be averaged with other tasks: sweep it alone")
    return args, flags


def references() -> dict:
    """By task: the returns of a random policy and of PPO."""
    random = json.loads((RESULTS / "random.json").read_text())["scores"]
    ppo = json.loads((RESULTS / "published.json").read_text())["read_from_plots_approximate"]["PPO_at_1_million"]
    ppo = {task.replace("Pusher-v4", "Pusher-v5"): value for task, value in ppo.items()}
    return {task: (random[task]["mean"], ppo[task]) for task in ppo if task in random}


def normalized(task: str, value: float, known: dict) -> float:
    low, high = known.get(task, (0.0, 1.0))
    return (value - low) / (high - low)


def last_line(path: Path) -> str:
    """Of a log: what it has to say of a failure. tyro draws a box, and says it in the first line of that."""
    lines = [line for line in path.read_text(errors="replace").splitlines() if line.strip()] or ["no output"]
    boxes = [i for i, line in enumerate(lines[:-1]) if line.startswith("╭")]
    return lines[boxes[-1] + 1 if boxes else -1].strip("│ ").removeprefix("error: ")


def mean_return(folder: Path) -> float:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    checkpoint = max(folder.glob("runs/*/checkpoint.pt"), key=lambda path: path.stat().st_mtime)
    log = EventAccumulator(str(checkpoint.parent), size_guidance=dict(scalars=0))
    log.Reload()
    tags = [tag for tag in ("test/episodic_return", "charts/episodic_return") if tag in log.Tags()["scalars"]]
    if not tags:
        raise RunFailed("no episode ended")
    values = [event.value for event in log.Scalars(tags[0])[-LAST:]]
    return sum(values) / len(values)


def train(script: str, task: str, seed: int, total_timesteps: int, flags: list, folder: Path) -> float:
    """Return of one run, which may have been finished before."""
    folder = folder / f"{task.replace('/', '-')}__{seed}"
    if not (folder / "finished").exists():
        own = ["--env-id", task, "--seed", str(seed), "--total-timesteps", str(total_timesteps)]
        outcome = execute([str(ROOT / script), *flags, *own], folder, gpu=True)
        if outcome == "stopped":
            raise KeyboardInterrupt
        if outcome != "finished":
            raise RunFailed(f"{task}, seed {seed}: {last_line(folder / 'log.txt')}")
    return mean_return(folder)


def write(path: Path, content: dict):
    """Whole or not at all: the file is read while the trial runs."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps(content, indent=1) + "\n")
    part.replace(path)


def evaluate(args, flags: list, folder: Path) -> dict:
    """Seed by seed, so that what is known after k runs can be compared between trials."""
    known, scores, returns = references(), [], {task: [] for task in args.tasks}
    result = dict(objective=None, so_far=[], returns=returns)
    for seed in args.seeds:
        for task in args.tasks:
            value = train(args.script, task, seed, args.total_timesteps, flags, folder)
            returns[task].append(value)
            scores.append(normalized(task, value, known))
            result["so_far"].append(sum(scores) / len(scores))
            write(folder / "objective.json", result)
    result["objective"] = result["so_far"][-1]
    if not math.isfinite(result["objective"]):
        raise RunFailed(f"the objective is {result['objective']}")
    write(folder / "objective.json", result)
    return result


def main():
    args, flags = parse(sys.argv[1:])
    name = os.environ.get("WANDB_RUN_ID") or f"{Path(args.script).stem}__{time.time_ns()}"
    folder = (args.folder or Path("runs", "objective", name)).resolve()
    signals = []

    def on_signal(number, frame):
        signals.append(number)
        raise KeyboardInterrupt

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, on_signal)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tracked = None
        if os.environ.get("WANDB_SWEEP_ID"):
            import wandb

            try:
                tracked = wandb.init()
            except wandb.errors.Error as error:
                fail(f"cannot track with W&B: {str(error).partition(chr(10))[0]}")
        result = evaluate(args, flags, folder)
        means = {task: sum(values) / len(values) for task, values in result["returns"].items()}
        if tracked:
            # Once, at the end: W&B's search goes by the best of all values that were logged under the name.
            tracked.log(dict(objective=result["objective"]) | {f"return/{task}": x for task, x in means.items()})
            tracked.finish()
    except KeyboardInterrupt:
        sys.exit(128 + signals[0])
    except RunFailed as error:
        fail(error)
    except OSError as error:
        fail(f"cannot write to {folder}: {error.strerror or error}")
    print(f"objective {result['objective']:.4f}: " + ", ".join(f"{task} {x:.2f}" for task, x in means.items()))


if __name__ == "__main__":
    main()
