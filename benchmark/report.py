"""Turn runs into tables and figures:

    python benchmark/report.py timelimit

Finished runs of the experiment are read from --folder (TensorBoard logs) into one compressed table of curves,
benchmark/results/<experiment>/curves.csv.gz. Everything else is made from that table alone, so that anyone who has it
can make every figure again: learning curves with 95 % bootstrap intervals, and the figures of rliable (Agarwal et al.,
2021) for the final return and for the area under the curve. README.md in the same folder is the page that shows them;
what notes.md says there is taken into it.
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import numpy as np
import pandas as pd
import tyro

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from rliable import library, metrics

sys.path.insert(0, str(Path(__file__).parent))
from run import Args as GridArgs
from run import fail, finished, grid, load_experiment

RESULTS = Path(__file__).parent / "results"
POINTS = 100  # of a curve
LAST = 100  # episodes that a return is the mean of, as in the paper
REPS = 2000  # of the bootstrap
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999999", "#F0E442", "#8B4513")
plt.rcParams |= {
    "font.size": 11, "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False, "figure.dpi": 130,
}  # fmt: skip


@dataclass
class Args:
    experiment: tyro.conf.Positional[str]
    """name of a file in benchmark/experiments/, or path of one of your own"""
    folder: Path = Path("benchmark/runs")
    """where benchmark/run.py put the runs"""


# ------------------------------------------------------------------------------------------------------------ data


def curve(steps, returns, total):
    """Mean return of the last 100 episodes at each of 100 steps; nan before the first episode ended."""
    sums = np.concatenate([[0.0], np.cumsum(returns)])
    grid_steps = np.arange(1, POINTS + 1) * total // POINTS
    ended = np.searchsorted(steps, grid_steps, side="right")
    first = np.maximum(ended - LAST, 0)
    with np.errstate(invalid="ignore"):
        return grid_steps, (sums[ended] - sums[first]) / (ended - first)


def read_log(run):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (folder,) = {path.parent for path in run.folder.glob("runs/*/checkpoint.pt")}
    log = EventAccumulator(str(folder), size_guidance=dict(scalars=0, histograms=0, tensors=1))
    log.Reload()
    return log


def read_run(run) -> pd.DataFrame:
    """A row per point of the curve. On ProcGen a value is of the test levels, with the training levels' beside it."""
    log = read_log(run)
    curves = {}
    for tag in ("charts/episodic_return", "test/episodic_return"):
        if tag in log.Tags()["scalars"]:
            episodes = log.Scalars(tag)
            steps, returns = np.array([e.step for e in episodes]), np.array([e.value for e in episodes])
            grid_steps, means = curve(steps, returns, run.total)
            curves[tag] = np.round(means, 3)
    *training, value = curves.values()
    columns = dict(step=grid_steps, value=value) | (dict(training=training[0]) if training else {})
    rate = log.Scalars("charts/SPS")[-1].value
    frame = pd.DataFrame(columns)
    return frame.assign(method=run.method, task=run.task, seed=run.seed, total=run.total, minutes=run.total / rate / 60)


KEYS = ["method", "task", "seed", "total"]


def update_table(path: Path, runs: list) -> pd.DataFrame:
    """The table with the runs that were finished since."""
    table = pd.read_csv(path) if path.exists() else pd.DataFrame(columns=[*KEYS, "minutes", "step", "value"])
    known = set(map(tuple, table[KEYS].drop_duplicates().itertuples(index=False)))
    new = [run for run in runs if (run.method, run.task, run.seed, run.total) not in known and finished(run)]
    frames = [table] if len(table) else []
    for run in new:
        print(f"reading {run.method}, {run.task}, seed {run.seed}", flush=True)
        frames.append(read_run(run))
    if new:
        table = pd.concat(frames)
        order = [column for column in (*KEYS, "minutes", "step", "value", "training") if column in table]
        table = table[order].round({"minutes": 1})
        table = table.sort_values([*KEYS, "step"], ignore_index=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        table.to_csv(path, index=False, compression=dict(method="gzip", mtime=0))
    return table


def save_histograms(path: Path, run):
    """The advantages of a run at six moments, as shares in bins that at most one of 200 steps is outside of."""
    log, tags = read_log(run), ("vsop/advantages", "vsop/relu_advantages")
    found = dict(run=f"{run.method}, {run.task}, seed {run.seed}, {run.total:,} steps", tags={})
    cumulated = {}
    for tag in tags:
        events = log.Histograms(tag)
        for k in np.linspace(0, len(events) - 1, 6).astype(int):
            counts = np.cumsum(events[k].histogram_value.bucket)
            cumulated[tag, events[k].step] = events[k].histogram_value.bucket_limit, counts / counts[-1]
    quantiles = [np.interp((0.0025, 0.9975), y, x) for (tag, _), (x, y) in cumulated.items() if tag == tags[0]]
    edges = np.linspace(-1, 1, 62) * np.abs(quantiles).max()  # with 0 in the middle of a bin
    found["edges"] = edges.round(5).tolist()
    for tag in tags:
        found["tags"][tag] = [
            dict(step=step, shares=np.diff(np.interp(edges, *xy)).round(6).tolist())
            for (of_tag, step), xy in cumulated.items()
            if of_tag == tag
        ]
    path.write_text(json.dumps(found) + "\n")


def scores(table: pd.DataFrame) -> pd.DataFrame:
    """A row per run: the final return, and the area under the curve as the mean of the curve."""
    rows = table.groupby(KEYS, sort=False)
    return rows.agg(final=("value", "last"), area=("value", "mean"), minutes=("minutes", "first")).reset_index()


def references(total: int) -> dict:
    """Per task: random's score, and PPO's final return and area, from this project's own runs of the same length."""
    path = RESULTS / "random.json"
    if not path.exists():
        fail(f"{path} is missing: python benchmark/random_policy.py makes it")
    random = {task: score["mean"] for task, score in json.loads(path.read_text())["scores"].items()}
    tables = [pd.read_csv(file) for file in sorted(RESULTS.glob("*/curves.csv.gz"))]
    ppo = pd.concat(tables)[lambda x: (x["method"] == "PPO") & (x["total"] == total)].drop_duplicates([*KEYS, "step"])
    return dict(random=random, ppo=scores(ppo).groupby("task")[["final", "area"]].mean())


# --------------------------------------------------------------------------------------------------------- figures


def interval(values, statistic=np.mean, seed=0):
    """95 % percentile bootstrap over runs; of a single run there is none."""
    values = np.asarray(values)
    if len(values) < 2:
        return np.nan, np.nan
    rng = np.random.default_rng(seed)
    draws = statistic(values[rng.integers(len(values), size=(REPS, len(values)))], axis=1)
    return np.quantile(draws, 0.025, axis=0), np.quantile(draws, 0.975, axis=0)


def plot_curves(table, methods, tasks, path):
    columns = min(5, len(tasks))
    rows = -(-len(tasks) // columns)
    figure, axes = plt.subplots(rows, columns, figsize=(3.4 * columns, 2.9 * rows), squeeze=False, layout="constrained")
    for axis in axes.flat[len(tasks) :]:
        axis.set_visible(False)
    for axis, task in zip(axes.flat, tasks):
        for method, color in zip(methods, COLORS):
            part = of(table, method, task)
            if not len(part):
                continue
            lines = part.pivot(index="step", columns="seed", values="value")
            steps = lines.index / 1e6
            if "training" in part:
                training = part.groupby("step")["training"].mean()
                axis.plot(steps, training, color=color, linestyle=":", label=f"{method}, training levels")
            label = f"{method}, test levels" if "training" in part else method
            axis.plot(steps, lines.mean(axis=1), color=color, label=label)
            if lines.shape[1] > 1:
                low, high = interval(lines.to_numpy().T, np.nanmean)
                axis.fill_between(steps, low, high, color=color, alpha=0.2, linewidth=0)
        axis.set_title(task)
        axis.set_xlabel("million steps")
    axes[0, 0].set_ylabel("return, last 100 episodes")
    handles = {}
    for axis in axes.flat:
        for handle, label in zip(*axis.get_legend_handles_labels()):
            handles.setdefault(label, handle)
    figure.set_figheight(2.9 * rows + 0.25 * -(-len(handles) // columns))
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=min(columns, len(handles)))
    figure.savefig(path)
    plt.close(figure)


def plot_histograms(path_in, path):
    """The paper's figure of what the ReLU leaves of the advantages."""
    data = json.loads(path_in.read_text())
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), sharey=True, layout="constrained")
    for axis, (tag, rows) in zip(axes, data["tags"].items()):
        for row, color in zip(rows, plt.cm.viridis(np.linspace(0, 0.9, len(rows)))):
            label = f"{row['step'] / 1e6:.2f} M steps"
            axis.stairs(row["shares"], data["edges"], color=color, label=label, linewidth=1.5)
        axis.set_yscale("log")
        axis.set_xlabel({"vsop/advantages": "h", "vsop/relu_advantages": "h+ = max(0, h)"}[tag])
    axes[0].set_ylabel("share of steps")
    axes[1].legend()
    figure.suptitle(f"Advantages of {data['run']}")
    figure.savefig(path)
    plt.close(figure)


def of(rows, method, task):
    return rows[(rows["method"] == method) & (rows["task"] == task)]


def matrices(rows, column, methods, tasks):
    """(seeds, tasks) per method, of the methods that have every task; as many seeds as every task has."""
    found = {}
    for method in methods:
        by_task = [of(rows, method, task).sort_values("seed")[column].to_numpy() for task in tasks]
        seeds = min(map(len, by_task), default=0)
        if seeds:
            found[method] = np.array([values[:seeds] for values in by_task]).T
    return found


METRICS = {
    "Median": metrics.aggregate_median,
    "IQM": metrics.aggregate_iqm,
    "Mean": metrics.aggregate_mean,
    "Optimality gap": metrics.aggregate_optimality_gap,
}


def aggregate(normalized):
    function = lambda x: np.array([metric(x) for metric in METRICS.values()])  # noqa: E731
    return library.get_interval_estimates(normalized, function, reps=REPS)


def plot_aggregates(points, intervals, color_of, path, title):
    figure, axes = plt.subplots(1, 4, figsize=(13, 0.5 * len(points) + 1.4), sharey=True, layout="constrained")
    names = list(points)[::-1]
    for k, (axis, metric) in enumerate(zip(axes, METRICS)):
        for y, name in enumerate(names):
            low, high = intervals[name][:, k]
            axis.barh(y, high - low, left=low, height=0.6, color=color_of[name], alpha=0.7)
            axis.plot([points[name][k]] * 2, [y - 0.3, y + 0.3], color="black")
        axis.use_sticky_edges = False  # a bar that starts at the axis looks cut off
        axis.set_title(metric)
        axis.set_yticks(range(len(names)), names)
    figure.suptitle(title)
    figure.savefig(path)
    plt.close(figure)


def profile(x, thresholds):
    """The share of runs above each threshold. This and the next function are rliable's without its loops in Python,
    which took 100 of the 120 seconds of a page."""
    return (x[..., None] > thresholds).mean((0, 1))


def probability_of_improvement(x, y):
    return (np.sign(x[:, None] - y[None]).mean() + 1) / 2


def plot_profiles(normalized, color_of, path, title):
    everything = np.concatenate([x.ravel() for x in normalized.values()])
    thresholds = np.linspace(min(0.0, np.quantile(everything, 0.02)), max(1.2, np.quantile(everything, 0.98)), 81)
    curves, bands = library.create_performance_profile(normalized, thresholds, custom_profile_func=profile, reps=REPS)
    figure, axis = plt.subplots(figsize=(6, 4), layout="constrained")
    for name in normalized:
        axis.plot(thresholds, curves[name], color=color_of[name], label=name)
        axis.fill_between(thresholds, *bands[name], color=color_of[name], alpha=0.2, linewidth=0)
    axis.set_xlabel("normalized score")
    axis.set_ylabel("share of runs above it")
    axis.set_title(title)
    axis.legend()
    figure.savefig(path)
    plt.close(figure)


def improvements(normalized):
    """P(X > Y) of the first method over each other one."""
    first, *others = normalized
    pairs = {f"{first} over {other}": (normalized[first], normalized[other]) for other in others}
    if not pairs:
        return {}, {}
    return library.get_interval_estimates(pairs, probability_of_improvement, reps=REPS)


def plot_improvements(points, intervals, path, title):
    figure, axis = plt.subplots(figsize=(6, 0.5 * len(points) + 1.4), layout="constrained")
    for y, name in enumerate(points):
        low, high = np.ravel(intervals[name])
        axis.barh(y, high - low, left=low, height=0.6, color=COLORS[0], alpha=0.7)
        axis.plot([points[name]] * 2, [y - 0.3, y + 0.3], color="black")
    axis.axvline(0.5, color="gray", linestyle=":")
    axis.set_xlim(0, 1)
    axis.set_yticks(range(len(points)), list(points))
    axis.set_title(title)
    figure.savefig(path)
    plt.close(figure)


# ------------------------------------------------------------------------------------------------------------ page


def number(x):
    return f"{x:,.0f}" if abs(x) >= 100 else f"{x:.1f}" if abs(x) >= 10 else f"{x:.2f}"


def published(total: int) -> dict:
    """(mean, low, high) by method and task. Where the authors give every seed there is a 95 % interval, and what they
    only show in a plot is read from it."""
    data = json.loads((RESULTS / "published.json").read_text())
    plots, found = data["read_from_plots_approximate"], {}
    if total == 1_000_000:
        for method in ("VSOP", "PPO"):
            for task, mean in plots[f"{method}_at_1_million"].items():
                found[f"{method} at 1,000,000", task] = (mean, np.nan, np.nan)
    for task, by_method in data["mean_over_ten_seeds"].items():
        for method, mean in by_method.items():
            found[method, task] = (mean, np.nan, np.nan)
        found["RMPG", task] = found["all-actions", task]  # two names of one method
    for task, mean in plots["PPO"].items():
        found["PPO", task] = (mean, np.nan, np.nan)
    for game, by_method in data["procgen_25_million"]["test_return"].items():
        for method, mean in by_method.items():
            found[method, game] = (mean, np.nan, np.nan)
    for method, by_task in data["per_seed"].items():
        for task, values in by_task.items():
            found[method, task] = (np.mean(values), *interval(values))
    return {(method, task.replace("Pusher-v4", "Pusher-v5")): values for (method, task), values in found.items()}


def with_interval(mean, low, high):
    return number(mean) if np.isnan(low) else f"{number(mean)} [{number(low)}, {number(high)}]"


def markdown(head, lines):
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, ["---"] * len(head), *lines))


def task_table(rows, methods, tasks, total):
    theirs = published(total)
    ours = {method.removesuffix(" as published") for method in methods}
    columns = sorted({method for method, task in theirs if method.split(" at ")[0] in ours and task in tasks})
    lines = []
    for task in tasks:
        cells = [task]
        for method in methods:
            values = of(rows, method, task)["final"].to_numpy()
            cells.append(with_interval(values.mean(), *interval(values)) if len(values) else "not run")
        for method in columns:
            cells.append(with_interval(*theirs[method, task]) if (method, task) in theirs else "")
        lines.append(cells)
    return markdown(["task", *methods, *(f"published {method}" for method in columns)], lines)


def aggregate_table(points, intervals):
    lines = []
    for name, values in points.items():
        lines.append([name, *(f"{x:.2f} [{low:.2f}, {high:.2f}]" for x, low, high in zip(values, *intervals[name]))])
    return markdown(["", *METRICS], lines)


NORMALIZATION = """Scores are normalized per task from a uniformly random policy (0) to this project's PPO of the same
length (1). The paper divides by PPO's return instead, which turns the order around where returns are negative: on
Reacher a return of -15 is 2.7 times PPO's -5.5, and counts as better. That normalization is shown beside it, for
comparison with the paper's figures only."""


def summarize(rows, column, title, methods, tasks, reference, folder):
    """Aggregates over tasks by both normalizations, with figures for the first."""
    np.random.seed(0)  # rliable draws from numpy's global generator
    raw = matrices(rows, column, methods, tasks)
    zero = np.array([reference["random"][task] for task in tasks])
    one = reference["ppo"].loc[tasks, column].to_numpy()
    color_of = dict(zip(methods, COLORS))
    normalized = {method: (x - zero) / (one - zero) for method, x in raw.items()}
    points, intervals = aggregate(normalized)
    plot_aggregates(points, intervals, color_of, folder / f"{column}_aggregates.png", f"{title}, random = 0, PPO = 1")
    plot_profiles(normalized, color_of, folder / f"{column}_profiles.png", title)
    page = [f"## {title.capitalize()} over all tasks", aggregate_table(points, intervals)]
    page += [f"![aggregates]({column}_aggregates.png)", f"![performance profiles]({column}_profiles.png)"]
    chances, intervals = improvements(normalized)
    if chances:
        plot_improvements(chances, intervals, folder / f"{column}_improvement.png", f"P(improvement), {title}")
        page.append(f"![probability of improvement]({column}_improvement.png)")
    divided = {method: x / one for method, x in raw.items()}
    return [*page, f"The paper's normalization, {title} divided by PPO's:", aggregate_table(*aggregate(divided))]


def missing(rows, experiment):
    """What of the experiment was not run."""
    lines = []
    for method in experiment.methods:
        tasks = {}  # by number of seeds
        for task in experiment.tasks:
            tasks.setdefault(len(of(rows, method, task)), []).append(task)
        if list(tasks) == [0]:
            lines.append(f"- {method}: not run")
        elif len(tasks) > 1:
            parts = (f"{count} seed{'s' * (count != 1)} of {', '.join(tasks[count])}" for count in sorted(tasks))
            lines.append(f"- {method}: {'; '.join(parts)}")
    return ["## What is missing", "\n".join(lines)] if lines else []


def section(table, total, experiment, folder):
    """The part of the page for runs of one length."""
    rows = scores(table)
    methods = [method for method in experiment.methods if (rows["method"] == method).any()]
    tasks = [task for task in experiment.tasks if (rows["task"] == task).any()]
    seeds = rows.groupby(["method", "task"]).size()
    many = f"{seeds.min()} to {seeds.max()} seeds" if seeds.min() < seeds.max() else f"seeds per task: {seeds.max()}"
    text = f"""{len(rows)} run{"s" * (len(rows) > 1)}, {rows["minutes"].sum() / 60:.1f} hours of wall time together. A
return is the mean of the last 100 episodes{" on test levels" if "training" in table else ""}; intervals are 95 %
percentile bootstrap over seeds. Published values are the authors' after """
    if "training" in table:
        text += "25,000,000 steps with five seeds, read from their plots."
    else:
        text += """3,000,000 steps with ten seeds, PPO's and those at 1,000,000 steps read from their plots."""
    if total != 3_000_000 and "training" not in table:
        text += f""" The runs here anneal their learning rate over {total:,} steps, the published ones over
3,000,000, also where their curve at 1,000,000 is quoted: the two are not the same thing."""
    plot_curves(table, methods, tasks, folder / f"curves_{total}.png")
    page = [f"## {total:,} steps, {many}", text, task_table(rows, methods, tasks, total)]
    page.append(f"![learning curves](curves_{total}.png)")
    reference = references(total)
    of_ppo = [task for task in tasks if task in reference["ppo"].index]
    complete = list(matrices(rows, "final", methods, of_ppo))
    if len(of_ppo) > 1 and complete:
        page.append(NORMALIZATION)
        if len(of_ppo) < len(experiment.tasks):
            page.append(f"What follows is over the tasks that PPO has: {', '.join(of_ppo)}.")
        if len(complete) < len(methods):
            page.append(f"What follows is of the methods that have all these tasks: {', '.join(complete)}.")
        for column, title in (("final", "final return"), ("area", "area under the curve")):
            page += summarize(rows, column, title, methods, of_ppo, reference, folder)
    return page + missing(rows, experiment)


def main(args: Args):
    experiment = load_experiment(args.experiment)
    folder = RESULTS / experiment.name
    lengths = {}  # of the runs that are there, with the highest seed of each
    for path in args.folder.glob("*__*__*__*"):
        *_, seed, total = path.name.split("__")
        lengths[int(total)] = max(lengths.get(int(total), 1), int(seed))
    runs = []
    for total, seeds in sorted(lengths.items()):
        settings = GridArgs(args.experiment, seeds=seeds, total_timesteps=total, folder=args.folder)
        runs += [run for run in grid(settings) if run.folder.is_dir()]
    table = update_table(folder / "curves.csv.gz", runs)
    if not len(table):
        fail(f"there are no finished runs of {experiment.name} in {args.folder}, and no table in {folder}")
    shown = [
        run for run in runs if run.seed == 1 and run.task == "Humanoid-v4" and "VSOP" in run.method and finished(run)
    ]
    if shown:
        save_histograms(folder / "histograms.json", shown[0])
    page = [f"# {experiment.name}", f"Made by `python benchmark/report.py {args.experiment}` from `curves.csv.gz`."]
    for total in table["total"].value_counts().index:  # where most runs are, first
        page += section(table[table["total"] == total], int(total), experiment, folder)
    if (folder / "histograms.json").exists():
        plot_histograms(folder / "histograms.json", folder / "histograms.png")
        page += ["## Advantages, before and after the ReLU", "![histograms of advantages](histograms.png)"]
    if (folder / "notes.md").exists():
        page.append((folder / "notes.md").read_text().strip())
    (folder / "README.md").write_text("\n\n".join(page) + "\n")
    print(f"wrote {folder / 'README.md'}")


if __name__ == "__main__":
    main(tyro.cli(Args))
