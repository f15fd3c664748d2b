"""Measure the return of uniformly random actions, the zero of the normalized scores, into results/random.json.

python benchmark/random_policy.py
"""

import json
import sys
import warnings

from common import RESULTS, ROOT, TASKS, Parser

# isort: split
import gymnasium as gym
import mujoco
import numpy as np

sys.path.insert(0, str(ROOT))
EPISODES = 100


def random_returns(task: str, episodes: int, seed: int = 0) -> list:
    env = gym.make(task)
    env.action_space.seed(seed)
    returns = []
    for episode in range(episodes):
        env.reset(seed=seed if episode == 0 else None)
        total, ended = 0.0, False
        while not ended:
            _, reward, terminated, truncated, _ = env.step(env.action_space.sample())
            total, ended = total + float(reward), terminated or truncated
        returns.append(total)
    return returns


def random_game_returns(game: str, episodes: int, seed: int = 0) -> list:
    """The first episode of each environment, on levels sampled from all; short episodes are not favoured."""
    from vsop_procgen import Args, make_envs

    pool = make_envs(Args(env_id=game, num_envs=episodes), num_levels=0, seed=seed)
    rng, totals, ended = np.random.default_rng(seed), np.zeros(episodes), np.zeros(episodes, dtype=bool)
    pool.reset()
    while not ended.all():
        _, rewards, terminated, truncated, _ = pool.step(rng.integers(15, size=episodes).astype(np.int32))
        totals += rewards * ~ended
        ended |= terminated | truncated
    return totals.tolist()


def main():
    Parser(__doc__).parse_args()
    warnings.filterwarnings("ignore", message=".*is out of date.*")
    mujoco.set_mju_user_warning(lambda message: None)
    scores = {}
    for task in [*TASKS["mujoco"], *TASKS["procgen"]]:
        returns = (random_game_returns if task in TASKS["procgen"] else random_returns)(task, EPISODES)
        scores[task] = dict(mean=round(float(np.mean(returns)), 3), std=round(float(np.std(returns)), 3))
        print(task, scores[task], flush=True)
    what = f"returns of {EPISODES} episodes of uniform actions, by benchmark/random_policy.py"
    (RESULTS / "random.json").write_text(json.dumps(dict(what=what, scores=scores), indent=1) + "\n")


if __name__ == "__main__":
    main()
