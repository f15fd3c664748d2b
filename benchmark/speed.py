"""How fast the scripts are, as a share of the speed of the bare simulator. Run it with nothing else running:

    python benchmark/speed.py               # or only a part of it: continuous, procgen
    python benchmark/speed.py gymnax        # the JAX scripts, where requirements-gymnax.txt is installed

Every script trains in a process and on a thread of its own, one after the other. In the same process, before and after,
the task is stepped alone as `gym.make` returns it, with random actions: that is the raw rate, and 100 %. Rates are the
best of several windows of 2048 steps after the warm-up. The limit is the share if nothing but the bare task and the
matrix products of the updates took time. Writes speed.json, speed.md and speed.png to benchmark/results/.

Next to the network that plays it, a game costs almost nothing. There the limit is the network's arithmetic at the speed
of a large matrix product in the same process, and the peer is the same script with torch's default layout of frames:
speed_procgen.json and speed_procgen.md.

The JAX scripts are measured by their compiled training loop on one thread, in windows of about half a second: by number
of seeds, in one and two processes, against vsop_continuous.py, and on MinAtar with the same kind of limit as above. Two
runs of the command line tell the start-up without and with compiled code in the cache: speed_gymnax.json and .md.
"""

import argparse
import contextlib
import importlib.util
import io
import json
import multiprocessing
import os
import resource
import subprocess
import sys
import tempfile
import time
import warnings
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"
ROOT = Path(__file__).parent.parent
RESULTS = Path(__file__).parent / "results"
sys.path.insert(0, str(ROOT))
clock = time.perf_counter

# Script, task, the share to reach, and the share of other code as measured earlier on the same kind of machine: that
# one is carried over and not measured here.
GOALS = [
    ("vsop_continuous", "HalfCheetah-v4", 0.25, "authors 3.3 %"),
    ("vsop_continuous", "Hopper-v4", 0.40, "authors 8 %"),
    ("vsop_continuous", "Humanoid-v4", 0.40, "authors 11 %"),
    ("ppo_continuous", "HalfCheetah-v4", 0.33, "CleanRL 6.4 %"),
    ("vsppo_continuous", "Hopper-v4", 0.30, "authors 4.7 %"),
    ("a3c_continuous", "Hopper-v4", 0.40, "authors 9 %"),
    ("rmpg_continuous", "Hopper-v4", 0.20, "authors 1.2 %"),
]
PEERS = [("PPO", "HalfCheetah-v4"), ("A2C", "Hopper-v4")]  # of Stable-Baselines3
NUM_ENVS, WIDTHS = (1, 4, 16, 64), (64, 256, 1024)


@contextlib.contextmanager
def quietly():
    """In a folder of its own, without output."""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder), contextlib.redirect_stdout(io.StringIO()):
        yield folder


def raw_rate(task):
    """Steps per second of the task alone, with random actions sampled before, best of five windows of a second: about
    as long as the windows of a script, for where the speed of a machine varies a short one catches a faster moment."""
    import gymnasium as gym
    import mujoco

    warnings.filterwarnings("ignore", message=".*is out of date.*")
    mujoco.set_mju_user_warning(lambda message: None)
    env = gym.make(task)
    env.reset(seed=0)
    actions = [env.action_space.sample() for _ in range(100)]
    best = 0.0
    for _ in range(5):
        start, steps = clock(), 0
        while clock() - start < 1.0:
            for action in actions:
                _, _, terminated, truncated, _ = env.step(action)
                if terminated or truncated:
                    env.reset()
            steps += len(actions)
        best = max(best, steps / (clock() - start))
    return best


def product_seconds(args, agent):
    """Seconds per step for the bare matrix products of the updates: forward, and backward by weights and inputs."""
    import torch

    rows = args.batch_size // args.num_minibatches
    seconds = 0.0
    for network in (agent.actor, agent.critic):
        for layer in (*network.hidden, network.out):
            n_out, n_in = layer.weight.shape
            shapes = [(rows, n_in, n_out), (n_out, rows, n_in)]
            if layer is not network.hidden[0]:
                shapes.append((rows, n_out, n_in))
            for m, k, n in shapes:
                a, b, times = torch.randn(m, k), torch.randn(k, n), []
                for _ in range(200):
                    start = clock()
                    a @ b
                    times.append(clock() - start)
                seconds += min(times)
    return seconds * args.update_epochs * args.num_minibatches / args.batch_size


class Windows:
    """Time marks at the start of rollouts, and the time spent in parts of the program up to each."""

    def __init__(self, size=2048):
        self.spent, self.marks, self.size = {}, [], size

    def timed(self, function, part):
        self.spent[part] = 0.0

        def wrapper(*args, **kwargs):
            start = clock()
            result = function(*args, **kwargs)
            self.spent[part] += clock() - start
            return result

        return wrapper

    def mark(self, step):
        if not self.marks or step - self.marks[-1][0] >= self.size:
            self.marks.append((step, clock(), dict(self.spent)))

    def best(self):
        """Rate of the fastest window after the first two, and the seconds per step of each part in it."""
        windows = []
        for (step, start, before), (next_step, end, after) in zip(self.marks[2:], self.marks[3:]):
            steps = next_step - step
            parts = {part: (after[part] - before[part]) / steps for part in after}
            windows.append(((end - start) / steps, parts))
        seconds, parts = min(windows, key=lambda window: window[0])
        if "rollout" in parts:
            parts["policy"] = parts.pop("rollout") - parts["environment"]
            parts["rest"] = seconds - sum(parts.values())
        return 1 / seconds, parts


def measure_script(name, task, settings, windows_wanted=25):
    """One run of a script, its functions timed from outside."""
    raw = raw_rate(task)
    script, windows = importlib.import_module(name), Windows()
    make = script.make_env

    def make_env(*args, **options):
        env = make(*args, **options)
        env.step = windows.timed(env.step, "environment")
        return env

    script.make_env = make_env
    first = time_the_loop(script, windows)
    args = script.RunArgs(env_id=task, **settings)
    iterations = -(-max(2048, args.batch_size) * (windows_wanted + 3) // args.batch_size)
    args.total_timesteps = iterations * args.batch_size
    with quietly():
        setup = time.time()
        script.train(args)
    raw = max(raw, raw_rate(task))
    limit = 1 / (1 + raw * product_seconds(args, first["agent"]))
    rate, parts = windows.best()
    return dict(
        script=name, task=task, settings=settings, raw=raw, rate=rate, share=rate / raw, limit=limit, parts=parts,
        memory=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        startup=import_seconds(name) + first["rollout"] - setup, warmup=first["update"] - first["rollout"],
    )  # fmt: skip


def time_the_loop(script, windows) -> dict:
    """Times rollout, advantages and update of a script's loop. Returns a dict that will have the agent and the times at
    which the first rollout began and the first update ended."""
    first = {}
    collect, learn = windows.timed(script.collect_rollout, "rollout"), script.learn
    advantages = windows.timed(script.compute_advantages, "advantage")
    windows.spent["update"] = 0.0

    def collect_rollout(envs, *rest):
        first.setdefault("rollout", time.time())
        windows.mark(envs.global_step)
        return collect(envs, *rest)

    def compute_advantages(agent, *rest):
        batch = advantages(agent, *rest)
        first["agent"], first["update began"] = agent, clock()
        return batch

    def timed_learn(*args):
        for iteration in learn(*args):
            windows.spent["update"] += clock() - first["update began"]
            first.setdefault("update", time.time())
            yield iteration

    script.collect_rollout, script.compute_advantages, script.learn = collect_rollout, compute_advantages, timed_learn
    return first


def import_seconds(name):
    start = clock()
    subprocess.run([sys.executable, "-c", f"import {name}"], cwd=ROOT, check=True)
    return clock() - start


def measure_peer(algorithm, task):
    """Stable-Baselines3 with the settings of our script, normalization included."""
    import stable_baselines3
    import torch
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.vec_env import VecNormalize

    torch.set_num_threads(1)
    raw = raw_rate(task)
    windows = Windows()

    class Mark(BaseCallback):
        def _on_rollout_start(self):
            windows.mark(self.num_timesteps)

        def _on_step(self):
            return True

    env = VecNormalize(make_vec_env(task, 1, seed=1))
    model = getattr(stable_baselines3, algorithm)("MlpPolicy", env, device="cpu", seed=1)  # with defaults like ours
    model.learn(2048 * 28, callback=Mark())
    raw = max(raw, raw_rate(task))
    rate, _ = windows.best()
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return dict(script=f"Stable-Baselines3 {algorithm}", task=task, raw=raw, rate=rate, share=rate / raw, memory=memory)


def flops(args, agent):
    """Floating-point operations per frame: rollout, test and values forward, every epoch forward and backward."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    frames = torch.zeros((8, 64, 64, 3), dtype=torch.uint8)
    with FlopCounterMode(display=False) as forward, torch.no_grad():
        agent(frames)
    with FlopCounterMode(display=False) as both:
        torch.autograd.grad(sum(x.sum() for x in agent(frames)), list(agent.parameters()))
    return (3 * forward.get_total_flops() + args.update_epochs * both.get_total_flops()) / len(frames)


def product_rate(ones):
    """Floating-point operations per second of a large matrix product, best of ten. `ones` is torch's or JAX's."""
    a, times = ones((2048, 2048)), []
    for _ in range(10):
        start = clock()
        float((a @ a)[0, 0])  # waits for the result
        times.append(clock() - start)
    return 2 * 2048**3 / min(times)


def measure_game(name, layout):
    """One run of a ProcGen script. Rollouts of 64 environments and few steps: what is done per frame is the same."""
    import torch

    torch.set_num_threads(1)
    speed = product_rate(torch.ones)
    script, windows = importlib.import_module(name), Windows(size=1024)

    class Agent(script.Agent):
        def __init__(self, envs, args):
            super().__init__(envs, args)
            if layout != "channels last":
                self.to(memory_format=torch.contiguous_format)

        def forward(self, frames, *masks):
            if layout != "channels last":
                frames = frames.permute(0, 3, 1, 2).contiguous().permute(0, 2, 3, 1)
            return super().forward(frames, *masks)

    script.Agent = Agent
    if layout == "default, whole minibatches":
        script.part_size = lambda device: 4096
    script.Envs.step = windows.timed(script.Envs.step, "environment")
    first = time_the_loop(script, windows)
    args = script.RunArgs(num_envs=64, num_steps=16, num_minibatches=1, total_timesteps=7 * 1024)
    with quietly():
        script.train(args)
    limit = max(speed, product_rate(torch.ones)) / flops(args, first["agent"])
    rate, parts = windows.best()
    return dict(script=name, layout=layout, rate=rate, limit=limit, share=rate / limit, parts=parts)


def measure_game_memory(name):
    """Peak memory of a script at its defaults, one epoch of one rollout."""
    script = importlib.import_module(name)
    with quietly():
        script.train(script.RunArgs(total_timesteps=script.Args().batch_size, update_epochs=1))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


GYMNAX_SCRIPTS = ("vsop_gymnax", "a3c_gymnax", "ppo_gymnax", "dpo_gymnax")
GYMNAX_SEEDS = (1, 20, 100)
GYMNAX_GRID = [(name, task) for name in ("vsop_gymnax", "ppo_gymnax") for task in ("CartPole-v1", "Pendulum-v1")]


def training(name, task, num_seeds, settings):
    """Trains with a JAX script, and yields the steps per second of all seeds in windows of about half a second. The
    first window compiles, the second tells how many iterations the next ones have."""
    script = importlib.import_module(name)
    jax, args, env = script.jax, script.Args(**settings | dict(env_id=task)), script.make_env(task)
    args.total_timesteps = 10**9  # the learning rate stays positive
    states = jax.jit(jax.vmap(partial(script.init, env=env, args=args)))(script.np.arange(num_seeds))
    chunk, count = jax.jit(partial(script.learn, env=env, args=args), donate_argnums=0), 1
    while True:
        start = clock()
        states, _ = jax.block_until_ready(chunk(states, count))
        seconds = clock() - start
        yield count * args.batch_size * num_seeds / seconds
        count = max(1, round(count * 0.5 / seconds))


def best_rates(runs, repeats):
    """Of each of these trainings, which take turns, the best window after the first two."""
    windows = [[next(run) for run in runs] for _ in range(2 + repeats)]
    return [max(rates) for rates in zip(*windows[2:])]


def measure_seeds(name, task, seeds=GYMNAX_SEEDS, repeats=5, **settings):
    runs = [training(name, task, num_seeds, settings) for num_seeds in seeds]
    return dict(script=name, task=task, rates=best_rates(runs, repeats))


def measure_minatar(name, num_seeds=4, repeats=3, **changes):
    """Rollouts have 16 steps at most, and as many rows in a minibatch as by default: what is done per step is the same.
    An iteration of all seeds at the defaults takes up to half a minute."""
    script, task = importlib.import_module(name), "Breakout-MinAtar"
    settings = script.MINATAR | changes
    parts = max(1, settings["num_steps"] // 16)
    settings |= {key: settings[key] // parts for key in ("num_steps", "num_minibatches")}
    speed = product_rate(script.jnp.ones)
    (rate,) = best_rates([training(name, task, num_seeds, settings)], repeats)
    speed = max(speed, product_rate(script.jnp.ones))
    operations = gymnax_flops(script, script.Args(**settings | dict(env_id=task)))
    limit = speed / operations
    return dict(script=name, task=task, rate=rate, limit=limit, share=rate / limit, product=speed, flops=operations)


def gymnax_flops(script, args):
    """Floating-point operations per step: the actor acts, the critic values, and every epoch has both forward and
    backward, but for the gradient of the observations, which is not needed."""
    init = partial(script.init, env=script.make_env(args.env_id), args=args)
    params = script.jax.eval_shape(init, 0)["params"]
    layers = [[2 * weight.size for weight, _ in params[name]] for name in ("actor", "critic")]
    forward, first = sum(map(sum, layers)), sum(layer[0] for layer in layers)
    return forward + args.update_epochs * (3 * forward - first)


def measure_alongside(barrier, repeats=5, **settings):
    """One of several processes whose windows begin at the same time."""
    run = training("vsop_gymnax", "CartPole-v1", 20, settings)
    for _ in range(2):
        next(run)
    barrier.wait(timeout=600)
    return max(next(run) for _ in range(repeats))


def measure_processes(count, **options):
    """Steps per second of some processes together, each with 20 seeds and a thread."""
    context = multiprocessing.get_context("spawn")
    with context.Manager() as manager, ProcessPoolExecutor(count, mp_context=context) as pool:
        barrier = manager.Barrier(count)
        runs = [pool.submit(measure_alongside, barrier, **options) for _ in range(count)]
        return sum(run.result() for run in runs)


def measure_start():
    """Seconds that a run of one iteration takes in all, without compiled code in JAX's cache and then with it."""
    command = [sys.executable, str(ROOT / "vsop_gymnax.py"), "--num-seeds", "20", "--total-timesteps", "1024"]
    seconds = []
    with quietly() as folder:
        env = os.environ | dict(JAX_COMPILATION_CACHE_DIR=folder)
        for _ in ("cold", "warm"):
            start = clock()
            subprocess.run(command, env=env, check=True, stdout=subprocess.DEVNULL)
            seconds.append(clock() - start)
    return seconds


def in_a_process(function, *args):
    """Alone in a new process, so that neither memory nor compiled code of another run counts."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *args).result()


def markdown(head, rows):
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, ("---",) * len(head), *rows))


PARTS = ("environment", "policy", "advantage", "update", "rest")


def table(rows):
    goals = {(name, task): (f"{share:.0%}", others) for name, task, share, others in GOALS}
    head = ("script, task", "raw steps/s", "steps/s", "share", "goal", "limit", "earlier")
    head += (*PARTS, "memory", "start", "warm-up")
    lines = []
    for row in rows:
        cells = [f"{row['script'].removesuffix('_continuous')}, {row['task']}"]
        cells += [f"{row['raw']:,.0f}", f"{row['rate']:,.0f}", f"**{row['share']:.1%}**"]
        goal, others = goals.get((row["script"], row["task"]), ("", ""))
        cells += [goal, f"{row['limit']:.0%}" if "limit" in row else "", others]
        cells += [f"{row['parts'][part] * 1e6:.0f} µs" if "parts" in row else "" for part in PARTS]
        cells += [f"{row['memory']:.0f} MB"]
        cells += [f"{row[key]:.1f} s" if key in row else "" for key in ("startup", "warmup")]
        lines.append(cells)
    return markdown(head, lines)


GAME_SCRIPTS = ("vsop_procgen", "ppo_procgen")
LAYOUTS = ("channels last", "default", "default, whole minibatches")


def game_table(rows):
    head = ("script, layout", "frames/s", "times", "limit", "share", *PARTS, "memory")
    lines = []
    for row in rows:
        (ours,) = [x["rate"] for x in rows if x["script"] == row["script"] and x["layout"] == LAYOUTS[0]]
        cells = [f"{row['script']}, {row['layout']}", f"{row['rate']:.1f}", f"{row['rate'] / ours:.2f}"]
        cells += [f"{row['limit']:.0f}", f"**{row['share']:.0%}**"]
        cells += [f"{row['parts'][part] * 1e3:.2f} ms" for part in PARTS]
        cells += [f"{row['memory']:,.0f} MB" if "memory" in row else ""]
        lines.append(cells)
    return markdown(head, lines)


def gymnax_report(results):
    rates = {f"{row['script']}, {row['task']}": row["rates"] for row in results["seeds"]}
    head = ("script, task", *(f"steps/s, seeds: {n}" for n in GYMNAX_SEEDS), "growth")
    lines = [[name, *(f"{x:,.0f}" for x in row), f"**{row[-1] / row[0]:.1f}**"] for name, row in rates.items()]
    (one, two), (cold, warm), peer = results["processes"], results["start"], results["continuous"]
    parts = [markdown(head, lines)]
    parts.append(f"Two processes with 20 seeds of CartPole-v1 each: {two:,.0f} steps/s, {two / one:.2f} times one's.")
    parts.append(f"A run of one iteration of 20 seeds: {cold:.1f} s; {warm:.1f} s with compiled code in the cache.")
    if peer:
        times = ", ".join(f"{rate / peer:.1f}" for rate in rates["vsop_gymnax, Pendulum-v1"])
        parts.append(f"vsop_continuous, Pendulum-v1: {peer:,.0f} steps/s; vsop_gymnax has {times} times as many.")
    head = ("script, task", "steps/s", "limit", "share", "MFLOP per step", "GFLOP/s")
    lines = []
    for row in results["minatar"]:
        cells = [f"{row['script']}, {row['task']}", f"{row['rate']:,.0f}", f"{row['limit']:,.0f}"]
        cells += [f"**{row['share']:.0%}**", f"{row['flops'] / 1e6:.1f}", f"{row['product'] / 1e9:.0f}"]
        lines.append(cells)
    return "\n\n".join([*parts, markdown(head, lines)])


def plot(rows, path):
    """Where the time of a step goes, by number of environments and by width."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    colors = ("#0072B2", "#56B4E9", "#009E73", "#E69F00", "#999999")  # Okabe and Ito's, safe for the colour-blind
    figure, axes = plt.subplots(1, 2, figsize=(10, 4))
    for axis, key, values in ((axes[0], "num_envs", NUM_ENVS), (axes[1], "width", WIDTHS)):
        chosen = [next(row for row in rows if row["settings"].get(key) == value) for value in values]
        bottom = [0.0] * len(values)
        for part, color in zip(PARTS, colors):
            heights = [row["parts"][part] * 1e6 for row in chosen]
            axis.bar(range(len(values)), heights, bottom=bottom, color=color, label=part)
            bottom = [b + h for b, h in zip(bottom, heights)]
        for x, (row, top) in enumerate(zip(chosen, bottom)):
            axis.text(x, top, f"{row['rate']:,.0f}/s", ha="center", va="bottom")
        axis.set_xticks(range(len(values)), values)
        axis.set_xlabel({"num_envs": "environments (rollout of 2048 steps)", "width": "units per hidden layer"}[key])
        axis.set_ylabel("µs per step")
        axis.spines[["top", "right"]].set_visible(False)
        axis.margins(y=0.1)
    axes[1].legend(frameon=False, loc="upper left")
    figure.suptitle("VSOP on HalfCheetah-v4, one thread")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def save(name, report, results):
    (RESULTS / f"{name}.md").write_text(report + "\n")
    (RESULTS / f"{name}.json").write_text(json.dumps(results, indent=1) + "\n")


def measure_gymnax():
    if not importlib.util.find_spec("gymnax"):
        fail("gymnax is not installed: pip install -r requirements-gymnax.txt, in an environment of its own")
    results = dict(seeds=[in_a_process(measure_seeds, *cell) for cell in GYMNAX_GRID])
    pairs = [(measure_processes(1), measure_processes(2)) for _ in range(2)]
    results["processes"] = [max(rates) for rates in zip(*pairs)]
    results["start"] = [min(seconds) for seconds in zip(measure_start(), measure_start())]
    has_peer = all(map(importlib.util.find_spec, ("torch", "mujoco")))
    peer = has_peer and in_a_process(measure_script, "vsop_continuous", "Pendulum-v1", {}, 8)
    results["continuous"] = peer["rate"] if peer else None
    results["minatar"] = [in_a_process(measure_minatar, name) for name in GYMNAX_SCRIPTS]
    print(gymnax_report(results))
    save("speed_gymnax", gymnax_report(results), results)


def measure_games():
    rows = []
    for name in GAME_SCRIPTS:
        rows += [in_a_process(measure_game, name, layout) for layout in LAYOUTS]
        rows[-len(LAYOUTS)]["memory"] = in_a_process(measure_game_memory, name)
        print(game_table(rows[-len(LAYOUTS) :]), flush=True)
    save("speed_procgen", game_table(rows), rows)


def measure_continuous():
    rows, scaling = [], []
    for name, task, _, _ in GOALS:
        rows.append(in_a_process(measure_script, name, task, {}))
        print(table(rows[-1:]).splitlines()[-1], flush=True)
    if importlib.util.find_spec("stable_baselines3"):
        for algorithm, task in PEERS:
            rows.append(in_a_process(measure_peer, algorithm, task))
    grid = [dict(num_envs=n, num_steps=2048 // n) for n in NUM_ENVS] + [dict(width=width) for width in WIDTHS]
    for settings in grid:
        scaling.append(in_a_process(measure_script, "vsop_continuous", "HalfCheetah-v4", settings, 8))
    report = table(rows)
    rate = {(row["script"], row["task"]): row["rate"] for row in rows}
    for ours, peer, task in (("ppo", "PPO", "HalfCheetah-v4"), ("a3c", "A2C", "Hopper-v4")):
        if (theirs := rate.get((f"Stable-Baselines3 {peer}", task))) is not None:
            times = rate[f"{ours}_continuous", task] / theirs
            report += f"\n\n`{ours}_continuous.py` is {times:.1f} times as fast as Stable-Baselines3's {peer}."
    print(f"\n{report}")
    save("speed", report, dict(rows=rows, scaling=scaling))
    plot(scaling, RESULTS / "speed.png")


def fail(message):
    print(f"error: {message}", file=sys.stderr)
    sys.exit(2)


def main():
    kinds = dict(continuous=measure_continuous, procgen=measure_games, gymnax=measure_gymnax)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", help="continuous, procgen, gymnax; by default the first two")
    chosen = parser.parse_args().kinds or ("continuous", "procgen")
    if unknown := [kind for kind in chosen if kind not in kinds]:
        fail(f"there is nothing to measure for {unknown[0]!r}; there are {', '.join(kinds)}")
    RESULTS.mkdir(exist_ok=True)
    for kind in chosen:
        kinds[kind]()


if __name__ == "__main__":
    main()
