# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "PyQt5-Qt5==5.15.19",
#     "envpool==1.2.5",
#     "gymnasium[mujoco]==1.4.0",
#     "moviepy==2.2.1",
#     "mujoco==4.0.0",
#     "numpy==2.4.6",
#     "tensorboard==2.21.0",
#     "torch==2.13.0",
#     "tqdm==4.70.1",
#     "tyro==1.0.16",
#     "wandb==0.31.0",
# ]
# ///
"""PPO: proximal policy optimization, for the games of ProcGen. The baseline of VSOP's paper.

    J = E[ min(rho h(s, a), clip(rho, 1 - eps, 1 + eps) h(s, a)) ],   rho = pi(a | s, theta) / pi(a | s, theta_old)

It trains on 200 levels of a game and is tested beside on levels that it has not seen.

    python ppo_procgen.py --env-id starpilot

Schulman et al., "Proximal Policy Optimization Algorithms" (2017), with the settings of the paper "ReLU to the Rescue:
Improve Your On-Policy Actor-Critic with Positive Advantages" (ICML 2024), appendix "Implementation Details".
"""

import argparse
import ctypes
import difflib
import fcntl
import io
import math
import os
import signal
import sys
import threading
import time
import zipfile
from collections import deque
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
import torch.nn as nn
import tyro
from torch.func import functional_call, grad
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm


def fail(message: str, code: int = 2):
    print(f"error: {message}", file=sys.stderr)
    sys.exit(code)


GAMES = """bigfish bossfight caveflyer chaser climber coinrun dodgeball fruitbot heist jumper leaper maze miner ninja
plunder starpilot""".split()
FEATURES, WIDTH = 2048, 256  # units before and after the hidden layer


@dataclass
class Args:
    exp_name: str = Path(__file__).stem
    """name of the experiment, part of the run's folder name"""
    env_id: str = "starpilot"
    """name of one of the sixteen games"""
    distribution_mode: Literal["easy", "hard"] = "easy"
    """difficulty of the levels"""
    num_levels: int = 200
    """levels to train on; the test is on all there are"""
    seed: int = 1
    """seed of the environments, the initial weights and all sampling"""
    total_timesteps: int = 25_000_000
    """environment steps to train for, over all environments"""
    num_envs: int = 64
    """environments stepped side by side"""
    num_steps: int = 256
    """steps of each environment per rollout"""
    learning_rate: float = 5e-4
    """learning rate of the optimizer"""
    anneal_lr: bool = False
    """anneal the learning rate linearly to 0 over total_timesteps"""
    gamma: float = 0.999
    """discount factor"""
    gae_lambda: float = 0.95
    """lambda of generalized advantage estimation"""
    num_minibatches: int = 8
    """minibatches per epoch"""
    update_epochs: int = 3
    """epochs over each rollout"""
    max_grad_norm: float = 0.5
    """clip the norm of the gradient to this"""
    clip_coef: float = 0.2
    """epsilon: how far the probability ratio, and a clipped value, may move from the old one"""
    norm_adv: bool = True
    """normalize the advantages of each minibatch"""
    clip_vloss: bool = True
    """clip the critic's step as the policy's"""
    ent_coef: float = 1e-2
    """coefficient of the entropy bonus"""
    vf_coef: float = 0.5
    """coefficient of the critic's squared error"""
    norm_reward: bool = True
    """divide rewards by the running standard deviation of the discounted return"""
    bootstrap_truncated: bool = True
    """add gamma * v(final observation) at a time limit; --no-bootstrap-truncated takes it for an end, as published"""
    cuda: bool = True
    """use a GPU when there is one"""
    compile: bool = False
    """compile the update with torch.compile, on a GPU (on CPU it gains nothing)"""
    mixed_precision: bool = False
    """compute in bfloat16 where that is safe, on a GPU"""
    checkpoint_every: int = 20_480
    """environment steps between checkpoints, in runs/<run>/checkpoint.pt; SIGTERM and Ctrl-C leave one as well"""
    resume: Path | None = None
    """go on with the run in this folder, with its own arguments; only --total-timesteps, to extend it, and flags that
    do not touch the learning may be given beside it"""
    track: bool = False
    """track the run with Weights & Biases"""
    wandb_project_name: str = "vsop"
    """W&B project"""
    wandb_entity: str | None = None
    """W&B user or team"""

    @property
    def batch_size(self) -> int:
        return self.num_envs * self.num_steps

    @property
    def num_iterations(self) -> int:
        return self.total_timesteps // self.batch_size

    def __post_init__(self):
        def check(valid, names, meaning):
            for name in names.split():
                if not valid(getattr(self, name)):
                    fail(f"--{name.replace('_', '-')} must be {meaning}, got {getattr(self, name)}")

        check(lambda x: x >= 1, "num_envs num_steps num_minibatches update_epochs num_levels", "at least 1")
        check(lambda x: x >= 1, "checkpoint_every", "at least 1")
        check(lambda x: x >= 0, "seed", "at least 0")
        check(lambda x: 0 < x < math.inf, "learning_rate max_grad_norm clip_coef", "positive")
        check(lambda x: 0 <= x <= 1, "gamma gae_lambda", "in [0, 1]")
        check(lambda x: 0 <= x < math.inf, "ent_coef vf_coef", "at least 0")
        if self.env_id not in GAMES:
            near = difflib.get_close_matches(self.env_id, GAMES, n=3, cutoff=0.0)
            fail(f"unknown game {self.env_id!r}; the nearest names are {', '.join(near)}")
        if self.batch_size % self.num_minibatches:
            fail(f"a rollout of {self.batch_size} steps cannot be split into {self.num_minibatches} equal minibatches")
        if self.num_iterations < 1:
            fail(f"--total-timesteps {self.total_timesteps} is less than one rollout of {self.batch_size} steps")


# ---------------------------------------------------------------------------------------------------- environment


def make_envs(args, num_levels, seed):
    """EnvPool's ProcGen. It needs libraries of Qt 5, which the package PyQt5-Qt5 brings along, in this order."""
    try:
        files = {file.name: str(file.locate()) for file in metadata.files("PyQt5-Qt5") or ()}
        for name in ("libicudata", "libicuuc", "libicui18n", "libQt5Core", "libQt5Gui"):
            (path,) = [files[file] for file in files if file.startswith(f"{name}.so")]
            ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
        import envpool
    except (metadata.PackageNotFoundError, ImportError, OSError, ValueError) as error:
        reason = str(error).partition(chr(10))[0]
        fail(f"ProcGen cannot be loaded ({reason}): pip install -r requirements-procgen.txt")
    name = f"{args.env_id.capitalize()}{args.distribution_mode.capitalize()}-v0"
    options = dict(num_envs=args.num_envs, num_threads=torch.get_num_threads(), seed=seed, channel_first=False)
    return envpool.make(name, env_type="gymnasium", num_levels=num_levels, start_level=0, **options)


class RunningStats:
    """Mean and variance of everything passed to `update`, numbers or arrays, by Welford's method."""

    def __init__(self, zero):
        self.count, self.mean, self.m2 = 0, zero, zero

    def update(self, x):
        self.count += 1
        delta = x - self.mean
        self.mean = self.mean + delta / self.count
        self.m2 = self.m2 + delta * (x - self.mean)

    @property
    def std(self):
        return (self.m2 / max(self.count, 1) + 1e-8) ** 0.5

    def state_dict(self):
        mean, m2 = (torch.tensor(x, dtype=torch.float64) for x in (self.mean, self.m2))
        return dict(count=self.count, mean=mean, m2=m2)

    def load_state_dict(self, state):
        mean, m2 = (x.numpy() if x.ndim else x.item() for x in (state["mean"], state["m2"]))
        self.count, self.mean, self.m2 = state["count"], mean, m2


class Envs:
    """`num_envs` copies of a game, reset in the step that ends an episode, with rewards to normalize.

    EnvPool by itself resets in the step after that, whose action it ignores: a transition that never was."""

    def __init__(self, args, num_levels, seed):
        self.args, self.num_envs = args, args.num_envs
        self.pool = make_envs(args, num_levels, seed)
        self.num_actions = int(self.pool.action_space.n)
        self.return_stats = RunningStats(0.0)
        self.episodes = [(0.0, 0, 0.0)] * self.num_envs  # return, length and discounted return of those in progress
        self.global_step = 0
        self.finished = []  # (global step, return, length) of episodes that ended and are not logged yet
        self.obs, _ = self.pool.reset()  # what the policy acts on next

    def step(self, actions):
        """Observations the step led to (`self.obs` holds the new episode's where one ended), rewards, kinds of end."""
        next_obs, rewards, terminated, truncated, _ = self.pool.step(actions)
        self.global_step += self.num_envs
        self.obs = next_obs
        ended = np.flatnonzero(terminated | truncated)
        if len(ended):
            self.obs = next_obs.copy()
            self.obs[ended], _ = self.pool.reset(ended.astype(np.int32))
        return next_obs, rewards, terminated, truncated

    def score(self, rewards, terminated, truncated):
        """Divides each reward by the running standard deviation of the discounted return, and records the episodes that
        ended. In plain floats: a handful of numpy calls per step would cost as much as the policy's network."""
        ends = terminated | truncated
        # The authors' code treats a time limit as terminal for values, but not for the scale of rewards.
        restarts = ends if self.args.bootstrap_truncated else terminated
        scales, step = np.empty((len(rewards), 1)), self.global_step - rewards.size
        for t in range(len(rewards)):
            step += self.num_envs
            for i, reward in enumerate(rewards[t].tolist()):
                episode_return, length, discounted = self.episodes[i]
                episode_return, length = episode_return + reward, length + 1
                discounted = discounted * self.args.gamma + reward
                self.return_stats.update(discounted)
                if ends[t, i]:
                    self.finished.append((step, episode_return, length))
                    episode_return, length = 0.0, 0
                if restarts[t, i]:
                    discounted = 0.0
                self.episodes[i] = episode_return, length, discounted
            scales[t] = self.return_stats.std
        return (rewards / scales).clip(-10.0, 10.0) if self.args.norm_reward else rewards

    def state_dict(self):
        return dict(global_step=self.global_step, return_stats=self.return_stats.state_dict())

    def load_state_dict(self, state):
        """A game cannot be put back into the middle of an episode: those in progress have started anew."""
        self.global_step = state["global_step"]
        self.return_stats.load_state_dict(state["return_stats"])

    def close(self):
        self.pool.close()


# ---------------------------------------------------------------------------------------------------------- agent


def init_layer(layer: nn.Linear, gain: float) -> nn.Linear:
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


class ResidualBlock(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(channels, channels, 3, padding=1) for _ in range(2))

    def forward(self, x):
        first, second = self.convs
        return second(first(x.relu()).relu_()).add_(x)


class Agent(nn.Module):
    """The network of IMPALA (Espeholt et al., 2018), shared by actor and critic up to their last layers."""

    def __init__(self, envs, args):
        super().__init__()
        layers, channels = [], 3
        for out in (16, 32, 32):
            layers += [nn.Conv2d(channels, out, 3, padding=1), nn.MaxPool2d(3, stride=2, padding=1)]
            layers += [ResidualBlock(out), ResidualBlock(out)]
            channels = out
        self.convs = nn.Sequential(*layers)
        self.hidden = nn.Linear(FEATURES, WIDTH)
        self.actor = init_layer(nn.Linear(WIDTH, envs.num_actions), 0.01)
        self.critic = init_layer(nn.Linear(WIDTH, 1), 1.0)
        self.to(memory_format=torch.channels_last)  # on CPU twice as fast to train and three times to act

    def forward(self, frames):
        """Logits and values of frames as EnvPool gives them: bytes, channels last."""
        x = frames.permute(0, 3, 1, 2).float().div_(255.0)
        x = self.convs(x).relu_().flatten(1)
        x = torch.relu(self.hidden(x))
        return self.actor(x), self.critic(x).squeeze(-1)


def precision(args: Args, device: torch.device):
    return torch.autocast(device.type, torch.bfloat16, enabled=args.mixed_precision)


def part_size(device: torch.device) -> int:
    """Frames to pass through the network at once. On CPU the activations of so many stay in the cache, which is worth
    more than what a larger batch gains."""
    return 32 if device.type == "cpu" else 4096


@torch.no_grad()
def infer(agent: Agent, frames: torch.Tensor, args: Args):
    """Logits and values of any number of frames."""
    size = part_size(frames.device)
    with precision(args, frames.device):
        parts = [agent(part) for part in frames.split(size)]
    return [torch.cat(x).float() for x in zip(*parts)]


# ------------------------------------------------------------------------------------------------------- learning


class Rollout(NamedTuple):
    """Arrays of shape (num_steps, num_envs, ...). `final_obs` are the observations that a time limit cut off,
    by step and environment."""

    obs: torch.Tensor
    actions: np.ndarray
    logprobs: np.ndarray
    rewards: np.ndarray
    final_obs: dict
    terminated: np.ndarray
    truncated: np.ndarray


@torch.no_grad()
def collect(envs: Envs, test_envs: Envs, agent: Agent, args: Args, device: torch.device, obs: torch.Tensor) -> Rollout:
    """Act for num_steps, on the test levels beside it in the same batches. Writes observations into `obs`, bytes all
    the time."""
    steps, n = args.num_steps, args.num_envs
    actions = np.empty((2, steps, n), dtype=np.int32)
    logprobs, rewards = np.empty((2, steps, n))
    test_rewards = np.empty((steps, n))
    (terminated, truncated), test_ends = np.empty((2, 2, steps, n), dtype=bool)
    final_obs = {}
    for t in range(steps):
        obs[t].copy_(torch.as_tensor(envs.obs))
        frames = torch.as_tensor(np.concatenate([envs.obs, test_envs.obs])).to(device)
        logits, _ = infer(agent, frames, args)
        log_p = logits.log_softmax(-1)
        chosen = torch.multinomial(log_p.exp(), 1)
        actions[:, t] = chosen.view(2, n).cpu().numpy()
        logprobs[t] = log_p.gather(1, chosen)[:n, 0].cpu().numpy()
        next_obs, rewards[t], terminated[t], truncated[t] = envs.step(actions[0, t])
        for i in np.flatnonzero(truncated[t]) if args.bootstrap_truncated else ():
            final_obs[t, i] = next_obs[i]
        _, test_rewards[t], *test_ends[:, t] = test_envs.step(actions[1, t])
    rewards = envs.score(rewards, terminated, truncated)
    test_envs.score(test_rewards, *test_ends)
    return Rollout(obs, actions[0], logprobs, rewards, final_obs, terminated, truncated)


def gae(rewards, values, next_values, ends, gamma, gae_lambda):
    """Generalized advantage estimation; `next_values` is 0 after a terminal step, and no sum crosses an end."""
    deltas = rewards + gamma * next_values - values
    decays = gamma * gae_lambda * ~ends
    advantages = np.empty_like(deltas)
    advantage = np.zeros(deltas.shape[1])
    for t in reversed(range(len(deltas))):
        advantage = advantages[t] = deltas[t] + decays[t] * advantage
    return advantages


class Batch(NamedTuple):
    """A rollout, or a minibatch of it, as tensors with one row per step."""

    obs: torch.Tensor
    actions: torch.Tensor
    logprobs: torch.Tensor
    advantages: torch.Tensor
    returns: torch.Tensor
    values: torch.Tensor
    next_values: torch.Tensor


@torch.no_grad()
def estimate(agent: Agent, rollout: Rollout, envs: Envs, args: Args, device: torch.device) -> Batch:
    """Advantages and targets from the critic as it is before the update."""
    steps, n = rollout.rewards.shape
    obs = rollout.obs.flatten(0, 1)
    # What the rollout ended on, and what a time limit cut off.
    others = torch.as_tensor(np.array([*envs.obs, *rollout.final_obs.values()]), device=device)
    values = torch.cat([infer(agent, frames, args)[1] for frames in (obs, others)])
    values = values.cpu().numpy()
    values, other_values = values[: len(obs)].reshape(steps, n), values[len(obs) :]
    next_values = np.concatenate([values[1:], other_values[None, :n]])
    ends = rollout.terminated | rollout.truncated
    next_values[ends] = 0.0
    for (t, i), value in zip(rollout.final_obs, other_values[n:]):
        next_values[t, i] = value
    advantages = gae(rollout.rewards, values, next_values, ends, args.gamma, args.gae_lambda)
    actions = torch.tensor(rollout.actions.ravel(), dtype=torch.int64, device=device)
    columns = (rollout.logprobs, advantages, advantages + values, values, next_values)
    columns = (torch.tensor(x.ravel(), dtype=torch.float32, device=device) for x in columns)
    return Batch(obs, actions, *columns)


def minibatches(batch: Batch, args: Args):
    """Shuffled minibatches for one epoch."""
    for rows in torch.randperm(args.batch_size, device=batch.obs.device).chunk(args.num_minibatches):
        yield Batch(*(x[rows] for x in batch))


def ppo_policy_loss(ratio, advantages, clip_coef):
    return -torch.min(ratio * advantages, ratio.clamp(1 - clip_coef, 1 + clip_coef) * advantages).mean()


def ppo_value_loss(values, old_values, returns, clip_coef):
    clipped = old_values + (values - old_values).clamp(-clip_coef, clip_coef)
    return 0.5 * torch.max((values - returns) ** 2, (clipped - returns) ** 2).mean()


def loss_function(agent: Agent, minibatch: Batch, args: Args):
    with precision(args, minibatch.obs.device):
        logits, values = agent(minibatch.obs)
    log_p = logits.float().log_softmax(-1)
    logratio = log_p.gather(1, minibatch.actions.unsqueeze(1)).squeeze(1) - minibatch.logprobs
    ratio = logratio.exp()
    policy_loss = ppo_policy_loss(ratio, minibatch.advantages, args.clip_coef)
    value_clip = args.clip_coef if args.clip_vloss else math.inf
    value_loss = ppo_value_loss(values.float(), minibatch.values, minibatch.returns, value_clip)
    entropy = -(log_p.exp() * log_p).sum(-1).mean()
    loss = policy_loss + args.vf_coef * value_loss - args.ent_coef * entropy
    approx_kl = (ratio - 1 - logratio).mean()
    clipfrac = ((ratio - 1).abs() > args.clip_coef).float().mean()
    stats = dict(policy_loss=policy_loss, value_loss=value_loss, entropy=entropy, approx_kl=approx_kl)
    return loss, stats | dict(clipfrac=clipfrac)


def gradients(agent: Agent, minibatch: Batch, args: Args):
    """The clipped gradient of a minibatch, by parameter, and means over it."""
    if args.norm_adv:  # over the whole minibatch, not part by part
        advantages = minibatch.advantages
        minibatch = minibatch._replace(advantages=(advantages - advantages.mean()) / (advantages.std() + 1e-8))
    parameters = dict(agent.named_parameters())

    def loss(parameters, part):
        return loss_function(lambda *inputs: functional_call(agent, parameters, inputs), part, args)

    grads, stats = {}, {}
    for columns in zip(*(x.split(part_size(x.device)) for x in minibatch)):
        part, share = Batch(*columns), len(columns[0]) / len(minibatch.obs)
        part_grads, part_stats = grad(loss, has_aux=True)(parameters, part)
        for total, of_part in ((grads, part_grads), (stats, part_stats)):
            for name, x in of_part.items():
                total[name] = total.get(name, 0.0) + share * x
    stats["grad_norm"] = norm = torch.stack([x.square().sum() for x in grads.values()]).sum().sqrt()
    scale = (args.max_grad_norm / (norm + 1e-6)).clamp(max=1.0)
    return [x * scale for x in grads.values()], stats


def make_optimizer(agent: Agent, args: Args) -> torch.optim.Optimizer:
    return torch.optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5, fused=True)


@torch.no_grad()  # compiled code that is called without autograd around it costs a tenth less
def update(agent: Agent, optimizer: torch.optim.Optimizer, gradients, minibatch: Batch, args: Args) -> dict:
    grads, stats = gradients(agent, minibatch, args)
    for parameter, x in zip(optimizer.param_groups[0]["params"], grads):
        parameter.grad = x
    optimizer.step()
    return {name: x.clone() for name, x in stats.items()}  # on a GPU the next call overwrites them


# ------------------------------------------------------------------------------------------------ results of a run


@torch.no_grad()
def mechanisms(agent: Agent, batch: Batch, step: int, args: Args) -> dict:
    """What VSOP's mechanisms act on: the share of positive advantages, and the additive term C_pi of Theorem 3.1."""
    c_pi = torch.relu(args.gamma * batch.next_values - batch.values).mean()
    return dict(positive_advantages=(batch.advantages > 0).float().mean(), c_pi=c_pi)


@torch.no_grad()
def log(writer: SummaryWriter, step: int, agent: Agent, batch: Batch, stats: list, args: Args):
    for name in stats[0]:
        writer.add_scalar(f"losses/{name}", torch.stack([x[name] for x in stats]).mean().item(), step)
    writer.add_scalar("losses/explained_variance", (1 - batch.advantages.var() / batch.returns.var()).item(), step)
    for name, value in mechanisms(agent, batch, step, args).items():
        writer.add_scalar(f"vsop/{name}", value.item(), step)
    writer.add_histogram("vsop/advantages", batch.advantages, step)
    writer.add_histogram("vsop/relu_advantages", batch.advantages.relu(), step)
    norm = torch.linalg.matrix_norm(agent.hidden.weight, 2).item()
    writer.add_scalar("spectral_norm/hidden", norm, step)


def not_finite(rollout: Rollout, stats: list) -> str | None:
    """What went wrong first in an iteration, if anything did."""
    if not np.isfinite(rollout.rewards).all():
        return "a reward"
    if torch.stack([x["grad_norm"] for x in stats]).isfinite().all():
        return None
    return next(name for x in stats for name, value in x.items() if not value.isfinite())


# ------------------------------------------------------------------------------------------------ files of a run


def write(path: Path, content: dict):
    """All of it or nothing: a crash or a full disk leaves the file that was there before."""
    buffer, part = io.BytesIO(), path.with_suffix(".part")
    torch.save(content, buffer)
    try:
        with open(part, "wb") as file:
            file.write(buffer.getbuffer())
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except OSError:
        part.unlink(missing_ok=True)
        raise


def save_policy(path: Path, agent: Agent, args: Args):
    """All it takes to act: the weights."""
    weights = {name: x.cpu().clone() for name, x in agent.state_dict().items()}
    policy = dict(script=Path(__file__).stem, env_id=args.env_id, args=settings(args), weights=weights)
    write(path, policy)


def settings(args: Args) -> dict:
    """The arguments that make a run what it is."""
    return {name: x for name, x in asdict(args).items() if name != "resume"}


CHECKPOINT_VERSION = 1


def event_files(run_dir: Path) -> dict:
    return {path.name: path.stat().st_size for path in run_dir.glob("events.out.tfevents.*")}


def save_checkpoint(run_dir: Path, iteration: int, agent, optimizer, envs: Envs, progress, writer, args: Args):
    """All it takes to go on as if nothing had happened."""
    writer.flush()
    state = dict(version=CHECKPOINT_VERSION, script=Path(__file__).stem, args=settings(args), step=envs.global_step)
    state |= dict(agent=agent.state_dict(), optimizer=optimizer.state_dict())
    state |= dict(envs=envs.state_dict(), random=torch.get_rng_state(), events=event_files(run_dir))
    state |= dict(iteration=iteration, seconds=progress.seconds(), returns=list(progress.returns))
    state |= dict(test_returns=list(progress.test_returns))
    if torch.cuda.is_available():
        state["random_cuda"] = torch.cuda.get_rng_state_all()
    write(run_dir / "checkpoint.pt", state)


def load_checkpoint(run_dir: Path) -> dict:
    path, script = run_dir / "checkpoint.pt", Path(__file__).stem
    if not path.is_file():
        fail(f"{run_dir} holds no checkpoint.pt to resume from")
    try:
        damaged = zipfile.ZipFile(path).testzip()  # torch does not look at the checksums
        state = torch.load(path, weights_only=True, map_location="cpu")
        version, owner, args = state["version"], state["script"], dict(state["args"])
    except Exception as error:  # a file that is none of ours may raise anything
        fail(f"{path} is no checkpoint or is damaged ({type(error).__name__})")
    if damaged:
        fail(f"{path} is damaged: the checksum of {damaged} is wrong")
    if version != CHECKPOINT_VERSION:
        fail(f"{path} has version {version} of the format, this script reads version {CHECKPOINT_VERSION}")
    if owner != script:
        fail(f"{path} is of {owner}.py, not of {script}.py")
    if unknown := args.keys() ^ settings(Args()).keys():
        fail(f"{path} is of another version of {script}.py, which differs in {', '.join(sorted(unknown))}")
    return state


def restore(state: dict, run_dir: Path, agent: Agent, optimizer, envs: Envs):
    try:
        agent.load_state_dict(state["agent"])
        optimizer.load_state_dict(state["optimizer"])
        envs.load_state_dict(state["envs"])
        if "random_cuda" in state and torch.cuda.is_available():
            torch.cuda.set_rng_state_all(state["random_cuda"])
        torch.set_rng_state(state["random"])
        for name in event_files(run_dir):  # what was logged after the checkpoint will be logged again
            if name in state["events"]:
                os.truncate(run_dir / name, state["events"][name])
            else:
                (run_dir / name).unlink()
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:200]
        fail(f"{run_dir / 'checkpoint.pt'} does not fit the run: {type(error).__name__}: {reason}")


def stop(run_dir: Path, reason: str):
    """Ends a run that went wrong."""
    path, known = run_dir / "checkpoint.pt", "there is none"
    if path.exists():
        known = f"the last good one is {path} of step {load_checkpoint(run_dir)['step']}"
    fail(f"{reason}; no checkpoint was written, {known}", code=1)


def average(returns) -> float:
    return float(np.mean(returns)) if returns else math.nan


class Progress:
    """A progress bar on a terminal, elsewhere a line every half minute."""

    def __init__(self, total: int, step: int, seconds: float, returns: list, test_returns: list):
        self.test_returns = deque(test_returns, maxlen=100)
        self.returns, self.rate, self.start = deque(returns, maxlen=100), 0.0, time.time() - seconds
        self.next_line = time.time() + 30
        options = dict(unit="step", unit_scale=True, file=sys.stdout, disable=not sys.stdout.isatty())
        self.bar = tqdm(total=total, initial=step, **options)

    def seconds(self) -> float:
        return time.time() - self.start

    def update(self, step: int):
        self.rate = step / self.seconds()
        results = f"return {average(self.returns):.2f}  test {average(self.test_returns):.2f}"
        self.bar.set_postfix_str(results, refresh=False)
        self.bar.update(step - self.bar.n)
        if self.bar.disable and time.time() > self.next_line:
            left = time.strftime("%H:%M:%S", time.gmtime((self.bar.total - step) / self.rate))
            progress = f"step {step}/{self.bar.total}  {self.rate:.0f} steps/s"
            print(f"{progress}  {results}  {left} left", flush=True)
            self.next_line = time.time() + 30


def make_run_dir(args: Args) -> Path:
    stamp = int(time.time())
    while True:
        run_dir = Path("runs", f"{args.env_id}__{args.exp_name}__{args.seed}__{stamp}".replace("/", "-"))
        try:
            run_dir.mkdir(parents=True)
            return run_dir
        except FileExistsError:  # a run of the same name that started in the same second
            stamp += 1
        except OSError as error:
            fail(f"cannot write to the runs folder: {error}")


@contextmanager
def run_folder(args: Args):
    """A new folder, or the one to go on in. A second process in it would ruin its files: the lock keeps it out, and
    goes with the process however that ends."""
    run_dir = args.resume or make_run_dir(args)
    with open(run_dir / ".lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            fail(f"another process is training in {run_dir}")
        hook = threading.excepthook
        threading.excepthook = lambda error: None  # TensorBoard writes in a thread; its error comes up in the next call
        try:
            yield run_dir
        except OSError as error:
            stop(run_dir, f"the run cannot go on: {error.strerror or error}")
        finally:
            threading.excepthook = hook


@contextmanager
def caught_signals():
    """SIGINT and SIGTERM as they come in, to be heeded when the iteration is over; the second one ends the program."""
    numbers = []

    def handler(number, frame):
        numbers.append(number)
        signal.signal(number, signal.SIG_DFL)

    before = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield numbers
    finally:
        for number in before:
            signal.signal(number, before[number])


def compiled(function, device: torch.device):
    """The function compiled, or as it is where that fails: without a working C++ compiler, for example."""
    torch.compiler.reset()  # of what an earlier run in the same process compiled
    options = dict(mode="reduce-overhead")
    if device.type == "cpu":
        # Kernels and the calls to them as two files: gcc takes 20 s for both in one, and 8 s for the two.
        settings = {"cpp_wrapper": True, "cpp_wrapper_build_separate": True, "cpp_cache_precompile_headers": False}
        options = dict(options=settings)
    current = torch.compile(function, dynamic=False, fullgraph=True, **options)

    def call(*inputs):
        nonlocal current
        try:
            return current(*inputs)
        except Exception as error:  # the compiler and its caches may raise anything
            if current is function:
                raise
            reason = str(error).strip().partition("\n")[0][:200]
            print(f"compilation failed, continuing uncompiled at about half the speed: {reason}", file=sys.stderr)
            current = function
            return current(*inputs)

    return call


def parse_args() -> Args:
    """From the command line. With --resume they are the run's, and what is given beside it must not contradict them."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--resume", type=Path)
    run_dir = parser.parse_known_args()[0].resume
    if run_dir is None:
        return tyro.cli(Args)
    try:
        of_run = Args(**load_checkpoint(run_dir)["args"])
    except TypeError as error:
        fail(f"{run_dir / 'checkpoint.pt'} has arguments of the wrong type: {error}")
    args = tyro.cli(Args, default=of_run)
    free = "total_timesteps checkpoint_every cuda compile mixed_precision track".split()
    for name, value in settings(of_run).items():
        if name not in (*free, "wandb_project_name", "wandb_entity") and (given := getattr(args, name)) != value:
            fail(f"--{name.replace('_', '-')} {given} contradicts {run_dir}, which has {value}")
    return args


def train(args: Args) -> Path:
    torch.manual_seed(args.seed)
    device = torch.device("cuda" if args.cuda and torch.cuda.is_available() else "cpu")
    for name in ("compile", "mixed_precision"):
        if getattr(args, name) and device.type == "cpu":
            fail(f"--{name.replace('_', '-')} is for a GPU, and this run would be on CPU")
    make_envs(args, args.num_levels, args.seed).close()  # what is not installed ends the program here
    with run_folder(args) as run_dir, caught_signals() as signals:
        start = dict(iteration=0, seconds=0.0, returns=[], test_returns=[])
        saved = load_checkpoint(run_dir) if args.resume else start
        if args.num_iterations < saved["iteration"]:
            fail(f"--total-timesteps {args.total_timesteps}: {run_dir} has {saved['step']} behind it already")
        if args.track:
            import wandb

            project = dict(
                project=args.wandb_project_name, entity=args.wandb_entity, name=run_dir.name, id=run_dir.name
            )
            try:
                wandb.init(**project, resume="allow", config=settings(args), sync_tensorboard=True, save_code=True)
            except wandb.errors.Error as error:
                fail(f"cannot track with W&B: {str(error).partition(chr(10))[0]} (WANDB_MODE=offline needs no account)")
        # The same for a run and for its resumption would play the first episodes once more.
        seeds = np.random.SeedSequence([args.seed, saved["iteration"]]).generate_state(2) >> 1
        envs, test_envs = Envs(args, args.num_levels, int(seeds[0])), Envs(args, 0, int(seeds[1]))
        agent = Agent(envs, args).to(device)
        optimizer = make_optimizer(agent, args)
        if args.resume:
            restore(saved, run_dir, agent, optimizer, envs)
        test_envs.global_step = envs.global_step
        gradients_of = compiled(gradients, device) if args.compile else gradients
        counters = (saved[name] for name in ("seconds", "returns", "test_returns"))
        progress = Progress(args.num_iterations * args.batch_size, envs.global_step, *counters)
        writer = SummaryWriter(str(run_dir))
        if not args.resume:
            rows = "\n".join(f"|{name}|{value}|" for name, value in settings(args).items())
            writer.add_text("hyperparameters", f"|param|value|\n|-|-|\n{rows}")
            save_checkpoint(run_dir, 0, agent, optimizer, envs, progress, writer, args)
        obs = torch.empty((args.num_steps, *envs.obs.shape), dtype=torch.uint8, device=device)

        for iteration in range(saved["iteration"] + 1, args.num_iterations + 1):
            if args.anneal_lr:
                optimizer.param_groups[0]["lr"] = args.learning_rate * (1 - (iteration - 1) / args.num_iterations)
            rollout = collect(envs, test_envs, agent, args, device, obs)
            batch = estimate(agent, rollout, envs, args, device)
            stats = []
            for _ in range(args.update_epochs):
                for minibatch in minibatches(batch, args):
                    stats.append(update(agent, optimizer, gradients_of, minibatch, args))
            if name := not_finite(rollout, stats):
                stop(run_dir, f"{name} is not finite at step {envs.global_step}")

            for played, tag, returns in (
                (envs, "charts", progress.returns),
                (test_envs, "test", progress.test_returns),
            ):
                for step, episode_return, episode_length in played.finished:
                    writer.add_scalar(f"{tag}/episodic_return", episode_return, step)
                    writer.add_scalar(f"{tag}/episodic_length", episode_length, step)
                    returns.append(episode_return)
                played.finished.clear()
            progress.update(envs.global_step)
            if progress.returns and progress.test_returns:
                gap = average(progress.returns) - average(progress.test_returns)
                writer.add_scalar("test/gap", gap, envs.global_step)
            writer.add_scalar("charts/learning_rate", optimizer.param_groups[0]["lr"], envs.global_step)
            writer.add_scalar("charts/SPS", progress.rate, envs.global_step)
            log(writer, envs.global_step, agent, batch, stats, args)
            if (
                iteration == args.num_iterations
                or signals
                or envs.global_step % args.checkpoint_every < args.batch_size
            ):
                save_checkpoint(run_dir, iteration, agent, optimizer, envs, progress, writer, args)
                save_policy(run_dir / "policy.pt", agent, args)
            if signals:
                print(f"stopped at step {envs.global_step}, to go on: --resume {run_dir}", file=sys.stderr)
                sys.exit(128 + signals[0])

        progress.bar.close()
        envs.close()
        test_envs.close()
        writer.close()
    if args.track:
        wandb.finish()
    for kind, returns in (("training", progress.returns), ("test", progress.test_returns)):
        print(f"{run_dir}: mean return of the last {len(returns)} {kind} episodes {average(returns):.2f}")
    return run_dir


if __name__ == "__main__":
    train(parse_args())
