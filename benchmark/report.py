"""Turn runs into tables and figures.

    python benchmark/report.py timelimit                # your runs: the report is in benchmark/runs/report/timelimit/
    python benchmark/report.py timelimit --committed    # update benchmark/results/timelimit/, the repository's results

Reads the TensorBoard logs of the experiment's finished runs in --folder into one compressed table, curves.csv.gz.
Everything else is made from that table alone: learning curves, a table for each claim with the published values, the
figures of rliable (Agarwal et al., 2021) for the final return and for the area under the curve, and for the JAX scripts
the paper's ranks. README.md in the same folder shows them. Of notes.md from there, what comes before the first heading
follows the first figure, and the rest the tables.
"""

import json
import os
from pathlib import Path

from common import LAST, RESULTS, TASKS, Parser, fail, markdown, number, published, read_log, read_returns, references
from run import FOLDER, find_runs, load_experiment

os.environ["MPLBACKEND"] = "Agg"
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from rliable import library, metrics
from scipy import stats

POINTS = 100  # of a curve
REPS = 2000  # of the bootstrap
SEEDS = 3  # that an interval on a page needs; of fewer, the runs are shown
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999999", "#F0E442", "#8B4513")
TITLES = dict(
    baselines="Comparison to baselines", mechanisms="Effect of each mechanism", parallel="Effect of parallelization",
    vsppo="Spectral norm and Thompson sampling in PPO", timelimit="Truncation treated as termination",
    tuned="VSOP tuned for few actions", candidates="Settings of the search after 1,000,000 steps",
    procgen="ProcGen", classic="Gymnax: Classic Control", minatar="Gymnax: MinAtar",
)  # fmt: skip
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


def other_pages(experiment) -> list:
    """Tables of the committed runs of other experiments that belong to this one: same task, same command line."""
    tables = []
    for path in sorted(RESULTS.glob("*/curves.csv.gz")):
        if path.parent.name != experiment.name:
            theirs, table = load_experiment(path.parent.name).methods, pd.read_csv(path)
            for method, line in experiment.methods.items():
                names = [name for name in theirs if theirs[name] == line]
                rows = table[table["method"].isin(names) & table["task"].isin(experiment.tasks)]
                tables.append(rows.assign(method=method))
    return tables


def update_table(path: Path, runs: list, in_parts: bool, others=()) -> pd.DataFrame:
    """Adds the runs that finished since the table was written, and those of other tables that are as long."""
    table = pd.read_csv(path) if path.exists() else pd.DataFrame(columns=[*KEYS, "minutes", "step", "value"])
    known = set(map(tuple, table[KEYS].drop_duplicates().itertuples(index=False)))
    frames, lengths = [table] if len(table) else [], {*table["total"], *(run.total for run in runs)}
    for other in others:
        for key, rows in other.groupby(KEYS):
            if key not in known and key[-1] in lengths:
                frames.append(rows)
                known.add(key)
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


def save(figure, path):
    figure.savefig(path)
    plt.close(figure)


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
            if lines.shape[1] < SEEDS:
                axis.plot(steps, lines, color=color, label=label, linewidth=1.0)
            else:
                axis.plot(steps, lines.mean(axis=1), color=color, label=label)
                axis.fill_between(steps, *interval(lines.to_numpy().T), color=color, alpha=0.2, linewidth=0)
        axis.set_title(task)
        axis.set_xlabel("million steps")
    axes[0, 0].set_ylabel("return")
    handles = {}
    for axis in axes.flat:
        for handle, label in zip(*axis.get_legend_handles_labels()):
            handles.setdefault(label, handle)
    figure.set_figheight(2.9 * rows + 0.25 * -(-len(handles) // columns))
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=min(columns, len(handles)))
    save(figure, path)


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
    save(figure, path)


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


def draw(axis, y, point, band, runs, color):
    """A bar for the interval, or a dot for each run if there are too few for one."""
    if len(runs) < SEEDS:
        axis.plot(runs, [y] * len(runs), "o", color=color)
    else:
        axis.barh(y, band[1] - band[0], left=band[0], height=0.6, color=color, alpha=0.7)
    axis.plot([point] * 2, [y - 0.3, y + 0.3], color="black")


def plot_aggregates(normalized, points, intervals, color_of, path, title):
    figure, axes = plt.subplots(1, 4, figsize=(13, 0.5 * len(points) + 1.4), sharey=True, layout="constrained")
    names = list(points)[::-1]
    for k, (axis, metric) in enumerate(zip(axes, METRICS)):
        for y, name in enumerate(names):
            runs = [METRICS[metric](x[None]) for x in normalized[name]]
            draw(axis, y, points[name][k], intervals[name][:, k], runs, color_of[name])
        axis.use_sticky_edges = False  # leaves a margin at the axis
        axis.set_title(metric)
        axis.set_yticks(range(len(names)), names)
    figure.suptitle(title)
    save(figure, path)


def probability_of_improvement(x, y):
    """rliable's without its Python loops, which took most of the time of a page."""
    return (np.sign(x[:, None] - y[None]).mean() + 1) / 2


def plot_improvements(normalized, path, title):
    """P(X > Y) of the first method against each other method."""
    first, *others = normalized
    pairs = {f"{first} over {other}": (normalized[first], normalized[other]) for other in others}
    points, intervals = library.get_interval_estimates(pairs, probability_of_improvement, reps=REPS)
    figure, axis = plt.subplots(figsize=(6, 0.5 * len(points) + 1.4), layout="constrained")
    for y, (name, both) in enumerate(pairs.items()):
        seeds = min(map(len, both))
        draw(axis, y, points[name], np.ravel(intervals[name]), [points[name]] * seeds, COLORS[0])
    axis.axvline(0.5, color="gray", linestyle=":")
    axis.set_xlim(0, 1)
    axis.set_yticks(range(len(points)), list(points))
    axis.set_title(title)
    save(figure, path)


# ------------------------------------------------------------------------------------------------------------ page


def with_interval(mean, low, high):
    return number(mean) if np.isnan(low) else f"{number(mean)} [{number(low)}, {number(high)}]"


def cell(values):
    """Of a few runs, or of a published mean, the numbers themselves."""
    if len(values) < SEEDS:
        return " and ".join(map(number, values)) or "not run"
    return with_interval(np.mean(values), *interval(values))


def opponents(experiment, methods) -> list:
    """Each method after the one that it is compared with: the first, or the one that it is a variant of."""
    first = next(iter(experiment.methods))
    of_variant = ((x.removesuffix(" as published"), x) for x in methods if x != first)
    return [(base if base != x else first, x) for base, x in of_variant]


def count_table(rows, pairs, tasks) -> list:
    """On how many tasks the second of a pair is worse or better than the first."""
    lines = []
    for one, other in pairs:
        both = [(of(rows, one, task)["final"], of(rows, other, task)["final"]) for task in tasks]
        both = [(a, b) for a, b in both if len(a) and len(b)]
        if len(both) > 1:
            found = ((b.mean() < a.mean(), b.max() < a.min(), b.min() > a.max()) for a, b in both)
            counts = [sum(column) for column in zip(*found)]
            p = stats.binomtest(counts[0], len(both)).pvalue
            lines.append([f"{other} against {one}", str(len(both)), *map(str, counts), f"{p:.2g}"])
    head = ["", "tasks", "mean return lower", "all seeds lower", "all seeds higher", "sign test of the means"]
    return ["### Tasks on which a method is worse or better", markdown(head, lines)] if lines else []


def claim_tables(rows, experiment, methods, total):
    """A table for each method against the first, or against the one that it is a variant of; and one for those without
    runs. One table for all if there is nothing to compare. Published values are at the same number of steps if the
    authors plot them, otherwise at their last."""
    theirs, tasks, first = published(), experiment.tasks, next(iter(experiment.methods))
    variant_of = {method: method.removesuffix(" as published") for method in experiment.methods}

    def known(name, values):
        return any((name, task) in values for task in tasks)

    if not any(known(name, theirs) for name in variant_of.values()):
        tasks = [task for task in tasks if (rows["task"] == task).any()]
        lines = [[method, *(cell(of(rows, method, task)["final"]) for task in tasks)] for method in methods]
        return [markdown(["method", *tasks], lines)]
    pairs = opponents(experiment, methods)
    absent = (x for x in experiment.methods if x not in methods and known(x, theirs))
    end, page = 25_000_000 if tasks == TASKS["procgen"] else 3_000_000, []
    groups = [*pairs, (first, *absent)] if first in methods and pairs else [tuple(methods)]
    for group in groups:
        ours = [name for name in group if name in methods]
        if group == (first,) and pairs:
            continue
        names = list(dict.fromkeys(variant_of[name] for name in group))
        now, lines = all(known(name, published(total)) for name in names), []
        names, values = [name for name in names if known(name, theirs)], published(total) if now else theirs
        for task in tasks:
            if any(len(of(rows, name, task)) for name in ours):
                cells = [cell(of(rows, name, task)["final"]) for name in ours]
                lines.append(
                    [task, *cells, *(cell(values[name, task]) if (name, task) in values else "" for name in names)]
                )
        head = ["task", *ours, *(f"{name}, published at {total if now else end:,}" for name in names)]
        title = " against ".join(group) if len(group) < 3 else f"{first} against methods without runs"
        page += [f"### {title}", markdown(head, lines)]
    return page


def aggregate_table(normalized, points, intervals):
    lines = []
    for name, values in points.items():
        text = "{:.2f}" if len(normalized[name]) < SEEDS else "{:.2f} [{:.2f}, {:.2f}]"
        lines.append([name, *(text.format(*numbers) for numbers in zip(values, *intervals[name]))])
    return markdown(["", *METRICS], lines)


def authors_table(experiment):
    """The authors' returns, normalized per task: 0 is a random policy, 1 is their PPO."""
    random = json.loads((RESULTS / "random.json").read_text())["scores"]
    tasks, lines = experiment.tasks, []
    for steps in (None, 1_000_000):
        theirs = published(steps)
        for method in experiment.methods:
            if all((method, task) in theirs and task in random for task in tasks):
                zero = np.array([random[task]["mean"] for task in tasks])
                x, one = ([np.mean(theirs[y, task]) for task in tasks] for y in (method, "PPO"))
                x = (x - zero) / (one - zero)
                values = (f"{metric(x[None]):.2f}" for metric in METRICS.values())
                name = f"{method} at {steps:,}" if steps else method
                lines.append([name, *values, f"{(x > 1).sum()} of {len(x)}"])
    return markdown(["", *METRICS, "tasks ahead of PPO"], lines) if lines else ""


NORMALIZATION = """Scores are normalized per task: 0 is a random policy, 1 is this repository's PPO at the same
number of steps. The paper divides by PPO's return instead, which reverses the order where returns are negative: on
Reacher a return of -15 is 2.7 times PPO's -5.5 and counts as better. That normalization is shown only for comparison
with the paper's figures."""


AUTHORS = """0 is a random policy and 1 is their PPO, at the end of training where the row does not say otherwise."""


def summarize(rows, column, title, methods, tasks, reference, path):
    """Aggregates over tasks with both normalizations, and figures for the first. `path` is how their names begin."""
    np.random.seed(0)  # rliable uses numpy's global generator
    raw = matrices(rows, column, methods, tasks)
    zero, one = (reference.loc[tasks, name].to_numpy() for name in ("random", column))
    normalized = {method: (x - zero) / (one - zero) for method, x in raw.items()}
    points, intervals = aggregate(normalized)
    figure, chances = Path(f"{path}.png"), Path(f"{path}_improvement.png")
    plot_aggregates(normalized, points, intervals, dict(zip(methods, COLORS)), figure, f"{title}, random = 0, PPO = 1")
    page = [f"![aggregates of the {title}]({figure.name})", aggregate_table(normalized, points, intervals)]
    if len(normalized) > 1:
        plot_improvements(normalized, chances, f"probability of improvement, {title}")
        page.append(f"![probability of improvement]({chances.name})")
    divided = {method: x / one for method, x in raw.items()}
    page += [f"The paper's normalization, {title} divided by PPO's:", aggregate_table(divided, *aggregate(divided))]
    return page


def missing(rows, experiment):
    """The runs of the experiment that are not there."""
    methods = {}  # by what they lack
    for method in experiment.methods:
        tasks = {}  # by number of seeds
        for task in experiment.tasks:
            tasks.setdefault(min(len(of(rows, method, task)), experiment.seeds), []).append(task)
        parts = (f"{count} seed{'s' * (count != 1)} of {', '.join(tasks[count])}" for count in sorted(tasks))
        if len(tasks) > 1 or 0 in tasks:
            methods.setdefault("not run" if list(tasks) == [0] else "; ".join(parts), []).append(method)
    return ["## Missing runs", "\n".join(f"- {', '.join(methods[x])}: {x}" for x in methods)] if methods else []


def section(table, total, experiment, folder):
    """The figure that shows most about runs of one length, and the part of the page about them."""
    rows = scores(table)
    methods = [method for method in experiment.methods if (rows["method"] == method).any()]
    tasks = [task for task in experiment.tasks if (rows["task"] == task).any()]
    seeds = rows.groupby(["method", "task"]).size()
    many = f"{seeds.min()} to {seeds.max()} seeds" if seeds.min() < seeds.max() else f"seeds per task: {seeds.max()}"
    text = f"""{len(rows)} run{"s" * (len(rows) > 1)}, {rows["minutes"].sum() / 60:.1f} hours of wall time together. A
return is the mean of the last 100 episodes{" on test levels" if "training" in table else ""}. Intervals are 95 %
percentile bootstrap over seeds, with three seeds their range; of fewer than three the runs are shown."""
    if "training" in table:
        text += " Published values are the authors' with five seeds, read from their plots."
    elif authors_table(experiment):
        text += """ Published values are the authors' with ten seeds; those of PPO, SAC and TD3, and those at 1,000,000
steps, are read from their plots."""
        if total != 3_000_000:
            text += f" On-policy runs here anneal their learning rate over {total:,} steps, theirs over 3,000,000."
    plot_curves(table, methods, tasks, folder / f"curves_{total}.png")
    figure = f"![learning curves](curves_{total}.png)"
    page = [f"## {total:,} steps, {many}", text, *claim_tables(rows, experiment, methods, total)]
    page += [*count_table(rows, opponents(experiment, methods), tasks), figure]
    reference = references(total)
    of_ppo = [task for task in tasks if task in reference.index]
    shared = [task for task in of_ppo if all(len(of(rows, method, task)) for method in methods)]
    figures, columns = [], (("final", "return", "final return"), ("area", "area", "area under the curve"))
    for part, name in ((of_ppo, ""), (shared, "_shared"))[: 1 + (shared != of_ppo)]:
        complete = list(matrices(rows, "final", methods, part))
        if len(part) < 2 or len(complete) < min(2, len(methods)):  # one alone is compared with nothing
            continue
        page += [f"## Over {len(part)} tasks, {len(complete)} method{'s' * (len(complete) > 1)}", NORMALIZATION]
        if len(part) < len(experiment.tasks):
            page.append(f"The tasks are {', '.join(part)}.")
        if (longer := reference.loc[part, "length"].max()) > total:
            page.append(f"PPO's returns are those at {total:,} steps of runs of up to {longer:,} steps.")
        for column, short, title in columns:
            path = folder / f"{experiment.name}_{short}_{total}{name}"
            found = summarize(rows, column, title, methods, part, reference, path)
            page += found
            figures += found[:1] * (len(complete) > 1)
    return (figures or [figure])[0], page


def shared_seeds(table):
    """Of each task the seeds that all its methods have."""
    methods = table.groupby(["task", "seed"])["method"].transform("nunique")
    return table[methods == table.groupby("task")["method"].transform("nunique")]


def error_table(rows, methods, tasks):
    """Means with standard errors, each task with the published means below."""
    theirs, lines = published(), []
    for task in tasks:
        ours, below = [task, str(len(of(rows, methods[0], task)))], ["published", "20"]
        for method in methods:
            values, (mean,) = of(rows, method, task)["final"], theirs.get((method, task), [np.nan])
            # The published means have two digits. How far their seeds vary is not known: assume as far as ours.
            error = values.std() * np.sqrt(1 / len(values) + 1 / 20)
            mark = " *" if abs(values.mean() - mean) > 2 * error + 0.005 else ""
            ours.append(f"{number(values.mean())} ({number(values.sem())}){mark}")
            below.append("" if np.isnan(mean) else number(mean))
        lines += [ours, below] if any(below[2:]) else [ours]
    return markdown(["task", "seeds", *methods], lines)


def ranks(rows, methods, task) -> list:
    """A rank is 1 plus the number of methods that are better by a paired t-test over seeds at p = 0.1."""
    finals = rows[rows["task"] == task].pivot(index="seed", columns="method", values="final")

    def better(x, y):
        return finals[x].mean() > finals[y].mean() and stats.ttest_rel(finals[x], finals[y]).pvalue < 0.1

    return [1 + sum(better(other, method) for other in methods) for method in methods]


def gymnax_section(table, total, experiment, folder):
    """The same for the JAX scripts."""
    table = shared_seeds(table)
    rows = scores(table)
    methods = [method for method in experiment.methods if (rows["method"] == method).any()]
    tasks = [task for task in experiment.tasks if all(len(of(rows, method, task)) > 1 for method in methods)]
    if not tasks:
        return "", [f"## {total:,} steps", "No task has two seeds of each method."]
    plot_curves(table, methods, tasks, folder / f"curves_{total}.png")
    text = f"""Mean final return over seeds, with its standard error. The return of a seed is the mean of the last
episode of each environment. The figure has 95 % percentile bootstrap bands over seeds, or the runs if there are fewer
than three. Training took {rows["minutes"].sum() / 60:.2f} hours of wall time, one run per core."""
    if any((method, task) in published() for method in methods for task in tasks):
        text += """ Published values are the authors' means. A * marks what differs by more than two standard
errors of the difference, if their seeds vary as ours do (they publish no errors)."""
    by_task = np.array([ranks(rows, methods, task) for task in tasks])
    head = ["method", *tasks, "mean"]
    lines = [[name, *map(str, column), f"{column.mean():.2f}"] for name, column in zip(methods, by_task.T)]
    theirs = json.loads((RESULTS / "published.json").read_text())["gymnax"]
    if experiment.name in theirs["steps"]:
        head.append(f"published mean, {theirs['steps'][experiment.name]:,} steps")
        for line in lines:
            line.append(f"{theirs['mean_rank'][experiment.name][line[0]]:.2f}")
    page = [f"## {total:,} steps", text, error_table(rows, methods, tasks), "## Ranks"]
    page.append("""As in the paper, a rank is 1 plus the number of methods that are better by a paired t-test over seeds
at p = 0.1. Methods that do not differ share a rank.""")
    page.append(markdown(head, lines))
    return f"![learning curves](curves_{total}.png)", page


def main(args):
    experiment = load_experiment(args.experiment)
    folder = (RESULTS if args.committed else args.folder / "report") / experiment.name
    runs = find_runs(experiment, args.folder)
    others = other_pages(experiment) if args.committed else ()
    table = update_table(folder / "curves.csv.gz", runs, bool(experiment.seeds_per_run), others)
    if not len(table):
        fail(f"there are no finished runs of {experiment.name} in {args.folder}, and no table in {folder}")
    for run in runs:
        if run.seed == 1 and run.task == "Humanoid-v4" and "VSOP" in run.method:
            save_histograms(folder / "histograms.json", run)
            break
    part, parts = gymnax_section if experiment.seeds_per_run else section, []
    for total in table["total"].value_counts().index:  # the length of most runs first
        rows = table[table["total"] == total]
        figure, paragraphs = part(rows, int(total), experiment, folder)
        parts.append((figure, paragraphs + (missing(scores(rows), experiment) if not parts else [])))
    notes = (folder / "notes.md").read_text().strip() if (folder / "notes.md").exists() else ""
    opening, heading, rest = f"\n{notes}".partition("\n## ")
    command = f"python benchmark/report.py {args.experiment}{' --committed' * args.committed}"
    page = [f"# {TITLES.get(experiment.name, experiment.name)}", parts[0][0], opening.strip()]
    page.append(f"Made with `{command}` from `curves.csv.gz`.")
    page += [paragraph for _, part in parts for paragraph in part if paragraph != parts[0][0]]
    if authors := authors_table(experiment):
        page += ["## The authors' returns on the same scale", AUTHORS, authors]
    if (folder / "histograms.json").exists():
        plot_histograms(folder / "histograms.json", folder / "advantage_histograms.png")
        page += ["## Advantages before and after the ReLU", "![advantage histograms](advantage_histograms.png)"]
    page.append((heading + rest).strip())
    (folder / "README.md").write_text("\n\n".join(filter(None, page)) + "\n")
    print(f"wrote {folder / 'README.md'}")


if __name__ == "__main__":
    main(parse())
