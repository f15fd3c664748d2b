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
"""VSOP: Variational Bayes, Spectral-normalized, On-Policy reinforcement learning, for continuous actions.

A3C with three changes: only positive advantages update the policy, the hidden layers of actor and critic are divided
by their spectral norm, and dropout is a posterior over the weights, sampled for every action (Thompson sampling):

    grad J = E[ h+(s, a) grad log pi(a | s, theta) ],   h+ = max(0, h),   theta ~ q(theta | theta_hat, p)

    python vsop_continuous.py --env-id Humanoid-v4

Paper: "ReLU to the Rescue: Improve Your On-Policy Actor-Critic with Positive Advantages" (ICML 2024), section 3.
"Line n" in a comment is a line of its Algorithm 1:

     5  theta ~ q(theta | theta_hat, p)                 9  freeze the critic, v*
     6  a ~ pi(a | s, theta)                           10  beta = (1 - p) / (2 |D|)
     7  s', r ~ p(s', r | s, a)                        13  v~ ~ q(v | v*, p)
     8  D = D + (s, a, r)                           14-15  theta ~ q; step on h+(v~) grad log pi + 2 beta theta
                                                    16-17  v ~ q; step on the squared error + 2 beta v
"""

import fcntl
import io
import math
import os
import re
import signal
import sys
import threading
import time
import warnings
import zipfile
from collections import deque, namedtuple
from dataclasses import asdict, dataclass, field, fields, make_dataclass
from pathlib import Path
from typing import Literal

# Matrices of this size gain nothing from more threads, and runs side by side would fight over the cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

try:
    import gymnasium as gym
    import numpy as np
    import torch
    import torch.nn as nn
    import torch.nn.functional as F
    import tyro
    from torch.func import functional_call, grad
    from torch.utils.tensorboard import SummaryWriter
    from tqdm import tqdm
except ModuleNotFoundError as error:
    sys.exit(f"error: {error}: pip install -r requirements.txt")


@dataclass
class Args:
    env_id: str = "HalfCheetah-v4"  # Gymnasium id of a task with continuous actions, or module:id of your own
    env_kwargs: dict[str, bool | int | float | str] = field(default_factory=dict)  # its arguments, as NAME VALUE pairs
    seed: int = 1  # seed of the environments, the initial weights and all sampling
    total_timesteps: int = 3_000_000  # environment steps to train for, over all environments
    num_envs: int = 1  # number of parallel environments
    num_steps: int = 2048  # steps per environment in a rollout
    learning_rate: float = 2e-4  # learning rate of the optimizer
    anneal_lr: bool = True  # anneal the learning rate linearly to 0 over total_timesteps
    gamma: float = 0.99  # discount factor
    gae_lambda: float = 0.61  # lambda of generalized advantage estimation
    num_minibatches: int = 32  # minibatches per epoch
    update_epochs: int = 9  # passes over each rollout
    target_kl: float = math.inf  # no more passes over a rollout once the approximate KL divergence exceeds this
    max_grad_norm: float = 7.1  # gradients are clipped to this norm
    ent_coef: float = 0.0  # coefficient of the entropy bonus
    vf_coef: float = 0.5  # coefficient of the critic's squared error
    width: int = 256  # units in each of the two hidden layers
    dropout_rate: float = 0.025  # p, probability of dropping a hidden unit; sets the weight decay too
    relu_advantage: bool = True  # learn from positive advantages only
    spectral_norm: bool = True  # divide the hidden layers by their spectral norm
    thompson: bool = True  # sample the weights to act and to estimate advantages, instead of using their mean
    norm_obs: bool = True  # normalize observations by their running mean and variance
    norm_reward: bool = True  # divide rewards by the running standard deviation of the discounted return
    bootstrap_truncated: bool = True  # bootstrap from v at a time limit, and restart the return that scales rewards
    preset: Literal["paper", "few-actions"] = "paper"  # defaults of other flags: the paper's, or for up to 7 actions

    @property
    def batch_size(self) -> int:
        return self.num_envs * self.num_steps

    @property
    def num_iterations(self) -> int:
        return self.total_timesteps // self.batch_size


# Defaults that --preset replaces; how "few-actions" was found: sweeps/results/tuned/README.md
PRESETS = {"paper": {}, "few-actions": dict(learning_rate=6e-4, gae_lambda=0.95, max_grad_norm=0.5, target_kl=0.3)}


# ----------------------------------------------------------------------------------------------------- environment
def make_env(args: Args, **options) -> gym.Env:
    env = gym.make(args.env_id, disable_env_checker=True, **args.env_kwargs, **options)
    if not isinstance(env.observation_space, gym.spaces.Box) or len(env.observation_space.shape) != 1:
        env = gym.wrappers.FlattenObservation(env)
    return env


class RunningStats:
    """Mean and variance of everything passed to `update`, numbers or arrays, by Welford's method."""

    def __init__(self, shape=()):
        self.count, self.mean, self.m2 = 0, np.zeros(shape), np.zeros(shape)

    def update(self, x):
        self.count += 1
        delta = x - self.mean
        self.mean = self.mean + delta / self.count
        self.m2 = self.m2 + delta * (x - self.mean)

    @property
    def std(self):
        return (self.m2 / max(self.count, 1) + 1e-8) ** 0.5


class Envs:
    """Parallel copies of a task: same-step reset, observations and rewards normalized by running statistics.

    Written out because it is the hot loop: the usual stack of wrappers costs several times the simulation itself.
    """

    def __init__(self, envs: list[gym.Env], args: Args):
        self.envs, self.args = envs, args
        space = envs[0].action_space
        self.low, self.high, self.action_dim = space.low.reshape(-1), space.high.reshape(-1), math.prod(space.shape)
        self.action_shape, self.obs_dim = (len(envs), *space.shape), envs[0].observation_space.shape[0]
        self.obs_stats, self.return_stats = RunningStats(self.obs_dim), RunningStats()
        self.episodes = [(0.0, 0, 0.0)] * len(envs)  # return, length and discounted return of those in progress
        self.finished = []  # (global step, return, length) of episodes that ended and are not logged yet
        self.global_step = 0
        raw = [env.reset(seed=args.seed + i)[0] for i, env in enumerate(envs)]
        self.obs = np.array([self.normalize(x) for x in raw])  # what the policy acts on next

    def normalize(self, raw):
        if not self.args.norm_obs:
            return raw.astype(np.float32)
        self.obs_stats.update(raw)
        return ((raw - self.obs_stats.mean) / self.obs_stats.std).clip(-10.0, 10.0).astype(np.float32)

    def step(self, actions):
        """Returns next observations (before any reset), rewards, terminated, truncated. `self.obs` is after resets."""
        actions = actions.clip(self.low, self.high).reshape(self.action_shape)
        raw, rewards, terminated, truncated, _ = zip(*[env.step(action) for env, action in zip(self.envs, actions)])
        self.global_step += len(self.envs)
        next_obs = np.array([self.normalize(x) for x in raw])
        self.obs = next_obs.copy()
        for i, env in enumerate(self.envs):
            if terminated[i] or truncated[i]:
                self.obs[i] = self.normalize(env.reset()[0])
        return next_obs, rewards, terminated, truncated

    def scale_rewards(self, rewards, terminated, truncated):
        """Divides each reward by the running standard deviation of the discounted return. Records finished episodes."""
        ends = terminated | truncated
        # The authors' code treats a time limit as terminal for values, but not for the scale of rewards.
        restarts = ends if self.args.bootstrap_truncated else terminated
        scales, step = np.empty((len(rewards), 1)), self.global_step - rewards.size
        for t in range(len(rewards)):
            step += len(self.envs)
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


# -------------------------------------------------------------------------------------------------------- networks
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
        """Moves u and v to the limit of power iteration, the leading singular vectors."""
        weight = self.weight  # its smaller Gram matrix takes half the time of an SVD
        if self.in_features < self.out_features:
            self.u.copy_(weight @ torch.linalg.eigh(weight.T @ weight).eigenvectors[:, -1])
        else:
            self.u.copy_(torch.linalg.eigh(weight @ weight.T).eigenvectors[:, -1])
        self.power_iteration()

    def sigma(self):
        return self.u @ self.weight @ self.v

    def forward(self, x):
        return F.linear(x, self.weight) / self.sigma() + self.bias


def sample_masks(*shape, p, device="cpu", generator=None):
    """Samples of the dropout posterior: 0 with probability p, else 1 / (1 - p), so that the mean is 1."""
    return torch.empty(shape, device=device).bernoulli_(1 - p, generator=generator).div_(1 - p)


# The activation, for tensors in the update and for arrays in the rollout.
activation, numpy_activation = torch.relu, lambda x: np.maximum(x, 0.0)


class MLP(nn.Module):
    """Two hidden layers. `masks` has a dropout mask for each, shared by all rows of a batch: one sample of the weights,
    where nn.Dropout would sample one per row. Without masks it is the posterior mean."""

    def __init__(self, in_dim, out_dim, out_gain, args):
        super().__init__()
        linear = SpectralLinear if args.spectral_norm else nn.Linear
        sizes = ((in_dim, args.width), (args.width, args.width))
        self.hidden = nn.ModuleList(init_layer(linear(*size), math.sqrt(2)) for size in sizes)
        self.out = init_layer(nn.Linear(args.width, out_dim), out_gain)

    def forward(self, x, masks=(1.0, 1.0)):
        for layer, mask in zip(self.hidden, masks):
            x = activation(layer(x)) * mask
        return self.out(x)

    @torch.no_grad()
    def layers(self):
        """(weight, bias) of each layer. One power iteration per gradient lags behind, so u and v converge here: the
        layers that act have a spectral norm of 1."""
        for layer in (*self.hidden, self.out):
            if isinstance(layer, SpectralLinear):
                layer.converge()
            yield layer.weight / (layer.sigma() if isinstance(layer, SpectralLinear) else 1.0), layer.bias.detach()

    def numpy_layers(self) -> list:
        """(weight transposed, bias) of each layer in numpy, for `numpy_forward`."""
        return [(weight.cpu().numpy().T, bias.cpu().numpy()) for weight, bias in self.layers()]


class Agent(nn.Module):
    def __init__(self, envs: Envs, args: Args):
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


def numpy_forward(layers, x, masks=(1.0, 1.0)):
    """MLP.forward in numpy: for the few rows of a rollout's step it takes a fraction of torch's time."""
    *hidden, (weight_out, bias_out) = layers
    for (weight, bias), mask in zip(hidden, masks):
        x = numpy_activation(x @ weight + bias) * mask
    return x @ weight_out + bias_out


# -------------------------------------------------------------------------------------------------------- learning
# Arrays of shape (num_steps, num_envs, ...). `next_obs` is where the step led, before any reset.
Rollout = namedtuple("Rollout", "obs actions logprobs rewards next_obs terminated truncated")

# A rollout or a minibatch of it, as tensors with one row per step. `masks` is a minibatch's sample of actor and critic.
Batch = namedtuple("Batch", "obs actions logprobs advantages returns values next_values masks", defaults=[None])


@torch.no_grad()
def collect_rollout(envs: Envs, agent: Agent, args: Args) -> Rollout:
    """Lines 2 to 8: act for num_steps. Every step of every environment samples its own actor weights."""
    steps, n = args.num_steps, args.num_envs
    layers = agent.actor.numpy_layers()
    log_std = agent.log_std.cpu().numpy()
    noise = torch.randn(steps, n, envs.action_dim).numpy()
    scaled_noise = noise * np.exp(log_std)
    masks = np.ones((steps, 2, 1, 1), dtype=np.float32)
    if args.thompson:
        masks = sample_masks(steps, 2, n, args.width, p=args.dropout_rate).numpy()  # line 5
    obs, next_obs = np.empty((2, steps, n, envs.obs_dim), dtype=np.float32)
    actions = np.empty((steps, n, envs.action_dim), dtype=np.float32)
    rewards = np.empty((steps, n))
    terminated, truncated = np.empty((2, steps, n), dtype=bool)
    for t in range(steps):
        obs[t] = envs.obs
        actions[t] = numpy_forward(layers, envs.obs, masks[t]) + scaled_noise[t]  # line 6
        next_obs[t], rewards[t], terminated[t], truncated[t] = envs.step(actions[t])  # lines 7 and 8
    logprobs = -(0.5 * noise**2 + log_std + 0.5 * math.log(2 * math.pi)).sum(-1)  # of the sampled policy that acted
    rewards = envs.scale_rewards(rewards, terminated, truncated)
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


@torch.no_grad()
def compute_advantages(agent: Agent, rollout: Rollout, args: Args, device: torch.device) -> Batch:
    """Lines 9 and 13: advantages and returns under one sample of the critic, taken before the update. Algorithm 1
    samples it again for every minibatch; the authors' code, like this, once per rollout."""
    ends = rollout.terminated | rollout.truncated
    cut = ends.copy()  # rows whose next state is not the row that follows
    cut[-1] = True
    masks = sample_masks(2, args.width, p=args.dropout_rate if args.thompson else 0.0).numpy()
    states = np.concatenate([rollout.obs.reshape(args.batch_size, -1), rollout.next_obs[cut]])
    values, cut_values = np.split(numpy_forward(agent.critic.numpy_layers(), states, masks)[:, 0], [args.batch_size])
    values = values.reshape(rollout.rewards.shape)
    next_values = np.roll(values, -1, axis=0)
    next_values[cut] = cut_values
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


def loss_function(agent: Agent, minibatch: Batch, args: Args):
    """Lines 15 and 17: h+ times the score for the actor, squared error for the critic, each under its own sample."""
    h_plus = torch.relu(minibatch.advantages) if args.relu_advantage else minibatch.advantages
    means, log_std, values = agent(minibatch.obs, minibatch.masks)
    logprobs = gaussian_logprob(minibatch.actions, means, log_std)
    policy_loss = -(h_plus * logprobs).mean()
    value_loss = F.mse_loss(values, minibatch.returns)
    entropy = (log_std + 0.5 * math.log(2 * math.pi * math.e)).sum()
    loss = policy_loss + args.vf_coef * value_loss - args.ent_coef * entropy
    logratio = logprobs - minibatch.logprobs
    approx_kl = (logratio.exp() - 1 - logratio).mean()
    return loss, dict(policy_loss=policy_loss, value_loss=value_loss, entropy=entropy, approx_kl=approx_kl)


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
    decay = (1 - args.dropout_rate) / (2 * args.batch_size)  # line 10; as in the authors' code, the means decay by it
    return torch.optim.AdamW(agent.parameters(), lr=args.learning_rate, weight_decay=decay, fused=True)


@torch.no_grad()  # `gradients` differentiates by itself
def learn(args: Args, envs: Envs, agent: Agent, optimizer, device: torch.device, gradients=gradients):
    """The training loop. Yields after every iteration, for logging and checkpoints."""
    parameters = list(agent.parameters())
    for iteration in range(envs.global_step // args.batch_size + 1, args.num_iterations + 1):
        if args.anneal_lr:
            optimizer.param_groups[0]["lr"] = args.learning_rate * (1 - (iteration - 1) / args.num_iterations)
        rollout = collect_rollout(envs, agent, args)
        batch = compute_advantages(agent, rollout, args, device)
        stats = []
        for _ in range(args.update_epochs):
            for minibatch in minibatches(batch, args):
                grads, stat = gradients(agent, minibatch, args)
                for parameter, x in zip(parameters, grads):
                    parameter.grad = x
                optimizer.step()
                stats.append(torch.stack(list(stat.values())))
            if stat["approx_kl"] > args.target_kl:
                break
        yield iteration, batch, dict(zip(stat, torch.stack(stats, dim=1)))


# ================================================================================================================
# That was the algorithm. What follows keeps a run alive and decides nothing about what is learned.
# ================================================================================================================


@dataclass
class RunFlags:
    exp_name: str = Path(__file__).stem  # name of the experiment, part of the run folder's name
    cuda: bool = False  # compute gradients on a GPU; acting is always on the CPU, and networks this small rarely gain
    compile: bool = True  # compile the gradient with torch.compile
    checkpoint_every: int = 20_480  # steps between checkpoints in runs/; SIGTERM and Ctrl-C leave one as well
    resume: Path | None = None  # resume the run in this folder with its saved arguments; --total-timesteps extends it
    capture_video: bool = False  # film some episodes of the first environment into the run folder
    track: bool = False  # track the run with Weights & Biases
    wandb_project_name: str = "vsop"  # W&B project
    wandb_entity: str | None = None  # W&B user or team


RunArgs = make_dataclass("RunArgs", [], bases=(RunFlags, Args))  # all flags side by side


def fail(message: str, code: int = 2):
    print(f"error: {message}", file=sys.stderr)
    sys.exit(code)


def say(message: str):
    try:
        print(message, flush=True)
    except OSError:  # the reader of a pipe is gone: continue without one
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def check(args: RunArgs):
    """Exits with one line if a flag is wrong or this script cannot train on the task."""
    limits = dict(seed=(0, 2**32 - 1), total_timesteps=(args.batch_size, math.inf))  # one rollout at least
    limits |= dict(gamma=(0, 1), gae_lambda=(0, 1), dropout_rate=(0, 0.99))
    for name, x in asdict(args).items():
        low, high = limits.get(name, (int(type(x) is int), math.inf))
        if type(x) in (int, float) and not low <= x <= high:
            fail(f"--{name.replace('_', '-')} must be in [{low}, {high}], got {x}")
    if args.batch_size % args.num_minibatches:
        fail(f"--num-minibatches {args.num_minibatches} does not divide a rollout of {args.batch_size} steps")
    sys.path.append(os.getcwd())  # where the module of a `module:id` may be
    warnings.filterwarnings("ignore", message=".*is out of date.*", category=DeprecationWarning)  # the -v4 tasks
    try:
        import mujoco  # its version 4 warns of an attribute in Gymnasium's own model files

        mujoco.set_mju_user_warning(lambda text: "settotalmass" in str(text) or print(text, file=sys.stderr))
        if args.env_id.startswith("dm_control/"):
            import shimmy  # noqa: F401, registers the tasks
        env = make_env(args)
        env.reset(seed=args.seed)[0].astype(np.float32)  # an observation must be an array, or something to flatten
        _, _, _, _, _ = env.step(env.action_space.sample())
    except (Exception, SystemExit) as error:  # third-party tasks may raise anything
        fail(f"--env-id: cannot use {args.env_id}: {error!r:.200}")
    if not isinstance(env.action_space, gym.spaces.Box) or env.action_space.dtype.kind != "f":
        fail(f"--env-id: {args.env_id} has actions {env.action_space}, this script needs a Box of floats")
    env.close()


class Replayable(gym.Wrapper):
    """Remembers how the current episode started and its actions. Resuming replays the episode: restoring a simulator's
    state alone is not exact for all tasks."""

    def reset(self, *, seed=None, options=None):
        generator = getattr(self.unwrapped.np_random, "bit_generator", None)  # dm_control has an older kind
        self.start = seed, generator and generator.state
        self.actions = []
        self.raw, info = self.env.reset(seed=seed)
        return self.raw, info

    def step(self, action):
        self.actions.append(action)
        self.raw, *rest = self.env.step(action)
        return self.raw, *rest

    def state_dict(self):
        return dict(start=self.start, actions=torch.tensor(np.array(self.actions)), raw=torch.tensor(self.raw))

    def load_state_dict(self, state) -> bool:
        """Returns whether the replay reproduced the last observation."""
        seed, generator = state["start"]
        if generator:
            self.unwrapped.np_random.bit_generator.state = generator
        self.reset(seed=seed)
        for action in state["actions"].numpy():
            self.step(action)
        return np.array_equal(self.raw, state["raw"].numpy())


def save(run_dir: Path, args: RunArgs, agent: Agent, optimizer, envs: Envs, progress):
    """A checkpoint has everything needed to continue as if nothing had happened, a policy everything needed to act."""
    stats = [(x.count, torch.tensor(x.mean), torch.tensor(x.m2)) for x in (envs.obs_stats, envs.return_stats)]
    state = dict(agent=agent.state_dict(), optimizer=optimizer.state_dict(), returns=list(progress.returns))
    state |= dict(envs=[env.state_dict() for env in envs.envs], obs=torch.tensor(envs.obs), stats=stats)
    state |= dict(episodes=envs.episodes, step=envs.global_step)
    state |= dict(random=torch.get_rng_state(), random_cuda=torch.cuda.get_rng_state_all())
    policy = dict(env_id=args.env_id, activation=activation.__name__, log_std=agent.log_std.detach().cpu())
    policy |= dict(layers=[(weight.cpu(), bias.cpu()) for weight, bias in agent.actor.layers()])
    policy |= dict(obs_mean=torch.tensor(envs.obs_stats.mean), obs_std=torch.tensor(envs.obs_stats.std))
    policy |= dict(action_low=torch.tensor(envs.low), action_high=torch.tensor(envs.high))
    for name, content in (("checkpoint", state), ("policy", policy)):
        buffer = io.BytesIO()
        torch.save(dict(script=Path(__file__).stem, args=asdict(args) | dict(resume=None)) | content, buffer)
        part = run_dir / f"{name}.part"  # until it is whole: an interruption or a full disk leaves the previous file
        part.write_bytes(buffer.getbuffer())
        part.replace(run_dir / f"{name}.pt")


def load_checkpoint(run_dir: Path) -> dict:
    path, script = run_dir / "checkpoint.pt", Path(__file__).stem
    try:
        corrupt = zipfile.ZipFile(path).testzip()  # torch does not look at the checksums
        state = torch.load(path, weights_only=True, map_location="cpu")
        if corrupt or state["script"] != script or state["args"].keys() != asdict(RunArgs()).keys():
            raise ValueError(f"corrupt, or written by {state['script']}.py or another version of {script}.py")
        return state
    except Exception as error:  # a file that is not a checkpoint may raise anything
        fail(f"--resume: {path} cannot be used ({error!r:.200})")


def restore(state: dict, agent: Agent, optimizer, envs: Envs):
    agent.load_state_dict(state["agent"])
    optimizer.load_state_dict(state["optimizer"])
    envs.obs, envs.global_step, envs.episodes = state["obs"].numpy(), state["step"], state["episodes"]
    for stats, (count, mean, m2) in zip((envs.obs_stats, envs.return_stats), state["stats"]):
        stats.count, stats.mean, stats.m2 = count, mean.numpy(), m2.numpy()
    for i, (env, episode) in enumerate(zip(envs.envs, state["envs"])):
        if not env.load_state_dict(episode):
            print("this task is not deterministic: restarting the episode in progress", file=sys.stderr)
            envs.obs[i], envs.episodes[i] = envs.normalize(env.reset()[0]), (0.0, 0, 0.0)
    torch.set_rng_state(state["random"])
    torch.cuda.set_rng_state_all(state["random_cuda"])


class Progress:
    """A progress bar on a terminal, otherwise a line every half minute."""

    def __init__(self, total: int, step: int = 0, returns: list = ()):
        self.returns, self.first, self.start = deque(returns, maxlen=100), step, time.time()
        self.next_line = self.start + 30
        options = dict(unit="step", unit_scale=True, file=sys.stdout)
        self.bar = tqdm(total=total, initial=step, disable=not (sys.stdout and sys.stdout.isatty()), **options)

    def update(self, step: int) -> float:
        rate = (step - self.first) / (time.time() - self.start)  # of this process
        result = f"return {np.mean(self.returns or math.nan):.2f}"
        self.bar.set_postfix_str(result, refresh=False)
        self.bar.update(step - self.bar.n)
        if self.bar.disable and time.time() > self.next_line:
            left = tqdm.format_interval((self.bar.total - step) / rate)
            say(f"step {step}/{self.bar.total}  {rate:.0f} steps/s  {result}  {left} left")
            self.next_line = time.time() + 30
        return rate


@torch.no_grad()
def log(writer: SummaryWriter, step: int, agent: Agent, batch: Batch, stats: dict, args: RunArgs, detailed: bool):
    scalars = {f"losses/{name}": values.mean() for name, values in stats.items()}
    scalars["losses/explained_variance"] = 1 - batch.advantages.var() / batch.returns.var()
    # Of the actions taken: the share of positive advantages, and the additive term C_pi of Theorem 3.1.
    scalars["vsop/positive_advantages"] = (batch.advantages > 0).float().mean()
    scalars["vsop/c_pi"] = torch.relu(args.gamma * batch.next_values - batch.values).mean()
    # How far samples of the actor disagree, by a generator of its own: logging does not change learning.
    obs = batch.obs[:: max(1, args.batch_size // 32)]
    generator = torch.Generator(obs.device).manual_seed(step)
    masks = sample_masks(2, 16, args.width, p=args.dropout_rate, device=obs.device, generator=generator)
    means = agent.actor(obs.repeat(16, 1), masks.repeat_interleave(len(obs), dim=1)).unflatten(0, (16, -1))
    scalars["vsop/disagreement"] = means.std(0).mean()
    if detailed:
        writer.add_histogram("vsop/advantages", batch.advantages, step)
        writer.add_histogram("vsop/relu_advantages", batch.advantages.relu(), step)
        for name, network in (("actor", agent.actor), ("critic", agent.critic)):
            for i, (weight, _) in enumerate(network.layers()):
                scalars[f"spectral_norm/{name}_{i}"] = torch.linalg.matrix_norm(weight, 2)
    for name, x in scalars.items():
        writer.add_scalar(name, x.item(), step)


def compiled(function, device: torch.device):
    """The function compiled, or as it is where that fails: without a working C++ compiler, for example."""
    # Kernels and the calls to them as two files: gcc takes 20 s for both in one, and 8 s for the two.
    flags = {"cpp_wrapper": True, "cpp_wrapper_build_separate": True, "cpp_cache_precompile_headers": False}
    options = dict(options=flags) if device.type == "cpu" else dict(mode="reduce-overhead")
    fast = torch.compile(function, dynamic=False, fullgraph=True, **options)

    def call(*inputs):
        try:
            return fast(*inputs)
        except Exception as error:  # the compiler and its caches may raise anything
            print(f"continuing uncompiled, which is slower: {error.__cause__ or error!r:.200}", file=sys.stderr)
            torch.compiler.set_stance("force_eager")
            return function(*inputs)

    return call


def open_run(args: RunArgs):
    """The run's folder, new or resumed, and the lock that keeps a second process out for as long as this one lives."""
    name = f"{args.env_id}__{args.exp_name}__{args.seed}__{time.time_ns() // 1_000_000}"
    run_dir = args.resume or Path("runs", name.replace("/", "-"))
    try:
        run_dir.mkdir(parents=True, exist_ok=bool(args.resume))
        lock = open(run_dir / ".lock", "w")
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        fail(f"{run_dir} cannot be written, or another process is training there: {error.strerror}")
    return run_dir, lock


def parse_args() -> RunArgs:
    """From the command line, in two boxes of --help. With --resume, the saved ones; what decides learning is fixed."""
    argv = [f"{float(x):.0f}" if re.fullmatch(r"\d+e\d+", x) else x for x in sys.argv[1:]]  # 1e6 is an integer too
    flags = dict(description=__doc__.partition("\n\n")[0], args=argv)
    learning = Args()
    for _ in range(2):  # the second time with the settings of --preset as defaults
        default = dict(learning=Args(**PRESETS[learning.preset]), run=RunFlags())
        learning, run = tyro.cli(dict, default=default, config=[tyro.conf.OmitArgPrefixes], **flags).values()
    args = RunArgs(**vars(learning), **vars(run))
    if args.resume:
        saved = RunArgs(**load_checkpoint(args.resume)["args"])
        args = tyro.cli(RunArgs, default=saved, **flags)
        for x in fields(Args):
            given, has = getattr(args, x.name), getattr(saved, x.name)
            if given != has and x.name != "total_timesteps":
                fail(f"--{x.name.replace('_', '-')} {given} contradicts {args.resume}, which has {has}")
    return args


def train(args: RunArgs):
    if args.capture_video and sys.platform == "linux" and not os.environ.get("DISPLAY"):
        os.environ.setdefault("MUJOCO_GL", "egl")  # read when MuJoCo is imported
    check(args)
    run_dir, _lock = open_run(args)
    try:
        run(args, run_dir)
    except (Exception, SystemExit) as error:
        if isinstance(error, SystemExit) and error.code:  # from `fail` or a signal
            raise
        # A full disk or memory, or W&B without an account, is told in one line. A task's own error has its traceback.
        known = r"OSError.*(space left|quota|too large)|\w*MemoryError|RuntimeError.*memory|UsageError"
        if not re.match(known, repr(error)):
            sys.excepthook(type(error), error, error.__traceback__)
        fail(f"{error!r:.200}; what {run_dir} has is kept", code=1)


def run(args: RunArgs, run_dir: Path):
    np.seterr(all="ignore")  # what is not finite is reported below
    threading.excepthook = lambda error: None  # TensorBoard writes in a thread; its error comes up in the next call
    torch.manual_seed(args.seed)
    device = torch.device("cuda" if args.cuda and torch.cuda.is_available() else "cpu")
    saved = load_checkpoint(run_dir) if args.resume else dict(step=0, returns=[])
    if args.num_iterations * args.batch_size <= saved["step"]:
        return say(f"{run_dir} is already at step {saved['step']}, nothing to do; --total-timesteps extends it")
    if args.track:
        import wandb

        where = dict(project=args.wandb_project_name, entity=args.wandb_entity, name=run_dir.name, id=run_dir.name)
        wandb.init(**where, resume="allow", config=asdict(args), sync_tensorboard=True, save_code=True)
    envs = [make_env(args) for _ in range(args.num_envs)]
    if args.capture_video:
        filmed = make_env(args, render_mode="rgb_array")
        envs[0] = gym.wrappers.RecordVideo(filmed, str(run_dir / "videos" / f"{time.time():.0f}"))
    envs = Envs([Replayable(env) for env in envs], args)
    agent = Agent(envs, args).to(device)
    optimizer = make_optimizer(agent, args)
    if args.resume:
        try:
            restore(saved, agent, optimizer, envs)
        except Exception as error:  # of another version of the task, for example
            fail(f"--resume: {run_dir / 'checkpoint.pt'} does not fit the run: {error!r:.200}")
    say(f"{run_dir}: {args.env_id}, gradients on {device}" + (", compiling for up to 20 s" if args.compile else ""))
    progress = Progress(args.num_iterations * args.batch_size, saved["step"], saved["returns"])
    writer = SummaryWriter(str(run_dir), purge_step=saved["step"] + 1)  # later steps will be logged again
    rows = [f"|{name}|{value}|" for name, value in asdict(args).items()]
    writer.add_text("hyperparameters", "\n".join(["|param|value|", "|-|-|", *rows]), saved["step"])
    save(run_dir, args, agent, optimizer, envs, progress)
    signals = []  # received signals, handled after the current iteration; a second one exits immediately
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: signals.append(number) or signal.signal(number, signal.SIG_DFL))
    function = compiled(gradients, device) if args.compile else gradients
    log_every = max(1, 2048 // args.batch_size)  # a rollout of a few steps is not worth a line
    for iteration, batch, stats in learn(args, envs, agent, optimizer, device, function):
        step, last = envs.global_step, iteration == args.num_iterations
        if not (stats["grad_norm"].isfinite().all() and np.isfinite(envs.obs_stats.m2).all()):
            fail(f"a loss or an observation is not finite at step {step}; what {run_dir} has is kept", code=1)
        for when, episode_return, length in envs.finished:
            writer.add_scalar("charts/episodic_return", episode_return, when)
            writer.add_scalar("charts/episodic_length", length, when)
            progress.returns.append(episode_return)
        envs.finished.clear()
        if last or iteration % log_every == 0:
            writer.add_scalar("charts/learning_rate", optimizer.param_groups[0]["lr"], step)
            writer.add_scalar("charts/SPS", progress.update(step), step)
            log(writer, step, agent, batch, stats, args, detailed=last or iteration % (10 * log_every) == 0)
        if last or signals or step % args.checkpoint_every < args.batch_size:
            writer.flush()
            save(run_dir, args, agent, optimizer, envs, progress)
        if signals:
            print(f"stopped at step {step}; to continue: --resume {run_dir}", file=sys.stderr)
            sys.exit(128 + signals[0])
    progress.bar.close()
    writer.close()
    mean = np.mean(progress.returns or math.nan)
    say(f"{run_dir}: mean return of the last {len(progress.returns)} episodes {mean:.2f}")


if __name__ == "__main__":
    train(parse_args())
