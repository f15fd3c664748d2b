"""Train SAC or TD3, the paper's off-policy baselines: Stable-Baselines3's code with CleanRL's settings.

    python benchmark/off_policy.py --algorithm sac --env-id Hopper-v4 --total-timesteps 1000000

Logs what the training scripts log, into a folder of the same kind. There are no checkpoints: a run that was stopped
starts again from the beginning.
"""

import argparse
import sys

from common import ROOT, Parser, fail, positive

sys.path.insert(0, str(ROOT))

# isort: split
from vsop_continuous import Progress, RunArgs, check, make_env, open_run, say

# isort: split
import gymnasium as gym
import numpy as np
import torch
from stable_baselines3 import SAC, TD3
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.noise import NormalActionNoise
from torch.utils.tensorboard import SummaryWriter

# The defaults of CleanRL's sac_continuous_action.py and td3_continuous_action.py, which the paper uses. Actions are
# scaled to [-1, 1] in Stable-Baselines3, so that noise is in the same units. Both bootstrap at time limits.
SHARED = dict(
    buffer_size=1_000_000, batch_size=256, gamma=0.99, tau=0.005, train_freq=1, gradient_steps=1, learning_rate=3e-4,
)  # fmt: skip
WIDTHS = [256, 256]  # of the hidden layers
# What stays Stable-Baselines3's: the actor learns once in every step (CleanRL: twice in every second step), and the
# logarithm of its standard deviation is clipped to [-20, 2] (CleanRL: squashed into [-5, 2]).
SAC_SETTINGS = dict(learning_starts=5_000, ent_coef="auto", target_entropy="auto", target_update_interval=1)
SAC_CRITIC_LEARNING_RATE = 1e-3  # also that of the entropy coefficient
TD3_SETTINGS = dict(learning_starts=25_000, policy_delay=2, target_policy_noise=0.2, target_noise_clip=0.5)
TD3_EXPLORATION_NOISE = 0.1
LOG_EVERY = 1000  # steps


def parse(argv=None):
    parser = Parser(__doc__)
    add = parser.add_argument
    add("--algorithm", choices=("sac", "td3"), required=True, help="which to train")
    add("--env-id", default="Hopper-v4", help="Gymnasium id of a task with continuous actions (default: Hopper-v4)")
    add("--seed", type=int, default=1, help="seed of the task, the initial weights and all sampling (default: 1)")
    add("--total-timesteps", type=positive, default=1_000_000, help="environment steps (default: 1000000)")
    add("--cuda", action=argparse.BooleanOptionalAction, default=False, help="train on a GPU")
    args = parser.parse_args(argv)
    if not 0 <= args.seed < 2**32:
        fail(f"--seed must be in [0, 2^32), got {args.seed}")
    return args


def make_model(args, env):
    device = "cuda" if args.cuda and torch.cuda.is_available() else "cpu"
    options = SHARED | dict(policy_kwargs=dict(net_arch=WIDTHS), env=env, seed=args.seed, device=device)
    if args.algorithm == "td3":
        dimensions = env.action_space.shape
        noise = NormalActionNoise(np.zeros(dimensions), np.full(dimensions, TD3_EXPLORATION_NOISE))
        return TD3("MlpPolicy", action_noise=noise, **TD3_SETTINGS, **options)
    model = SAC("MlpPolicy", **SAC_SETTINGS, **options)

    def set_rate(optimizer, args, kwargs):
        for group in optimizer.param_groups:
            group["lr"] = SAC_CRITIC_LEARNING_RATE

    # Stable-Baselines3 sets one learning rate for all optimizers before each update.
    for optimizer in (model.critic.optimizer, model.ent_coef_optimizer):
        optimizer.register_step_pre_hook(set_rate)
    return model


class Log(BaseCallback):
    """Writes the tags of the training scripts and shows the progress."""

    def __init__(self, writer: SummaryWriter, total: int):
        super().__init__()
        self.writer, self.progress, self.total = writer, Progress(total), total

    def _on_step(self):
        step = self.num_timesteps
        for info in self.locals["infos"]:
            if "episode" in info:
                self.progress.returns.append(info["episode"]["r"])
                self.writer.add_scalar("charts/episodic_return", info["episode"]["r"], step)
                self.writer.add_scalar("charts/episodic_length", info["episode"]["l"], step)
        if step % LOG_EVERY == 0 or step == self.total:
            self.writer.add_scalar("charts/SPS", self.progress.update(step), step)
            for name in ("actor_loss", "critic_loss", "ent_coef"):
                if (x := self.logger.name_to_value.get(f"train/{name}")) is not None:
                    self.writer.add_scalar(f"losses/{name}", x, step)
        return True


def main():
    args = parse()
    run = RunArgs(env_id=args.env_id, seed=args.seed, exp_name=args.algorithm)
    check(run)
    torch.set_num_threads(1)
    env = gym.wrappers.DtypeObservation(make_env(run), np.float32)  # half the memory, as in CleanRL
    if not env.action_space.is_bounded():
        fail(f"--env-id: {args.env_id} has actions without bounds")
    run_dir, _lock = open_run(run)
    with SummaryWriter(str(run_dir)) as writer:
        log = Log(writer, args.total_timesteps)
        say(f"{run_dir}: {args.algorithm.upper()} on {args.env_id}")
        make_model(args, env).learn(args.total_timesteps, callback=log, log_interval=None)
        log.progress.bar.close()
    returns = log.progress.returns
    say(f"{run_dir}: mean return of the last {len(returns)} episodes {np.mean(returns or np.nan):.2f}")


if __name__ == "__main__":
    main()
