"""Turn runs into tables and figures.

    python benchmark/report.py timelimit                # your runs: the report is in benchmark/runs/report/timelimit/
    python benchmark/report.py timelimit --committed    # update benchmark/results/timelimit/, the repository's results

Reads the TensorBoard logs of the experiment's finished runs in --folder into one compressed table, curves.csv.gz.
Everything else is made from that table alone: learning curves with 95 % bootstrap intervals, and the figures of rliable
(Agarwal et al., 2021) for the final return and for the area under the curve. README.md in the same folder shows them,
and includes notes.md from there.
"""

import json
import os
from pathlib import Path

from common import LAST, RESULTS, Parser, fail, markdown, number, read_log, read_returns, references
from run import FOLDER, Run, folder_name, load_experiment

os.environ["MPLBACKEND"] = "Agg"
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from rliable import library, metrics
from scipy import stats

POINTS = 100  # of a curve
REPS = 2000  # of the bootstrap
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999999", "#F0E442", "#8B4513")
plt.rcParams |= {
    "font.size": 11, "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False, "figure.dpi": 130,
}  # fmt: skip


def parse():
    parser = Parser(__doc__)
    add = parser.add_argument
    add("experiment", help="name of a file in benchmark/experiments/, or the path of your own")
    add("--folder", type=Path, default=FOLDER, help=f"folder of the runs (default: {FOLDER})")
    add("--committed", action="store_true", help="write to benchmark/results/ (default: report/ in the folder)")
    return parser.parse_args()


# ------------------------------------------------------------------------------------------------------------ data


def curve(steps, returns, total, last=LAST):
    """Mean of the last returns at 100 equidistant steps; nan before the first episode ends."""
    sums = np.concatenate([[0.0], np.cumsum(returns)])
    points = min(POINTS, total)
    grid_steps = np.arange(1, points + 1) * total // points
    ended = np.searchsorted(steps, grid_steps, side="right")
    first = np.maximum(ended - last, 0)
    with np.errstate(invalid="ignore"):
        return grid_steps, (sums[ended] - sums[first]) / (ended - first)


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


def read_run(run, seed, in_parts) -> pd.DataFrame:
    """A row per point of the curve. On ProcGen `value` is of the test levels and `training` of the training levels. A
    JAX script has a log for each seed (`in_parts`), with the mean of the last episode of each environment."""
    log = read_log(run.folder, f"seed_{seed}" if in_parts else "")
    last = 1 if in_parts else LAST
    curves = [curve(*map(np.array, found), run.total, last) for found in read_returns(log).values()]
    if not curves:
        fail(f"{run.folder}: no episode ended")
    *training, (steps, value) = curves
    columns = dict(step=steps, value=np.round(value, 3))
    if training:
        columns["training"] = np.round(training[0][1], 3)
    rate = log.Scalars("charts/SPS")[-1].value  # of all seeds of the run together
    frame = pd.DataFrame(columns)
    return frame.assign(method=run.method, task=run.task, seed=seed, total=run.total, minutes=run.total / rate / 60)


KEYS = ["method", "task", "seed", "total"]


def update_table(path: Path, runs: list, in_parts: bool) -> pd.DataFrame:
    """Adds the runs that finished since the table was written."""
    table = pd.read_csv(path) if path.exists() else pd.DataFrame(columns=[*KEYS, "minutes", "step", "value"])
    known = set(map(tuple, table[KEYS].drop_duplicates().itertuples(index=False)))
    frames = [table] if len(table) else []
    for run in runs:
        for seed in range(run.seed, run.seed + run.num_seeds):
            if (key := (run.method, run.task, seed, run.total)) not in known:
                print(f"reading {run.method}, {run.task}, seed {seed}", flush=True)
                frames.append(read_run(run, seed, in_parts))
                known.add(key)
    if len(frames) > bool(len(table)):
        table = pd.concat(frames)
        order = [column for column in (*KEYS, "minutes", "step", "value", "training") if column in table]
        table = table[order].round({"minutes": 3})
        table = table.sort_values([*KEYS, "step"], ignore_index=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        table.to_csv(path, index=False, compression=dict(method="gzip", mtime=0))
    return table


def save_histograms(path: Path, run):
    """The advantages of a run at six points in time, as shares in bins that cover 99.5 % of the steps."""
    log, tags = read_log(run.folder), ("vsop/advantages", "vsop/relu_advantages")
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


# --------------------------------------------------------------------------------------------------------- figures


def interval(values, seed=0):
    """95 % percentile bootstrap over runs; nan for a single run."""
    values = np.asarray(values)
    if len(values) < 2:
        return np.nan, np.nan
    rng = np.random.default_rng(seed)
    samples = values[rng.integers(len(values), size=(REPS, len(values)))].mean(axis=1)
    return np.quantile(samples, 0.025, axis=0), np.quantile(samples, 0.975, axis=0)


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
            lines = part.pivot(index="step", columns="seed", values="value").dropna()  # from the first episode of all
            steps = lines.index / 1e6
            if "training" in part:
                training = part.groupby("step")["training"].mean()[lines.index]
                axis.plot(steps, training, color=color, linestyle=":", label=f"{method}, training levels")
            label = f"{method}, test levels" if "training" in part else method
            axis.plot(steps, lines.mean(axis=1), color=color, label=label)
            if lines.shape[1] > 1:
                low, high = interval(lines.to_numpy().T)
                axis.fill_between(steps, low, high, color=color, alpha=0.2, linewidth=0)
        axis.set_title(task)
        axis.set_xlabel("million steps")
    axes[0, 0].set_ylabel("return")
    handles = {}
    for axis in axes.flat:
        for handle, label in zip(*axis.get_legend_handles_labels()):
            handles.setdefault(label, handle)
    figure.set_figheight(2.9 * rows + 0.25 * -(-len(handles) // columns))
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=min(columns, len(handles)))
    figure.savefig(path)
    plt.close(figure)


def plot_histograms(path_in, path):
    """The paper's figure of the advantages before and after the ReLU."""
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
    """An array (seeds, tasks) for each method that has all tasks, with the seeds that all tasks have."""
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
        axis.use_sticky_edges = False  # leaves a margin at the axis
        axis.set_title(metric)
        axis.set_yticks(range(len(names)), names)
    figure.suptitle(title)
    figure.savefig(path)
    plt.close(figure)


def profile(x, thresholds):
    """The share of runs above each threshold. This and the next function are rliable's without its Python loops,
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
    """P(X > Y) of the first method against each other method."""
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


def published(total: int) -> dict:
    """(mean, low, high) by method and task. The 95 % interval is known where the authors publish every seed. Values
    that they only plot are read from the plots."""
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
    for method, by_task in data["gymnax"]["mean_over_twenty_seeds"].items():
        for task, mean in by_task.items():
            found[method, task] = (mean, np.nan, np.nan)
    for method, by_task in data["per_seed"].items():
        for task, values in by_task.items():
            found[method, task] = (np.mean(values), *interval(values))
    return {(method, task.replace("Pusher-v4", "Pusher-v5")): values for (method, task), values in found.items()}


def with_interval(mean, low, high):
    return number(mean) if np.isnan(low) else f"{number(mean)} [{number(low)}, {number(high)}]"


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


NORMALIZATION = """Scores are normalized per task: 0 is a random policy, 1 is this repository's PPO at the same
number of steps. The paper divides by PPO's return instead, which reverses the order where returns are negative: on
Reacher a return of -15 is 2.7 times PPO's -5.5 and counts as better. That normalization is shown only for comparison
with the paper's figures."""


def summarize(rows, column, title, methods, tasks, reference, folder):
    """Aggregates over tasks with both normalizations, and figures for the first."""
    np.random.seed(0)  # rliable uses numpy's global generator
    raw = matrices(rows, column, methods, tasks)
    zero, one = (reference.loc[tasks, name].to_numpy() for name in ("random", column))
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
    """The runs of the experiment that are not there."""
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
    return ["## Missing runs", "\n".join(lines)] if lines else []


def section(table, total, experiment, folder):
    """The part of the page about runs of one length."""
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
3,000,000, also where their curve at 1,000,000 is quoted: not directly comparable."""
    plot_curves(table, methods, tasks, folder / f"curves_{total}.png")
    page = [f"## {total:,} steps, {many}", text, task_table(rows, methods, tasks, total)]
    page.append(f"![learning curves](curves_{total}.png)")
    reference = references(total)
    of_ppo = [task for task in tasks if task in reference.index]
    complete = list(matrices(rows, "final", methods, of_ppo))
    if len(of_ppo) > 1 and complete:
        page.append(NORMALIZATION)
        if (longer := reference.loc[of_ppo, "length"].max()) > total:
            page.append(f"PPO's returns are those at {total:,} steps of runs of up to {longer:,} steps.")
        if len(of_ppo) < len(experiment.tasks):
            page.append(f"The following is over the tasks with a PPO run: {', '.join(of_ppo)}.")
        if len(complete) < len(methods):
            page.append(f"The following is for the methods with all these tasks: {', '.join(complete)}.")
        for column, title in (("final", "final return"), ("area", "area under the curve")):
            page += summarize(rows, column, title, methods, of_ppo, reference, folder)
    return page + missing(rows, experiment)


def shared_seeds(table):
    """Of each task the seeds that all its methods have."""
    methods = table.groupby(["task", "seed"])["method"].transform("nunique")
    return table[methods == table.groupby("task")["method"].transform("nunique")]


def error_table(rows, methods, tasks):
    """Means with standard errors, each task with the published means below."""
    theirs, lines = published(0), []
    for task in tasks:
        ours, below = [task, str(len(of(rows, methods[0], task)))], ["published", "20"]
        for method in methods:
            values, (mean, *_) = of(rows, method, task)["final"], theirs.get((method, task), [None])
            # The published means have two digits. Their standard errors are not known.
            mark = " *" if mean is not None and abs(values.mean() - mean) > 2 * values.sem() + 0.005 else ""
            ours.append(f"{number(values.mean())} ({number(values.sem())}){mark}")
            below.append("" if mean is None else number(mean))
        lines += [ours, below] if any(below[2:]) else [ours]
    return markdown(["task", "seeds", *methods], lines)


def ranks(rows, methods, task) -> list:
    """A rank is 1 plus the number of methods that are better by a paired t-test over seeds at p = 0.1."""
    finals = rows[rows["task"] == task].pivot(index="seed", columns="method", values="final")

    def better(x, y):
        return finals[x].mean() > finals[y].mean() and stats.ttest_rel(finals[x], finals[y]).pvalue < 0.1

    return [1 + sum(better(other, method) for other in methods) for method in methods]


def gymnax_section(table, total, experiment, folder):
    """The part of the page about runs of one length of the JAX scripts."""
    everything, table = scores(table), shared_seeds(table)
    rows = scores(table)
    methods = [method for method in experiment.methods if (rows["method"] == method).any()]
    tasks = [task for task in experiment.tasks if all(len(of(rows, method, task)) > 1 for method in methods)]
    if not tasks:
        return [f"## {total:,} steps", "No task has two seeds of each method.", *missing(everything, experiment)]
    plot_curves(table, methods, tasks, folder / f"curves_{total}.png")
    text = f"""Mean final return over seeds, with its standard error. The return of a seed is the mean of the last
episode of each environment; the bands of the figure are 95 % percentile bootstrap over seeds. Training took
{rows["minutes"].sum() / 60:.2f} hours of one core."""
    if any((method, task) in published(total) for method in methods for task in tasks):
        text += """ Published values are the authors' means. Where ours differs by more than two standard errors it has
a *; the standard errors of theirs are not known."""
    page = [f"![learning curves](curves_{total}.png)", f"## {total:,} steps", text, error_table(rows, methods, tasks)]
    by_task = np.array([ranks(rows, methods, task) for task in tasks])
    lines = [[name, *map(str, column), f"{column.mean():.2f}"] for name, column in zip(methods, by_task.T)]
    head = ["method", *tasks, "mean"]
    theirs = json.loads((RESULTS / "published.json").read_text())["gymnax"]
    if experiment.name in theirs["steps"]:
        head.append(f"published mean, {theirs['steps'][experiment.name]:,} steps")
        for line in lines:
            line.append(f"{theirs['mean_rank'][experiment.name][line[0]]:.2f}")
    return [*page, "## Ranks", RANKS, markdown(head, lines), *missing(everything, experiment)]


RANKS = """As in the paper, a rank is 1 plus the number of methods that are better by a paired t-test over seeds at
p = 0.1. Methods that do not differ share a rank."""


def main(args):
    experiment = load_experiment(args.experiment)
    folder = (RESULTS if args.committed else args.folder / "report") / experiment.name
    runs = find_runs(experiment, args.folder)
    table = update_table(folder / "curves.csv.gz", runs, in_parts=bool(experiment.seeds_per_run))
    if not len(table):
        fail(f"there are no finished runs of {experiment.name} in {args.folder}, and no table in {folder}")
    for run in runs:
        if run.seed == 1 and run.task == "Humanoid-v4" and "VSOP" in run.method:
            save_histograms(folder / "histograms.json", run)
            break
    command = f"python benchmark/report.py {args.experiment}{' --committed' * args.committed}"
    page = [f"# {experiment.name}", f"Made with `{command}` from `curves.csv.gz`."]
    for total in table["total"].value_counts().index:  # the length of most runs first
        part = gymnax_section if experiment.seeds_per_run else section
        page += part(table[table["total"] == total], int(total), experiment, folder)
    if (folder / "histograms.json").exists():
        plot_histograms(folder / "histograms.json", folder / "histograms.png")
        page += ["## Advantages before and after the ReLU", "![histograms of advantages](histograms.png)"]
    if (folder / "notes.md").exists():
        page.append((folder / "notes.md").read_text().strip())
    (folder / "README.md").write_text("\n\n".join(page) + "\n")
    print(f"wrote {folder / 'README.md'}")


if __name__ == "__main__":
    main(parse())
