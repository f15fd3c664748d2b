"""Compare the best settings of an offline sweep with the script's defaults, on seeds that the sweep did not use.

    python sweeps/compare.py hopper --seeds 101 102 103 104 105 106 107 108 109 110 --jobs 2

Trains both with every seed, as the trials did, and writes the page README.md, the table of trials and the plots of the
search to sweeps/results/<study name>/. The page includes notes.md from the same folder. Finished runs are not repeated.
Without --seeds nothing is trained: the page shows only the search.
"""

import copy
import csv
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from offline import arguments, command_line, open_study, places, write_results

# isort: split
import numpy as np
from common import ROOT, Parser, catch_signals, fail, markdown, number, plain_name, positive, stopped
from objective import RunFailed, Stopped, evaluate, normalized
from report import interval, with_interval


def parse():
    parser = Parser(__doc__)
    add = parser.add_argument
    add("study_name", type=plain_name, help="name of a study of sweeps/offline.py")
    add("--seeds", type=int, nargs="+", default=[], help="seeds to test on, different from the sweep's")
    add("--jobs", type=positive, default=1, help="seeds at the same time (default: 1)")
    add("--folder", type=Path, help="folder of the sweep (default: runs/sweeps/<study name>)")
    add("--storage", help="URL of the database (default: study.db in the folder)")
    add("--results", type=Path, default=ROOT / "sweeps" / "results", help="where the page goes (default: %(default)s)")
    return parser.parse_args()


def run_all(args, settings: dict, folder: Path, stop) -> dict:
    """By setting and task, the returns in the order of the seeds."""
    failure = []

    def run(name, seed):
        own, flags = settings[name]
        own = copy.copy(own)
        own.seeds = [seed]
        path = folder / name / f"seed-{seed}"
        path.mkdir(parents=True, exist_ok=True)
        try:
            if stop.is_set():
                raise Stopped
            result = evaluate(own, flags, path, stop=stop)
        except RunFailed as error:
            failure.append(error)
            stop.set()
            raise Stopped from error
        print(f"{name}, seed {seed}: objective {result['objective']:.4f}", flush=True)
        return result["returns"]

    with ThreadPoolExecutor(args.jobs) as pool:
        jobs = {(name, seed): pool.submit(run, name, seed) for seed in args.seeds for name in settings}
    if failure:
        fail(failure[0])
    tasks = settings["defaults"][0].tasks
    return {
        (name, task): np.array([jobs[name, seed].result()[task][0] for seed in args.seeds])
        for name in settings
        for task in tasks
    }


def comparison(args, own, returns: dict, tuned: str, direction: str) -> list:
    lines, scores = [], {name: np.zeros(len(args.seeds)) for name in ("defaults", tuned)}
    for task in own.tasks:
        a, b = returns["defaults", task], returns[tuned, task]
        lines.append([f"return on {task}", *(with_interval(x.mean(), *interval(x)) for x in (a, b, b - a))])
        for name in scores:
            scores[name] += normalized(task, returns[name, task], own.reference) / len(own.tasks)
    a, b = scores["defaults"], scores[tuned]
    lines.append(["objective", *(with_interval(x.mean(), *interval(x)) for x in (a, b, b - a))])
    low, high = interval(b - a)
    if direction == "MINIMIZE":
        low, high = -high, -low
    verdict = (
        "The tuned settings are better than the defaults."
        if low > 0
        else "The tuned settings are worse than the defaults."
        if high < 0
        else "The difference between the tuned settings and the defaults is within the noise."
    )
    return [
        "## On seeds that were not used for tuning",
        f"Mean of {len(args.seeds)} seeds ({', '.join(map(str, args.seeds))}) with 95 % bootstrap intervals; the "
        f"difference is per seed. **{verdict}**",
        markdown(["", "defaults", tuned, "difference"], lines),
    ]


def page(study, args, own, returns: dict, results: Path) -> str:
    best = study.best_trial
    with open(results / "trials.csv") as file:
        head, *rows = csv.reader(file)
    states = [row[1] for row in rows]
    notes = results / "notes.md"
    parts = [
        f"# Sweep {args.study_name}",
        notes.read_text().strip() if notes.exists() else "",
        f"`{Path(own.script).name}` on {', '.join(own.tasks)}, {own.total_timesteps:,} steps per run, seeds "
        f"{', '.join(map(str, own.seeds))} in the search: {states.count('complete')} complete trials"
        + "".join(f", {states.count(x)} {y}" for x, y in dict(pruned="pruned", fail="failed").items() if x in states)
        + f". The best, trial {best.number}, has an objective of {number(best.value)} there:",
        f"```bash\n{command_line(study, best)}\n```",
        *(comparison(args, own, returns, f"trial {best.number}", study.direction.name) if returns else ()),
        "## The search",
        "![Objective by trial](history.png)",
        "![Importance of the parameters](importance.png)" if (results / "importance.png").exists() else "",
        markdown(head, rows),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def main():
    args = parse()
    folder, storage = places(args)
    study = open_study(storage, args.study_name)
    try:
        best = study.best_trial
    except ValueError:
        fail(f"study {args.study_name!r} has no complete trial yet")
    words = study.user_attrs["sweep"]["words"]
    settings = {"defaults": arguments(words, {}), f"trial {best.number}": arguments(words, best.user_attrs["values"])}
    own = settings["defaults"][0]
    if used := set(own.seeds) & set(args.seeds):
        fail(f"--seeds: {min(used)} was used for tuning")
    stop = threading.Event()
    received = catch_signals(stop.set)
    try:
        returns = run_all(args, settings, folder / "compare", stop) if args.seeds else {}
    except Stopped:
        stopped(received)
    results = args.results / args.study_name
    write_results(study, results)
    if returns:
        with open(results / "comparison.csv", "w", newline="") as file:
            table = csv.writer(file, lineterminator="\n")
            table.writerow(["settings", "task", "seed", "return"])
            for (name, task), found in returns.items():
                table.writerows([name, task, seed, round(x, 3)] for seed, x in zip(args.seeds, found))
    (results / "README.md").write_text(page(study, args, own, returns, results))
    print(f"wrote {results / 'README.md'}")


if __name__ == "__main__":
    main()
