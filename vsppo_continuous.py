# /// script
# requires-python = ">=3.11"
# dependencies = [
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
"""VSPPO: PPO with VSOP's spectral norm and dropout posterior, for continuous actions.

    J = E[ min(rho h(s, a), clip(rho, 1 - eps, 1 + eps) h(s, a)) ],   rho = pi(a | s, theta) / pi(a | s, theta_old)

where theta_old is the draw of the actor that acted (Thompson sampling) and theta ~ q(theta | theta_hat, p) a new one.

    python vsppo_continuous.py --env-id Humanoid-v4

Paper: "ReLU to the Rescue: Improve Your On-Policy Actor-Critic with Positive Advantages" (ICML 2024), appendix
"Spectral Normalization and Thompson Sampling May Improve PPO". Line numbers in comments are those of Algorithm 1.
"""

import argparse
import difflib
import fcntl
import io
import math
import os
import signal
import sys
import threading
import time
import warnings
import zipfile
from collections import deque
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

# Matrices of this size gain nothing from more threads, and runs side by side would fight over the cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
import tyro
from torch.func import functional_call, grad
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm


def fail(message: str, code: int = 2):
    print(f"error: {message}", file=sys.stderr)
    sys.exit(code)


@dataclass
class Args:
    exp_name: str = Path(__file__).stem
    """name of the experiment, part of the run's folder name"""
    env_id: str = "HalfCheetah-v4"
    """Gymnasium id of a task with continuous actions"""
    seed: int = 1
    """seed of the environments, the initial weights and all sampling"""
    total_timesteps: int = 3_000_000
    """environment steps to train for, over all environments"""
    num_envs: int = 1
    """environments stepped side by side"""
    num_steps: int = 2048
    """steps of each environment per rollout"""
    learning_rate: float = 2.5e-4
    """learning rate of the optimizer"""
    anneal_lr: bool = True
    """anneal the learning rate linearly to 0 over total_timesteps"""
    gamma: float = 0.99
    """discount factor"""
    gae_lambda: float = 0.89
    """lambda of generalized advantage estimation"""
    num_minibatches: int = 64
    """minibatches per epoch"""
    update_epochs: int = 9
    """epochs over each rollout"""
    max_grad_norm: float = 2.1
    """clip the norm of the gradient to this"""
    clip_coef: float = 0.2
    """epsilon: how far the probability ratio, and a clipped value, may move from the old one"""
    norm_adv: bool = True
    """normalize the advantages of each minibatch"""
    clip_vloss: bool = True
    """clip the critic's step as the policy's"""
    ent_coef: float = 0.0
    """coefficient of the entropy bonus"""
    vf_coef: float = 0.5
    """coefficient of the critic's squared error"""
    width: int = 256
    """units in each of the two hidden layers"""
    dropout_rate: float = 0.035
    """p: probability of dropping a hidden unit; also sets the weight decay, (1 - p) / (2 * num_steps * num_envs)"""
    spectral_norm: bool = True
    """divide the hidden layers by their spectral norm (ablation: --no-spectral-norm)"""
    thompson: bool = True
    """act, and estimate advantages, with samples of the weights and not with their mean (ablation: --no-thompson)"""
    norm_obs: bool = True
    """normalize observations by their running mean and variance"""
    norm_reward: bool = True
    """divide rewards by the running standard deviation of the discounted return"""
    bootstrap_truncated: bool = True
    """add gamma * v(final observation) at a time limit; --no-bootstrap-truncated takes it for an end, as published"""
    cuda: bool = False
    """compute gradients on a GPU; acting is always on the CPU, and networks this small rarely gain"""
    compile: bool = True
    """compile the update with torch.compile when a C++ compiler is installed"""
    checkpoint_every: int = 20_480
    """environment steps between checkpoints, in runs/<run>/checkpoint.pt; SIGTERM and Ctrl-C leave one as well"""
    resume: Path | None = None
    """go on with the run in this folder, with its own arguments; only --total-timesteps, to extend it, and flags that
    do not touch the learning may be given beside it"""
    capture_video: bool = False
    """film some episodes of the first environment into runs/<run>/videos"""
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

        check(lambda x: x >= 1, "num_envs num_steps num_minibatches update_epochs width", "at least 1")
        check(lambda x: x >= 1, "checkpoint_every", "at least 1")
        check(lambda x: x >= 0, "seed", "at least 0")
        check(lambda x: 0 < x < math.inf, "learning_rate max_grad_norm clip_coef", "positive")
        check(lambda x: 0 <= x <= 1, "gamma gae_lambda", "in [0, 1]")
        check(lambda x: 0 <= x < math.inf, "ent_coef vf_coef", "at least 0")
        check(lambda x: 0 <= x < 1, "dropout_rate", "in [0, 1)")
        if self.batch_size % self.num_minibatches:
            fail(f"a rollout of {self.batch_size} steps cannot be split into {self.num_minibatches} equal minibatches")
        if self.num_iterations < 1:
            fail(f"--total-timesteps {self.total_timesteps} is less than one rollout of {self.batch_size} steps")


# ---------------------------------------------------------------------------------------------------- environment


def make_env(env_id: str, video_dir: Path | None = None) -> gym.Env:
    warnings.filterwarnings("ignore", message=".*is out of date.*", category=DeprecationWarning)  # the -v4 tasks
    import mujoco

    def on_warning(message):  # MuJoCo 4 deprecates an attribute in Gymnasium's own model files
        if "settotalmass" not in str(message):
            print(message, file=sys.stderr)

    mujoco.set_mju_user_warning(on_warning)
    if env_id.startswith("dm_control/"):
        try:
            import shimmy

            gym.register_envs(shimmy)
        except ImportError:
            fail(f"{env_id} needs dm_control: pip install 'shimmy[dm-control]'")
    try:
        env = gym.make(env_id, disable_env_checker=True, **(dict(render_mode="rgb_array") if video_dir else {}))
    except gym.error.UnregisteredEnv:
        near = difflib.get_close_matches(env_id, gym.registry, n=3, cutoff=0.4)
        fail(f"unknown task {env_id!r}" + (f"; the nearest names are {', '.join(near)}" if near else ""))
    except Exception as error:  # whatever a task of a third party may raise
        fail(f"cannot make {env_id}: {type(error).__name__}: {str(error).partition(chr(10))[0]}")
    if not isinstance(env.action_space, gym.spaces.Box):
        fail(f"{env_id} has actions {env.action_space}, this script needs a Box of continuous actions")
    if not env.observation_space.is_np_flattenable:
        fail(f"{env_id} has observations {env.observation_space}, which cannot be flattened into a vector")
    if not isinstance(env.observation_space, gym.spaces.Box) or len(env.observation_space.shape) != 1:
        env = gym.wrappers.FlattenObservation(env)
    if video_dir:
        warnings.filterwarnings("ignore", message=".*Overwriting existing videos.*")  # names have the time in them
        env = gym.wrappers.RecordVideo(env, str(video_dir), name_prefix=f"{time.time():.0f}")
    return env


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
    """`num_envs` copies of a task, stepped in turn and reset in the step that ends an episode, with normalization.

    Written out because it is the hot loop: the usual stack of wrappers costs several times the simulation itself.
    """

    def __init__(self, args, run_dir):
        self.args, self.num_envs = args, args.num_envs
        videos = run_dir / "videos" if args.capture_video else None
        self.envs = [make_env(args.env_id, videos if i == 0 else None) for i in range(args.num_envs)]
        self.action_space = self.envs[0].action_space
        self.obs_dim = self.envs[0].observation_space.shape[0]
        self.action_dim = math.prod(self.action_space.shape)
        self.action_shape = (self.num_envs, *self.action_space.shape)
        self.low, self.high = (x.reshape(-1) for x in (self.action_space.low, self.action_space.high))
        self.obs_stats, self.return_stats = RunningStats(np.zeros(self.obs_dim)), RunningStats(0.0)
        self.episodes = [(0.0, 0, 0.0)] * self.num_envs  # return, length and discounted return of those in progress
        self.global_step = 0
        self.finished = []  # (global step, return, length) of episodes that ended and are not logged yet
        self.starts = [args.seed + i for i in range(self.num_envs)]  # seed, or state of the generator before the reset
        self.taken = [[] for _ in self.envs]  # the actions since: what it takes to play an episode again
        self.raw = np.array([env.reset(seed=seed)[0] for env, seed in zip(self.envs, self.starts)])
        self.obs = np.array([self.normalize(x) for x in self.raw])  # what the policy acts on next

    def normalize(self, raw):
        if not self.args.norm_obs:
            return raw.astype(np.float32)
        self.obs_stats.update(raw)
        return ((raw - self.obs_stats.mean) / self.obs_stats.std).clip(-10.0, 10.0).astype(np.float32)

    def step(self, actions):
        """Observations the step led to (`self.obs` holds the new episode's where one ended), rewards, kinds of end."""
        actions = actions.clip(self.low, self.high).reshape(self.action_shape)
        results = [env.step(action) for env, action in zip(self.envs, actions)]
        raw, rewards, terminated, truncated, _ = zip(*results)
        self.global_step += self.num_envs
        self.raw = np.array(raw)
        self.obs = next_obs = np.array([self.normalize(x) for x in self.raw])
        for taken, action in zip(self.taken, actions):
            taken.append(action)
        if any(terminated) or any(truncated):
            self.obs = next_obs.copy()
            self.reset([i for i in range(self.num_envs) if terminated[i] or truncated[i]])
        return next_obs, rewards, terminated, truncated

    def reset(self, ended):
        for i in ended:
            self.starts[i] = self.envs[i].unwrapped.np_random.bit_generator.state
            self.taken[i] = []
            self.raw[i], _ = self.envs[i].reset()
            self.obs[i] = self.normalize(self.raw[i])

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
        state = {name: getattr(self, name) for name in ("episodes", "global_step", "starts")}
        state |= {name: getattr(self, name).state_dict() for name in ("obs_stats", "return_stats")}
        state |= {name: torch.tensor(getattr(self, name)) for name in ("raw", "obs")}
        return state | dict(taken=[torch.tensor(np.array(taken)) for taken in self.taken])

    def load_state_dict(self, state):
        """Plays the episodes in progress again: a simulator's saved state alone is not exact for all tasks."""
        for name in ("obs_stats", "return_stats"):
            getattr(self, name).load_state_dict(state[name])
        for name in ("raw", "obs"):
            setattr(self, name, state[name].numpy())
        self.episodes, self.global_step, self.starts = state["episodes"], state["global_step"], state["starts"]
        self.taken = [list(taken.numpy()) for taken in state["taken"]]
        for i, (env, start) in enumerate(zip(self.envs, self.starts)):
            if isinstance(start, int):
                raw, _ = env.reset(seed=start)
            else:
                env.unwrapped.np_random.bit_generator.state = start
                raw, _ = env.reset()
            for action in self.taken[i]:
                raw, *_ = env.step(action)
            if not np.array_equal(raw, self.raw[i]):
                print(f"{self.args.env_id} does not repeat itself: an episode in progress starts anew", file=sys.stderr)
                self.episodes[i] = (0.0, 0, 0.0)
                self.reset([i])

    def close(self):
        for env in self.envs:
            env.close()


# ---------------------------------------------------------------------------------------------------------- agent


def init_layer(layer: nn.Linear, gain: float) -> nn.Linear:
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


class SpectralLinear(nn.Linear):
    """A linear layer divided by its spectral norm, sigma = u'Wv, u and v by power iteration (Miyato et al., 2018)."""

    def __init__(self, in_features, out_features):
        super().__init__(in_features, out_features)
        self.register_buffer("u", F.normalize(torch.randn(out_features), dim=0))
        self.register_buffer("v", F.normalize(torch.randn(in_features), dim=0))

    @torch.no_grad()
    def power_iteration(self):
        self.v.copy_(F.normalize(self.weight.T @ self.u, dim=0))
        self.u.copy_(F.normalize(self.weight @ self.v, dim=0))

    @torch.no_grad()
    def converge(self):
        """Moves u and v to the limit of power iteration, the leading singular vectors. The smaller Gram matrix has them
        in half the time of an SVD."""
        weight = self.weight
        if self.in_features < self.out_features:
            self.u.copy_(weight @ torch.linalg.eigh(weight.T @ weight).eigenvectors[:, -1])
        else:
            self.u.copy_(torch.linalg.eigh(weight @ weight.T).eigenvectors[:, -1])
        self.power_iteration()

    def sigma(self):
        return self.u @ self.weight @ self.v

    def forward(self, x):
        return F.linear(x, self.weight) / self.sigma() + self.bias


def sample_masks(*shape, p, device, generator=None):
    """Samples of the dropout posterior: 0 with probability p, else 1 / (1 - p), so that the mean is 1."""
    return torch.empty(shape, device=device).bernoulli_(1 - p, generator=generator).div_(1 - p)


class MLP(nn.Module):
    """Two hidden layers. `masks` has a dropout mask for each, shared by all rows of a batch: one draw of the weights,
    where nn.Dropout would draw one per row. Without masks it is the posterior mean."""

    activation = "relu"

    def __init__(self, in_dim, out_dim, out_gain, args):
        super().__init__()
        linear = SpectralLinear if args.spectral_norm else nn.Linear
        sizes = ((in_dim, args.width), (args.width, args.width))
        self.hidden = nn.ModuleList(init_layer(linear(*size), math.sqrt(2)) for size in sizes)
        self.out = init_layer(nn.Linear(args.width, out_dim), out_gain)

    def forward(self, x, masks=(1.0, 1.0)):
        for layer, mask in zip(self.hidden, masks):
            x = torch.relu(layer(x)) * mask
        return self.out(x)

    def folded(self):
        """(weight, bias) of each layer, divided by its spectral norm. One power iteration per gradient lags behind:
        they converge here, so that the layers that act have a norm of 1."""
        for layer in (*self.hidden, self.out):
            if isinstance(layer, SpectralLinear):
                layer.converge()
                yield layer.weight.detach() / layer.sigma().detach(), layer.bias.detach()
            else:
                yield layer.weight.detach(), layer.bias.detach()


class Agent(nn.Module):
    def __init__(self, envs, args):
        super().__init__()
        self.actor = MLP(envs.obs_dim, envs.action_dim, 0.01, args)
        self.critic = MLP(envs.obs_dim, 1, 1.0, args)
        self.log_std = nn.Parameter(torch.zeros(envs.action_dim))
        self.power_iteration()  # one is exact for orthogonal weights

    def forward(self, obs, masks):
        """Mean and log standard deviation of the actions, and values; two masks for the actor, two for the critic."""
        return self.actor(obs, masks[:2]), self.log_std, self.critic(obs, masks[2:]).squeeze(-1)

    def power_iteration(self):
        for module in self.modules():
            if isinstance(module, SpectralLinear):
                module.power_iteration()


@torch.no_grad()
def numpy_layers(network: MLP) -> list:
    """(weight transposed, bias) of each layer in numpy, for `forward`. One copy from the device serves all."""
    tensors = [x for layer in network.folded() for x in layer]
    flat = torch.cat([x.flatten() for x in tensors]).cpu()
    arrays = [part.view(x.shape).numpy().T for part, x in zip(flat.split([x.numel() for x in tensors]), tensors)]
    return list(zip(arrays[::2], arrays[1::2]))


def forward(layers, x, masks=(1.0, 1.0)):
    """A network's forward pass in numpy: for the few rows of a rollout's step it takes a fraction of torch's time."""
    *hidden, (weight_out, bias_out) = layers
    for (weight, bias), mask in zip(hidden, masks):
        x = np.maximum(x @ weight + bias, 0.0) * mask
    return x @ weight_out + bias_out


# ------------------------------------------------------------------------------------------------------- learning


class Rollout(NamedTuple):
    """Arrays of shape (num_steps, num_envs, ...). `next_obs` is where the step led, before any reset."""

    obs: np.ndarray
    actions: np.ndarray
    logprobs: np.ndarray
    rewards: np.ndarray
    next_obs: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray


@torch.no_grad()
@np.errstate(invalid="ignore")  # what is not finite is reported by `not_finite`
def collect(envs: Envs, agent: Agent, args: Args) -> Rollout:
    """Lines 2 to 8: act for num_steps, each step and environment with its own draw of the actor."""
    steps, n = args.num_steps, args.num_envs
    layers = numpy_layers(agent.actor)
    log_std = agent.log_std.cpu().numpy()
    noise = torch.randn(steps, n, envs.action_dim).numpy()
    scaled_noise = noise * np.exp(log_std)
    masks = np.ones((steps, 2, 1, 1), dtype=np.float32)
    if args.thompson:
        masks = sample_masks(steps, 2, n, args.width, p=args.dropout_rate, device="cpu").numpy()  # line 5
    obs, next_obs = np.empty((2, steps, n, envs.obs_dim), dtype=np.float32)
    actions = np.empty((steps, n, envs.action_dim), dtype=np.float32)
    rewards = np.empty((steps, n))
    terminated, truncated = np.empty((2, steps, n), dtype=bool)
    for t in range(steps):
        obs[t] = envs.obs
        actions[t] = forward(layers, envs.obs, masks[t]) + scaled_noise[t]  # line 6
        next_obs[t], rewards[t], terminated[t], truncated[t] = envs.step(actions[t])  # lines 7 and 8
    logprobs = -(0.5 * noise**2 + log_std + 0.5 * math.log(2 * math.pi)).sum(-1)  # of the sampled policy that acted
    rewards = envs.score(rewards, terminated, truncated)
    return Rollout(obs, actions, logprobs, rewards, next_obs, terminated, truncated)


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
    masks: torch.Tensor | None = None  # of a minibatch: one sample of actor and critic


@torch.no_grad()
def estimate(agent: Agent, rollout: Rollout, args: Args, device: torch.device) -> Batch:
    """Lines 9 and 13: advantages and targets from a draw of the critic as it is before the update."""
    ends = rollout.terminated | rollout.truncated
    jumps = ends.copy()  # where the next state is not the next row
    jumps[-1] = True
    obs = rollout.obs.reshape(args.batch_size, -1)
    states = np.concatenate([obs, rollout.next_obs[jumps]])
    layers = numpy_layers(agent.critic)
    masks = sample_masks(2, args.width, p=args.dropout_rate if args.thompson else 0.0, device="cpu").numpy()
    values = forward(layers, states, masks)[:, 0]
    values, jump_values = values[: len(obs)].reshape(rollout.rewards.shape), values[len(obs) :]
    next_values = np.concatenate([values[1:], values[:1]])
    next_values[jumps] = jump_values
    next_values[rollout.terminated if args.bootstrap_truncated else ends] = 0.0
    advantages = gae(rollout.rewards, values, next_values, ends, args.gamma, args.gae_lambda)
    columns = (rollout.obs, rollout.actions, rollout.logprobs, advantages, advantages + values, values, next_values)
    return Batch(*(torch.tensor(x, dtype=torch.float32, device=device).flatten(0, 1) for x in columns))


def minibatches(batch: Batch, args: Args):
    """Shuffled minibatches for one epoch, each with its own sample of the weights: lines 14 and 16."""
    order = torch.randperm(args.batch_size, device=batch.obs.device)
    masks = sample_masks(args.num_minibatches, 4, args.width, p=args.dropout_rate, device=batch.obs.device)
    for *columns, sample in zip(*(x.index_select(0, order).chunk(args.num_minibatches) for x in batch[:-1]), masks):
        yield Batch(*columns, sample)


def gaussian_logprob(actions, means, log_std):
    return -(0.5 * ((actions - means) / log_std.exp()) ** 2 + log_std + 0.5 * math.log(2 * math.pi)).sum(-1)


def ppo_policy_loss(ratio, advantages, clip_coef):
    return -torch.min(ratio * advantages, ratio.clamp(1 - clip_coef, 1 + clip_coef) * advantages).mean()


def ppo_value_loss(values, old_values, returns, clip_coef):
    clipped = old_values + (values - old_values).clamp(-clip_coef, clip_coef)
    return 0.5 * torch.max((values - returns) ** 2, (clipped - returns) ** 2).mean()


def loss_function(agent: Agent, minibatch: Batch, args: Args):
    means, log_std, values = agent(minibatch.obs, minibatch.masks)
    advantages = minibatch.advantages
    if args.norm_adv:
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    logratio = gaussian_logprob(minibatch.actions, means, log_std) - minibatch.logprobs
    ratio = logratio.exp()
    policy_loss = ppo_policy_loss(ratio, advantages, args.clip_coef)
    value_clip = args.clip_coef if args.clip_vloss else math.inf
    value_loss = ppo_value_loss(values, minibatch.values, minibatch.returns, value_clip)
    entropy = (log_std + 0.5 * math.log(2 * math.pi * math.e)).sum()
    loss = policy_loss + args.vf_coef * value_loss - args.ent_coef * entropy
    approx_kl = (ratio - 1 - logratio).mean()
    clipfrac = ((ratio - 1).abs() > args.clip_coef).float().mean()
    stats = dict(policy_loss=policy_loss, value_loss=value_loss, entropy=entropy, approx_kl=approx_kl)
    return loss, stats | dict(clipfrac=clipfrac)


def gradients(agent: Agent, minibatch: Batch, args: Args):
    """The clipped gradient of a minibatch, by parameter. This function is compiled."""
    agent.power_iteration()

    def loss(parameters):
        return loss_function(lambda *inputs: functional_call(agent, parameters, inputs), minibatch, args)

    grads, stats = grad(loss, has_aux=True)(dict(agent.named_parameters()))
    stats["grad_norm"] = norm = torch.stack([x.square().sum() for x in grads.values()]).sum().sqrt()
    scale = (args.max_grad_norm / (norm + 1e-6)).clamp(max=1.0)
    return [x * scale for x in grads.values()], stats


def make_optimizer(agent: Agent, args: Args) -> torch.optim.Optimizer:
    decay = (1 - args.dropout_rate) / (2 * args.batch_size)  # line 10: a unit normal prior over the weights
    return torch.optim.AdamW(agent.parameters(), lr=args.learning_rate, weight_decay=decay, fused=True)


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
    """Are the paper's mechanisms at work? The share of steps the policy learns from, the additive term C_pi of
    Theorem 3.1, and how far samples of the actor disagree (posterior standard deviation of the action mean)."""
    c_pi = torch.relu(args.gamma * batch.next_values - batch.values).mean()
    obs = batch.obs[:: max(1, args.batch_size // 32)]
    generator = torch.Generator(obs.device).manual_seed(step)  # of its own, so that logging does not change learning
    masks = sample_masks(2, 16, args.width, p=args.dropout_rate, device=obs.device, generator=generator)
    means = agent.actor(obs.repeat(16, 1), masks.repeat_interleave(len(obs), dim=1)).unflatten(0, (16, -1))
    positive = (batch.advantages > 0).float().mean()
    return dict(positive_advantages=positive, c_pi=c_pi, disagreement=means.std(0).mean())


@torch.no_grad()
def log(writer: SummaryWriter, step: int, agent: Agent, batch: Batch, stats: list, args: Args, detailed: bool):
    for name in stats[0]:
        writer.add_scalar(f"losses/{name}", torch.stack([x[name] for x in stats]).mean().item(), step)
    writer.add_scalar("losses/explained_variance", (1 - batch.advantages.var() / batch.returns.var()).item(), step)
    for name, value in mechanisms(agent, batch, step, args).items():
        writer.add_scalar(f"vsop/{name}", value.item(), step)
    if detailed:
        writer.add_histogram("vsop/advantages", batch.advantages, step)
        writer.add_histogram("vsop/relu_advantages", batch.advantages.relu(), step)
        for name, network in (("actor", agent.actor), ("critic", agent.critic)):
            for i, (weight, _) in enumerate(network.folded()):
                writer.add_scalar(f"spectral_norm/{name}_{i}", torch.linalg.matrix_norm(weight, 2).item(), step)


def not_finite(rollout: Rollout, stats: list) -> str | None:
    """What went wrong first in an iteration, if anything did."""
    for name, x in (("an observation", rollout.next_obs), ("a reward", rollout.rewards)):
        if not np.isfinite(x).all():
            return name
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


def save_policy(path: Path, agent: Agent, envs: Envs, args: Args):
    """All it takes to act: the actor with the spectral norm folded in, and how observations and actions are scaled."""
    policy = dict(script=Path(__file__).stem, env_id=args.env_id, args=settings(args))
    policy["activation"] = agent.actor.activation
    policy["layers"] = [(weight.cpu().clone(), bias.cpu().clone()) for weight, bias in agent.actor.folded()]
    policy["log_std"] = agent.log_std.detach().cpu().clone()
    policy["obs_mean"], policy["obs_std"] = torch.tensor(envs.obs_stats.mean), torch.tensor(envs.obs_stats.std)
    policy["action_low"], policy["action_high"] = torch.tensor(envs.low), torch.tensor(envs.high)
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


class Progress:
    """A progress bar on a terminal, elsewhere a line every half minute."""

    def __init__(self, total: int, step: int = 0, seconds: float = 0.0, returns: tuple = ()):
        self.returns, self.rate, self.start = deque(returns, maxlen=100), 0.0, time.time() - seconds
        self.next_line = time.time() + 30
        options = dict(unit="step", unit_scale=True, file=sys.stdout, disable=not sys.stdout.isatty())
        self.bar = tqdm(total=total, initial=step, **options)

    def seconds(self) -> float:
        return time.time() - self.start

    def update(self, step: int):
        self.rate = step / self.seconds()
        self.bar.set_postfix_str(f"return {self.mean_return():.2f}", refresh=False)
        self.bar.update(step - self.bar.n)
        if self.bar.disable and time.time() > self.next_line:
            left = time.strftime("%H:%M:%S", time.gmtime((self.bar.total - step) / self.rate))
            progress = f"step {step}/{self.bar.total}  {self.rate:.0f} steps/s"
            print(f"{progress}  return {self.mean_return():.2f}  {left} left", flush=True)
            self.next_line = time.time() + 30

    def mean_return(self) -> float:
        return float(np.mean(self.returns)) if self.returns else math.nan


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
    free = "total_timesteps checkpoint_every capture_video cuda compile track".split()
    for name, value in settings(of_run).items():
        if name not in (*free, "wandb_project_name", "wandb_entity") and (given := getattr(args, name)) != value:
            fail(f"--{name.replace('_', '-')} {given} contradicts {run_dir}, which has {value}")
    return args


def train(args: Args) -> Path:
    torch.manual_seed(args.seed)
    device = torch.device("cuda" if args.cuda and torch.cuda.is_available() else "cpu")
    if args.capture_video and sys.platform == "linux" and not os.environ.get("DISPLAY"):
        os.environ.setdefault("MUJOCO_GL", "egl")  # read when MuJoCo is imported
    make_env(args.env_id).close()  # a bad task ends the program here, before there is a run folder
    with run_folder(args) as run_dir, caught_signals() as signals:
        saved = load_checkpoint(run_dir) if args.resume else dict(iteration=0, seconds=0.0, returns=[])
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
        envs = Envs(args, run_dir)
        agent = Agent(envs, args).to(device)
        optimizer = make_optimizer(agent, args)
        if args.resume:
            restore(saved, run_dir, agent, optimizer, envs)
        gradients_of = compiled(gradients, device) if args.compile else gradients
        log_every = max(1, 2048 // args.batch_size)  # a rollout of a few steps is not worth a line
        progress = Progress(args.num_iterations * args.batch_size, envs.global_step, saved["seconds"], saved["returns"])
        writer = SummaryWriter(str(run_dir))
        if not args.resume:
            rows = "\n".join(f"|{name}|{value}|" for name, value in settings(args).items())
            writer.add_text("hyperparameters", f"|param|value|\n|-|-|\n{rows}")
            save_checkpoint(run_dir, 0, agent, optimizer, envs, progress, writer, args)

        for iteration in range(saved["iteration"] + 1, args.num_iterations + 1):
            if args.anneal_lr:
                optimizer.param_groups[0]["lr"] = args.learning_rate * (1 - (iteration - 1) / args.num_iterations)
            rollout = collect(envs, agent, args)
            batch = estimate(agent, rollout, args, device)
            stats = []
            for _ in range(args.update_epochs):
                for minibatch in minibatches(batch, args):
                    stats.append(update(agent, optimizer, gradients_of, minibatch, args))
            if name := not_finite(rollout, stats):
                stop(run_dir, f"{name} is not finite at step {envs.global_step}")

            for step, episode_return, episode_length in envs.finished:
                writer.add_scalar("charts/episodic_return", episode_return, step)
                writer.add_scalar("charts/episodic_length", episode_length, step)
                progress.returns.append(episode_return)
            envs.finished.clear()
            last = iteration == args.num_iterations
            if last or iteration % log_every == 0:
                progress.update(envs.global_step)
                writer.add_scalar("charts/learning_rate", optimizer.param_groups[0]["lr"], envs.global_step)
                writer.add_scalar("charts/SPS", progress.rate, envs.global_step)
                detailed = last or iteration % (10 * log_every) == 0
                log(writer, envs.global_step, agent, batch, stats, args, detailed)
            if last or signals or envs.global_step % args.checkpoint_every < args.batch_size:
                save_checkpoint(run_dir, iteration, agent, optimizer, envs, progress, writer, args)
                save_policy(run_dir / "policy.pt", agent, envs, args)
            if signals:
                print(f"stopped at step {envs.global_step}, to go on: --resume {run_dir}", file=sys.stderr)
                sys.exit(128 + signals[0])

        progress.bar.close()
        envs.close()
        writer.close()
    if args.track:
        wandb.finish()
    print(f"{run_dir}: mean return of the last {len(progress.returns)} episodes {progress.mean_return():.2f}")
    return run_dir


if __name__ == "__main__":
    train(parse_args())
