"""Run one trial of a sweep: train a script on every task with every seed, and score the returns.

    python sweeps/objective.py --script vsop_continuous.py --tasks Reacher-v4 Hopper-v4 --seeds 1 2 \\
        --total-timesteps 1000000 --learning-rate 3e-4

Its own flags are below; all others go to the script. W&B's agent runs this program for the files in sweeps/, and
sweeps/offline.py does the same without W&B. A run is scored by the mean return of its last 100 episodes (on ProcGen,
test episodes), normalized so that 0 is a random policy and 1 is PPO at the same number of steps, by the committed runs
in benchmark/results/. The objective is the mean over all runs; with several tasks each score is clipped to [0, 2], so
that no task decides alone. A task without this reference must be tuned alone; its objective is its return.

The objective is written to objective.json in --folder, with the mean so far after each run, and to W&B in a W&B sweep.
Runs already finished in --folder are not repeated.
"""

import json
import math
import os
import re
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmark"))
from common import (
    LAST,
    ROOT,
    Parser,
    catch_signals,
    execute,
    fail,
    interrupt,
    positive,
    read_log,
    read_returns,
    references,
    stopped,
)


class RunFailed(Exception):
    pass


class Stopped(Exception):
    pass


def parse(arguments: list):
    """The program's own arguments, and those of the script."""
    parser = Parser(__doc__)
    add = parser.add_argument
    add("--script", required=True, help="training script, relative to the repository")
    add("--tasks", nargs="+", required=True, help="values of its --env-id")
    add("--seeds", nargs="+", type=int, required=True, help="values of its --seed")
    add("--total-timesteps", type=positive, required=True, help="steps of each run")
    add("--folder", type=Path, help="where the runs and objective.json go (default: a new one under runs/)")
    args, flags = parser.parse_known_args(arguments)
    if not (ROOT / args.script).is_file():
        fail(f"--script: there is no {args.script}")
    for flag in flags:
        if re.match(r"--(env[-_]id|seed|resume)\b", flag):
            fail(f"{flag}: use --tasks and --seeds; runs resume by themselves")
    args.reference = references(args.total_timesteps)
    for task in args.tasks if len(args.tasks) > 1 else ():
        if task not in args.reference.index:
            fail(f"--tasks: no PPO reference for {task} at {args.total_timesteps:,} steps; tune this task alone")
    return args, flags


def note(args):
    if args.tasks[0] not in args.reference.index:
        steps = f"{args.total_timesteps:,} steps"
        print(f"no PPO reference for {args.tasks[0]} at {steps}: the objective is the mean return", flush=True)


def normalized(task: str, value, reference):
    if task not in reference.index:
        return value
    zero, one = reference.loc[task, ["random", "final"]]
    return (value - zero) / (one - zero)


def train(script: str, task: str, seed: int, total_timesteps: int, flags: list, folder: Path, stop=None) -> float:
    """Mean return of the last episodes of one run."""
    folder = folder / f"{task.replace('/', '-')}__{seed}"
    own = ["--env-id", task, "--seed", str(seed), "--total-timesteps", str(total_timesteps)]
    outcome = execute([str(ROOT / script), *flags, *own], folder, stop)
    if outcome == "stopped":
        raise Stopped
    if outcome != "finished":
        raise RunFailed(f"{task}, seed {seed} {outcome}")
    returns = read_returns(read_log(folder))
    if not returns:
        raise RunFailed(f"{task}, seed {seed}: no episode ended")
    _, values = list(returns.values())[-1]
    return sum(values[-LAST:]) / len(values[-LAST:])


def write(path: Path, content: dict):
    """Replaces the file as a whole."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps(content, indent=1) + "\n")
    part.replace(path)


def evaluate(args, flags: list, folder: Path, after_run=None, stop=None) -> dict:
    """Runs seed by seed, so that trials can be compared after k runs. `after_run` gets the result after each run."""
    scores, returns = [], {task: [] for task in args.tasks}
    result = dict(objective=None, so_far=[], returns=returns)
    for seed in args.seeds:
        for task in args.tasks:
            value = train(args.script, task, seed, args.total_timesteps, flags, folder, stop)
            if not math.isfinite(value):
                raise RunFailed(f"{task}, seed {seed}: the return is {value}")
            returns[task].append(value)
            score = float(normalized(task, value, args.reference))
            scores.append(score if len(args.tasks) == 1 else min(max(score, 0.0), 2.0))
            result["so_far"].append(sum(scores) / len(scores))
            if len(scores) == len(args.seeds) * len(args.tasks):
                result["objective"] = result["so_far"][-1]
            write(folder / "objective.json", result)
            if after_run:
                after_run(result)
    return result


def main():
    args, flags = parse(sys.argv[1:])
    name = os.environ.get("WANDB_RUN_ID") or f"{Path(args.script).stem}__{time.time_ns()}"
    folder = (args.folder or Path("runs", "objective", name)).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    note(args)
    received, tracked = catch_signals(interrupt), None
    try:
        if os.environ.get("WANDB_SWEEP_ID"):
            import wandb

            try:
                tracked = wandb.init()
            except wandb.errors.Error as error:
                fail(f"cannot track with W&B: {str(error).partition(chr(10))[0]}")
        result = evaluate(args, flags, folder)
    except (KeyboardInterrupt, Stopped):
        stopped(received)
    except RunFailed as error:
        fail(error)
    means = {task: sum(values) / len(values) for task, values in result["returns"].items()}
    if tracked:
        # Once, at the end: W&B's search uses the best value that was logged under the name.
        tracked.log(dict(objective=result["objective"]) | {f"return/{task}": x for task, x in means.items()})
        tracked.finish()
    print(f"objective {result['objective']:.4f}: " + ", ".join(f"{task} {x:.2f}" for task, x in means.items()))


if __name__ == "__main__":
    main()
