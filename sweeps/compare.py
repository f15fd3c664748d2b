"""Are the best settings of an offline sweep better than the script's defaults, on seeds that the sweep did not use?

    python sweeps/compare.py hopper --seeds 101 102 103 104 105 106 107 108 109 110 --jobs 2

trains both with every seed, as the trials did, and writes to sweeps/results/<study name>/: README.md, the page with
the answer, the table of trials and the plots of the search. What notes.md says there is taken into the page. Runs that
are finished are not run again.
"""

import csv
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tyro
from objective import ROOT, fail, last_line, normalized, references
from offline import arguments, command_line, open_study, write_results
from report import interval, markdown, number, with_interval


@dataclass
class Args:
    study_name: tyro.conf.Positional[str]
    """name of a study of sweeps/offline.py"""
    seeds: tuple[int, ...]
    """seeds to test on, none of them one of the sweep's"""
    jobs: int = 1
    """seeds side by side"""
    folder: Path | None = None
    """where the sweep's runs are, by default runs/sweeps/<study name>"""
    storage: str | None = None
    """URL of the database, by default study.db in the folder"""
    results: Path = ROOT / "sweeps" / "results"
    """where the page goes"""


def run(args, flags: list, seed: int, folder: Path) -> dict:
    """Returns by task of one setting with one seed."""
    folder = folder / f"seed-{seed}"
    folder.mkdir(parents=True, exist_ok=True)
    own = ["--script", args.script, "--tasks", *args.tasks, "--seeds", str(seed)]
    own += ["--total-timesteps", str(args.total_timesteps), "--folder", str(folder)]
    with open(folder / "log.txt", "a") as log:
        line = [sys.executable, str(ROOT / "sweeps" / "objective.py"), *own, *flags]
        if subprocess.run(line, stdout=log, stderr=subprocess.STDOUT).returncode:
            fail(f"{folder.parent.name}, seed {seed}: {last_line(folder / 'log.txt')}")
    print(f"{folder.parent.name}, seed {seed}: {last_line(folder / 'log.txt')}", flush=True)
    returns = json.loads((folder / "objective.json").read_text())["returns"]
    return {task: values[0] for task, values in returns.items()}


def run_all(args: Args, settings: dict, folder: Path) -> dict:
    """By setting and task, the returns in the order of the seeds."""
    with ThreadPoolExecutor(args.jobs) as pool:
        jobs = {}
        for seed in args.seeds:
            for name, (own, flags) in settings.items():
                jobs[name, seed] = pool.submit(run, own, flags, seed, folder / name)
        try:
            found = {key: job.result() for key, job in jobs.items()}
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    tasks = next(iter(settings.values()))[0].tasks
    return {(name, task): np.array([found[name, s][task] for s in args.seeds]) for name in settings for task in tasks}


def page(study, args: Args, own, returns: dict, results: Path) -> str:
    best, known = study.best_trial, references()
    lines, tuned = [], f"trial {best.number}"
    scores = {name: np.zeros(len(args.seeds)) for name in ("defaults", tuned)}
    for task in own.tasks:
        a, b = returns["defaults", task], returns[tuned, task]
        cells = (with_interval(x.mean(), *interval(x)) for x in (a, b, b - a))
        lines.append([f"return on {task}", *cells])
        for name in scores:
            scores[name] += normalized(task, returns[name, task], known) / len(own.tasks)
    a, b = scores["defaults"], scores[tuned]
    lines.append(["objective", *(with_interval(x.mean(), *interval(x)) for x in (a, b, b - a))])
    low, high = interval(b - a)
    if study.direction.name == "MINIMIZE":
        low, high = -high, -low
    verdict = (
        "The settings that were found are better than the defaults."
        if low > 0
        else "The settings that were found are worse than the defaults."
        if high < 0
        else "The settings that were found cannot be told from the defaults."
    )
    with open(results / "trials.csv") as file:
        head, *rows = csv.reader(file)
    states = [row[1] for row in rows]
    notes = results / "notes.md"
    parts = [
        f"# Sweep {args.study_name}",
        notes.read_text().strip() if notes.exists() else "",
        f"`{Path(own.script).name}` on {', '.join(own.tasks)}, {own.total_timesteps:,} steps a run, seeds "
        f"{', '.join(map(str, own.seeds))} in the search: {states.count('complete')} complete trials"
        + "".join(f", {states.count(x)} {x}" for x in ("pruned", "fail", "interrupted") if x in states)
        + f". The best, trial {best.number}, had an objective of {number(best.value)} there:",
        f"```bash\n{command_line(study, best)}\n```",
        "## On seeds that were not used for tuning",
        f"Mean of {len(args.seeds)} seeds ({', '.join(map(str, args.seeds))}) with 95 % bootstrap intervals; the "
        f"difference is taken seed by seed. **{verdict}**",
        markdown(["", "defaults", tuned, "difference"], lines),
        "## The search",
        "![Objective by trial](history.png)",
        "![Importance of the parameters](importance.png)",
        markdown(head, rows),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def main():
    args = tyro.cli(Args, description=__doc__)
    if args.jobs < 1:
        fail(f"--jobs must be at least 1, got {args.jobs}")
    folder = (args.folder or Path("runs", "sweeps", args.study_name)).resolve()
    study = open_study(args.storage or f"sqlite:///{folder / 'study.db'}", args.study_name)
    try:
        best = study.best_trial
    except ValueError:
        fail(f"study {args.study_name!r} has no complete trial yet")
    command, values = study.user_attrs["sweep"]["command"], best.user_attrs["values"]
    constants = {name: value for name, value in values.items() if name not in best.params}
    settings = {"defaults": arguments(command, constants), f"trial {best.number}": arguments(command, values)}
    own = settings["defaults"][0]
    if used := set(own.seeds) & set(args.seeds):
        fail(f"seed {min(used)} was used for tuning")
    try:
        returns = run_all(args, settings, folder / "compare")
    except KeyboardInterrupt:
        print("stopped; the same command goes on", file=sys.stderr)
        sys.exit(130)
    results = args.results / args.study_name
    write_results(study, results)
    with open(results / "comparison.csv", "w", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(["settings", "task", "seed", "return"])
        for (name, task), found in returns.items():
            table.writerows([name, task, seed, round(x, 3)] for seed, x in zip(args.seeds, found))
    (results / "README.md").write_text(page(study, args, own, returns, results))
    print(f"the page is {results / 'README.md'}")


if __name__ == "__main__":
    main()
