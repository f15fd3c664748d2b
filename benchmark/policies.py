"""Collect, measure and film the policies that VSOP learned on the ten tasks.

    python benchmark/policies.py                 # update policies/ from the finished runs in --folder

Of each task it copies the policy of the longest finished run of `baselines` with seed 1 to <output>/<task>.pt. A task
without a run keeps the policy it has, so that in a clone the committed ones are measured. enjoy.py plays 20 episodes
of each for the table in README.md, and policies.webp shows a few seconds of all of them.
"""

import shutil
import sys
from pathlib import Path

from common import ROOT, TASKS, Parser, fail, latest_run, markdown, number, published
from run import FOLDER, find_runs, load_experiment

# isort: split
import numpy as np
import torch
from PIL import Image, ImageDraw

sys.path.insert(0, str(ROOT))
from enjoy import Args, enjoy, load_policy

EPISODES = 20
SECONDS, FPS, TILE = 4, 15, 160  # of the animation; a tile is a square of so many pixels
COLUMNS = 5


def parse():
    parser = Parser(__doc__)
    add = parser.add_argument
    add("--folder", type=Path, default=FOLDER, help=f"folder of the runs (default: {FOLDER})")
    add("--output", type=Path, default=ROOT / "policies", help="folder of the policies (default: policies)")
    return parser.parse_args()


def collect(folder: Path, output: Path):
    runs = [run for run in find_runs(load_experiment("baselines"), folder) if run.method == "VSOP" and run.seed == 1]
    for run in sorted(runs, key=lambda run: run.total):  # the longest last
        shutil.copy(latest_run(run.folder) / "policy.pt", output / f"{run.task}.pt")


def table(paths: list) -> str:
    lines, theirs = [], published()
    for path in paths:
        means = [enjoy(Args(path, episodes=EPISODES, thompson=thompson)) for thompson in (False, True)]
        cells = [f"{number(np.mean(returns))} ({number(np.std(returns))})" for returns in means]
        steps = torch.load(path, weights_only=True)["args"]["total_timesteps"]
        lines.append([path.stem, f"{steps:,}", *cells, number(theirs["VSOP", path.stem][0])])
    head = ["task", "steps", "posterior mean", "as in training (`--thompson`)", "published, 3,000,000 steps"]
    return markdown(head, lines)


def film(path: Path):
    """Frames of a policy that plays in real time, with the name of its task."""
    policy, rng = load_policy(path), np.random.default_rng(0)
    env = policy.make_env(Args(path, video=Path("frames.mp4")))  # only tells it to draw
    obs, _ = env.reset(seed=1)
    steps = env.metadata["render_fps"] / FPS  # per frame
    for frame in range(SECONDS * FPS):
        picture = Image.fromarray(env.render()).resize((TILE, TILE), Image.Resampling.LANCZOS)
        ImageDraw.Draw(picture).text((4, 2), path.stem, fill="white", stroke_width=1, stroke_fill="black")
        yield picture
        for _ in range(round((frame + 1) * steps) - round(frame * steps)):
            obs, _, terminated, truncated, _ = env.step(policy.act(obs, rng, thompson=False))
            if terminated or truncated:
                obs, _ = env.reset()
    env.close()


def animate(paths: list, path: Path):
    rows = -(-len(paths) // COLUMNS)
    pages = []
    for pictures in zip(*map(film, paths)):
        page = Image.new("RGB", (TILE * min(COLUMNS, len(paths)), TILE * rows), "white")
        for i, picture in enumerate(pictures):
            page.paste(picture, (TILE * (i % COLUMNS), TILE * (i // COLUMNS)))
        pages.append(page)
    options = dict(duration=1000 // FPS, loop=0, quality=60, method=6)
    pages[0].save(path, save_all=True, append_images=pages[1:], **options)


PAGE = """# Policies

![VSOP's policies of ten tasks](policies.webp)

What VSOP learned with seed 1, `python vsop_continuous.py --env-id <task> --total-timesteps <steps>`. To watch one:

```bash
python enjoy.py policies/Humanoid-v4.pt --video humanoid.mp4 --episodes 1      # or --render, with a display
```

{table}

Mean return of {episodes} episodes and its standard deviation by `enjoy.py`: with the mean of the posterior and
without noise, and with weights and actions sampled. One seed does not measure a method;
[the comparison](../benchmark/results/baselines/README.md) has several. Made with `python benchmark/policies.py`.
"""


def main():
    args = parse()
    args.output.mkdir(parents=True, exist_ok=True)
    collect(args.folder, args.output)
    paths = [path for task in TASKS["mujoco"] if (path := args.output / f"{task}.pt").exists()]
    if not paths:
        fail(f"there are no finished runs of VSOP with seed 1 in {args.folder}, and no policies in {args.output}")
    animate(paths, args.output / "policies.webp")  # first: it decides how MuJoCo draws
    (args.output / "README.md").write_text(PAGE.format(table=table(paths), episodes=EPISODES))
    print(f"wrote {args.output / 'README.md'}")


if __name__ == "__main__":
    main()
