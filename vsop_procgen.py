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
"""VSOP: Variational Bayes, Spectral-normalized, On-Policy reinforcement learning, for the games of ProcGen.

As vsop_continuous.py, with a convolutional network that actor and critic share and fifteen actions to choose from:

    grad J = E[ h+(s, a) grad log pi(a | s, theta) ],   h+ = max(0, h),   theta ~ q(theta | theta_hat, p)

It trains on 200 levels of a game. The posterior mean is tested alongside, on levels that it has not seen.

    python vsop_procgen.py --env-id starpilot

Paper: "ReLU to the Rescue: Improve Your On-Policy Actor-Critic with Positive Advantages" (ICML 2024), section 5.2.
"Line n" in a comment is a line of its Algorithm 1:

     5  theta ~ q(theta | theta_hat, p)                 9  freeze the critic, v*
     6  a ~ pi(a | s, theta)                           10  beta = (1 - p) / (2 |D|)
     7  s', r ~ p(s', r | s, a)                        13  v~ ~ q(v | v*, p)
     8  D = D + (s, a, r)                           14-15  theta ~ q; step on h+(v~) grad log pi + 2 beta theta
                                                    16-17  v ~ q; step on the squared error + 2 beta v
"""

import ctypes
import difflib
import fcntl
import io
import math
import os
import re
import signal
import sys
import threading
import time
import zipfile
from collections import deque, namedtuple
from dataclasses import asdict, dataclass, fields, make_dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

try:
    import numpy as np
    import torch
    import torch.nn as nn
    import torch.nn.functional as F
    import tyro
    from torch.func import functional_call, grad
    from torch.utils.tensorboard import SummaryWriter
    from tqdm import tqdm
except ModuleNotFoundError as error:
    sys.exit(f"error: {error}: pip install -r requirements-procgen.txt")

GAMES = """bigfish bossfight caveflyer chaser climber coinrun dodgeball fruitbot heist jumper leaper maze miner ninja
plunder starpilot""".split()
FEATURES, WIDTH = 2048, 256  # units before and after the hidden layer


@dataclass
class Args:
    env_id: str = "starpilot"  # name of one of the sixteen games
    distribution_mode: Literal["easy", "hard"] = "easy"  # difficulty of the levels
    num_levels: int = 200  # levels to train on; the test is on all there are
    seed: int = 1  # seed of the environments, the initial weights and all sampling
    total_timesteps: int = 25_000_000  # environment steps to train for, over all environments
    num_envs: int = 64  # number of parallel environments
    num_steps: int = 256  # steps per environment in a rollout
    learning_rate: float = 4.5e-4  # learning rate of the optimizer
    anneal_lr: bool = False  # anneal the learning rate linearly to 0 over total_timesteps
    gamma: float = 0.999  # discount factor
    gae_lambda: float = 0.88  # lambda of generalized advantage estimation
    num_minibatches: int = 8  # minibatches per epoch
    update_epochs: int = 3  # passes over each rollout
    max_grad_norm: float = 0.5  # gradients are clipped to this norm
    ent_coef: float = 1e-5  # coefficient of the entropy bonus
    vf_coef: float = 0.25  # coefficient of the critic's squared error
    dropout_rate: float = 0.075  # p, probability of dropping an input or an output of the hidden layer
    relu_advantage: bool = True  # learn from positive advantages only
    spectral_norm: bool = True  # divide the hidden layer by its spectral norm
    thompson: bool = True  # sample the weights to act and to estimate advantages, instead of using their mean
    norm_reward: bool = True  # divide rewards by the running standard deviation of the discounted return
    bootstrap_truncated: bool = True  # bootstrap from v(final observation) at a time limit; the authors' code does not
    mixed_precision: bool = False  # compute in bfloat16 where that is safe, on a GPU

    @property
    def batch_size(self) -> int:
        return self.num_envs * self.num_steps

    @property
    def num_iterations(self) -> int:
        return self.total_timesteps // self.batch_size


# ----------------------------------------------------------------------------------------------------- environment
def make_envs(args, num_levels: int, seed: int):
    """Parallel copies of a game on its first `num_levels` levels, or on all levels if that is 0."""
    name = f"{args.env_id.capitalize()}{args.distribution_mode.capitalize()}-v0"
    options = dict(num_envs=args.num_envs, num_threads=torch.get_num_threads(), seed=seed, channel_first=False)
    return load_envpool().make(name, env_type="gymnasium", num_levels=num_levels, start_level=0, **options)


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
    """Parallel copies of a game: same-step reset, rewards normalized by running statistics.

    EnvPool alone resets in the step after an episode's end and ignores that step's action: not a real transition.
    """

    def __init__(self, envs, args: Args):
        self.envs, self.args = envs, args
        self.num_actions = int(envs.action_space.n)
        self.return_stats = RunningStats()
        self.episodes = [(0.0, 0, 0.0)] * len(envs)  # return, length and discounted return of those in progress
        self.finished = []  # (global step, return, length) of episodes that ended and are not logged yet
        self.global_step = 0
        self.obs, _ = envs.reset()  # what the policy acts on next

    def step(self, actions):
        """Returns next observations (before any reset), rewards, terminated, truncated. `self.obs` is after resets."""
        next_obs, rewards, terminated, truncated, _ = self.envs.step(actions)
        self.global_step += len(self.envs)
        self.obs = next_obs
        ended = np.flatnonzero(terminated | truncated)
        if len(ended):
            self.obs = next_obs.copy()
            self.obs[ended], _ = self.envs.reset(ended.astype(np.int32))
        return next_obs, rewards, terminated, truncated

    def scale_rewards(self, rewards, terminated, truncated):
        """Divides each reward by the running standard deviation of the discounted return. Records finished episodes."""
        ends = terminated | truncated
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
                    episode_return, length, discounted = 0.0, 0, 0.0
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


class ResidualBlock(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(channels, channels, 3, padding=1) for _ in range(2))

    def forward(self, x):
        first, second = self.convs
        return second(first(x.relu()).relu_()).add_(x)


class Agent(nn.Module):
    """The network of IMPALA (Espeholt et al., 2018), shared by actor and critic up to their last layers. `masks` are
    dropout masks for the inputs and outputs of the hidden layer, side by side: one sample of the weights for all rows
    of a batch, or one for each row. Without masks it is the posterior mean."""

    def __init__(self, envs: Envs, args: Args):
        super().__init__()
        layers, channels = [], 3
        for out in (16, 32, 32):
            layers += [nn.Conv2d(channels, out, 3, padding=1), nn.MaxPool2d(3, stride=2, padding=1)]
            layers += [ResidualBlock(out), ResidualBlock(out)]
            channels = out
        self.convs = nn.Sequential(*layers)
        self.hidden = (SpectralLinear if args.spectral_norm else nn.Linear)(FEATURES, WIDTH)
        self.actor = init_layer(nn.Linear(WIDTH, envs.num_actions), 0.01)
        self.critic = init_layer(nn.Linear(WIDTH, 1), 1.0)
        self.to(memory_format=torch.channels_last)  # on CPU twice as fast to train and three times as fast to act

    def forward(self, frames, masks=None):
        """Logits and values of frames as EnvPool gives them: bytes, channels last."""
        before, after = (1.0, 1.0) if masks is None else masks.split([FEATURES, WIDTH], dim=-1)
        x = frames.permute(0, 3, 1, 2).float().div_(255.0)
        x = self.convs(x).relu_().flatten(1) * before
        x = torch.relu(self.hidden(x)) * after
        return self.actor(x), self.critic(x).squeeze(-1)


def precision(args: Args, device: torch.device):
    return torch.autocast(device.type, torch.bfloat16, enabled=args.mixed_precision)


def part_size(device: torch.device) -> int:
    """Frames to pass through the network at once. On CPU the activations of this many stay in the cache, which gains
    more than a larger batch would."""
    return 32 if device.type == "cpu" else 4096


@torch.no_grad()
def infer(agent: Agent, frames: torch.Tensor, masks: torch.Tensor, args: Args):
    """Logits and values of any number of frames."""
    size = part_size(frames.device)
    rows = masks.expand(len(frames), -1)
    with precision(args, frames.device):
        parts = [agent(*part) for part in zip(frames.split(size), rows.split(size))]
    return [torch.cat(x).float() for x in zip(*parts)]


# -------------------------------------------------------------------------------------------------------- learning
# Arrays of shape (num_steps, num_envs, ...). `last_obs` is what the rollout ended on, `final_obs` has the observations
# that a time limit cut off, by step and environment.
Rollout = namedtuple("Rollout", "obs actions logprobs rewards last_obs final_obs terminated truncated")

# A rollout or a minibatch of it, as tensors with one row per step. `masks` is a minibatch's sample of the weights.
Batch = namedtuple("Batch", "obs actions logprobs advantages returns values next_values masks", defaults=[None])


@torch.no_grad()
def collect_rollout(envs: Envs, test_envs: Envs, agent: Agent, args: Args, obs: torch.Tensor) -> Rollout:
    """Lines 2 to 8: act for num_steps. Every step of every environment samples its own weights. The posterior mean
    plays the test levels alongside, in the same batches. Observations go into `obs` and stay bytes."""
    steps, n, device = args.num_steps, args.num_envs, obs.device
    if args.spectral_norm:
        agent.hidden.converge()  # one iteration per gradient lags behind; the layer that acts has a spectral norm of 1
    actions = np.empty((2, steps, n), dtype=np.int32)
    logprobs, rewards = np.empty((2, steps, n))
    test_rewards = np.empty((steps, n))
    (terminated, truncated), test_ends = np.empty((2, 2, steps, n), dtype=bool)
    final_obs = {}
    p = args.dropout_rate if args.thompson else 0.0
    test_masks = sample_masks(n, FEATURES + WIDTH, p=0.0, device=device)
    for t in range(steps):
        obs[t].copy_(torch.as_tensor(envs.obs))
        masks = torch.cat([sample_masks(n, FEATURES + WIDTH, p=p, device=device), test_masks])  # line 5
        frames = torch.as_tensor(np.concatenate([envs.obs, test_envs.obs])).to(device)
        logits, _ = infer(agent, frames, masks, args)
        log_p = logits.log_softmax(-1)
        chosen = torch.multinomial(log_p.exp(), 1)  # line 6
        actions[:, t] = chosen.view(2, n).cpu().numpy()
        logprobs[t] = log_p.gather(1, chosen)[:n, 0].cpu().numpy()
        next_obs, rewards[t], terminated[t], truncated[t] = envs.step(actions[0, t])  # lines 7 and 8
        for i in np.flatnonzero(truncated[t]) if args.bootstrap_truncated else ():
            final_obs[t, i] = next_obs[i]
        _, test_rewards[t], *test_ends[:, t] = test_envs.step(actions[1, t])
    rewards = envs.scale_rewards(rewards, terminated, truncated)
    test_envs.scale_rewards(test_rewards, *test_ends)
    return Rollout(obs, actions[0], logprobs, rewards, envs.obs, final_obs, terminated, truncated)


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
    obs = rollout.obs.flatten(0, 1)
    cut_obs = torch.as_tensor(np.array([*rollout.last_obs, *rollout.final_obs.values()]), device=device)
    masks = sample_masks(FEATURES + WIDTH, p=args.dropout_rate if args.thompson else 0.0, device=device)
    values, cut_values = (infer(agent, frames, masks, args)[1].cpu().numpy() for frames in (obs, cut_obs))
    values = values.reshape(rollout.rewards.shape)
    last_values, final_values = np.split(cut_values, [args.num_envs])
    next_values = np.concatenate([values[1:], last_values[None]])
    next_values[ends] = 0.0
    for (t, i), value in zip(rollout.final_obs, final_values):
        next_values[t, i] = value
    advantages = gae(rollout.rewards, values, next_values, ends, args.gamma, args.gae_lambda)
    actions = torch.tensor(rollout.actions, dtype=torch.int64, device=device).flatten(0, 1)
    columns = (rollout.logprobs, advantages, advantages + values, values, next_values)
    columns = (torch.tensor(x, dtype=torch.float32, device=device).flatten(0, 1) for x in columns)
    return Batch(obs, actions, *columns)


def minibatches(batch: Batch, args: Args):
    """Shuffled minibatches for one epoch, each with its own sample of the weights: lines 14 and 16."""
    device = batch.obs.device
    for rows in torch.randperm(args.batch_size, device=device).chunk(args.num_minibatches):
        masks = sample_masks(FEATURES + WIDTH, p=args.dropout_rate, device=device)
        yield Batch(*(x[rows] for x in batch[:-1]), masks)


def loss_function(agent: Agent, minibatch: Batch, args: Args):
    """Lines 15 and 17: h+ times the score for the actor, squared error for the critic, under one sample for both."""
    h_plus = torch.relu(minibatch.advantages) if args.relu_advantage else minibatch.advantages
    with precision(args, minibatch.obs.device):
        logits, values = agent(minibatch.obs, minibatch.masks)
    log_p = logits.float().log_softmax(-1)
    logprobs = log_p.gather(1, minibatch.actions.unsqueeze(1)).squeeze(1)
    policy_loss = -(h_plus * logprobs).mean()
    value_loss = F.mse_loss(values.float(), minibatch.returns)
    entropy = -(log_p.exp() * log_p).sum(-1).mean()
    loss = policy_loss + args.vf_coef * value_loss - args.ent_coef * entropy
    logratio = logprobs - minibatch.logprobs
    approx_kl = (logratio.exp() - 1 - logratio).mean()
    return loss, dict(policy_loss=policy_loss, value_loss=value_loss, entropy=entropy, approx_kl=approx_kl)


def gradients(agent: Agent, minibatch: Batch, args: Args):
    """The clipped gradient of a minibatch, by parameter, summed over its parts. --compile compiles this function."""
    if args.spectral_norm:
        agent.hidden.power_iteration()
    parameters = dict(agent.named_parameters())

    def loss(parameters, part):
        return loss_function(lambda *inputs: functional_call(agent, parameters, inputs), part, args)

    grads, stats = {}, {}
    for columns in zip(*(x.split(part_size(x.device)) for x in minibatch[:-1])):
        part, share = Batch(*columns, minibatch.masks), len(columns[0]) / len(minibatch.obs)
        part_grads, part_stats = grad(loss, has_aux=True)(parameters, part)
        for sums, terms in ((grads, part_grads), (stats, part_stats)):
            for name, x in terms.items():
                sums[name] = sums.get(name, 0.0) + share * x
    stats["grad_norm"] = norm = torch.stack([x.square().sum() for x in grads.values()]).sum().sqrt()
    scale = (args.max_grad_norm / (norm + 1e-6)).clamp(max=1.0)
    return [x * scale for x in grads.values()], stats


def make_optimizer(agent: Agent, args: Args) -> torch.optim.Optimizer:
    # No weight decay: line 10 times the learning rate is 1.3e-8 with 16,384 steps per rollout, and lost in rounding.
    return torch.optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5, fused=True)


@torch.no_grad()  # `gradients` differentiates by itself
def learn(args: Args, envs: Envs, test_envs: Envs, agent: Agent, optimizer, device, gradients=gradients):
    """The training loop. Yields after every iteration, for logging and checkpoints."""
    parameters = list(agent.parameters())
    obs = torch.empty((args.num_steps, *envs.obs.shape), dtype=torch.uint8, device=device)
    for iteration in range(envs.global_step // args.batch_size + 1, args.num_iterations + 1):
        if args.anneal_lr:
            optimizer.param_groups[0]["lr"] = args.learning_rate * (1 - (iteration - 1) / args.num_iterations)
        rollout = collect_rollout(envs, test_envs, agent, args, obs)
        batch = compute_advantages(agent, rollout, args, device)
        stats = []
        for _ in range(args.update_epochs):
            for minibatch in minibatches(batch, args):
                grads, stat = gradients(agent, minibatch, args)
                for parameter, x in zip(parameters, grads):
                    parameter.grad = x
                optimizer.step()
                stats.append(torch.stack(list(stat.values())))
        yield iteration, batch, dict(zip(stat, torch.stack(stats, dim=1)))


# ================================================================================================================
# That was the algorithm. What follows keeps a run alive and decides nothing about what is learned.
# ================================================================================================================


@dataclass
class RunFlags:
    exp_name: str = Path(__file__).stem  # name of the experiment, part of the run folder's name
    cuda: bool = True  # use a GPU if there is one
    compile: bool = False  # compile the gradient with torch.compile, on a GPU; on CPU it gains nothing
    checkpoint_every: int = 20_480  # steps between checkpoints in runs/; SIGTERM and Ctrl-C leave one as well
    resume: Path | None = None  # resume the run in this folder with its saved arguments; --total-timesteps extends it
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
    if not (args.cuda and torch.cuda.is_available()) and (args.compile or args.mixed_precision):
        fail("--compile and --mixed-precision need --cuda and a GPU")
    if args.env_id not in GAMES:
        near = difflib.get_close_matches(args.env_id, GAMES, n=3, cutoff=0.0)
        fail(f"--env-id: unknown game {args.env_id!r}; did you mean {', '.join(near)}?")
    make_envs(args, args.num_levels, args.seed).close()


def load_envpool():
    """EnvPool. Its games need libraries of Qt 5, which the package PyQt5-Qt5 brings along, in this order."""
    try:
        files = {file.name: str(file.locate()) for file in metadata.files("PyQt5-Qt5") or ()}
        for name in ("libicudata", "libicuuc", "libicui18n", "libQt5Core", "libQt5Gui"):
            (path,) = [files[file] for file in files if file.startswith(f"{name}.so")]
            ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
        import envpool
    except (metadata.PackageNotFoundError, ImportError, OSError, ValueError) as error:
        reason = str(error).partition(chr(10))[0]
        fail(f"ProcGen cannot be loaded ({reason}): pip install -r requirements-procgen.txt")
    return envpool


@torch.no_grad()
def save(run_dir: Path, args: RunArgs, agent: Agent, optimizer, envs: Envs, progress):
    """A checkpoint has everything needed to continue, but for the episodes in progress. A policy has the weights as in
    a rollout, with the spectral norm folded in."""
    stats = (envs.return_stats.count, torch.tensor(envs.return_stats.mean), torch.tensor(envs.return_stats.m2))
    weights = {name: x.cpu().clone() for name, x in agent.state_dict().items()}
    state = dict(agent=weights, optimizer=optimizer.state_dict(), stats=stats, step=envs.global_step)
    state |= dict(returns=list(progress.returns), test_returns=list(progress.test_returns))
    state |= dict(random=torch.get_rng_state(), random_cuda=torch.cuda.get_rng_state_all())
    weights = {name: x for name, x in weights.items() if name not in ("hidden.u", "hidden.v")}
    if args.spectral_norm:
        agent.hidden.converge()
        weights["hidden.weight"] = weights["hidden.weight"] / agent.hidden.sigma().cpu()
    policy = dict(env_id=args.env_id, weights=weights)
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


def restore(state: dict, agent: Agent, optimizer, envs: Envs, test_envs: Envs):
    """The episodes in progress start again: a game cannot be put back into the middle of one."""
    agent.load_state_dict(state["agent"])
    optimizer.load_state_dict(state["optimizer"])
    envs.global_step = test_envs.global_step = state["step"]
    count, mean, m2 = state["stats"]
    envs.return_stats.count, envs.return_stats.mean, envs.return_stats.m2 = count, mean.numpy(), m2.numpy()
    torch.set_rng_state(state["random"])
    torch.cuda.set_rng_state_all(state["random_cuda"])


class Progress:
    """A progress bar on a terminal, otherwise a line every half minute."""

    def __init__(self, total: int, step: int = 0, returns: list = (), test_returns: list = ()):
        self.returns, self.test_returns = deque(returns, maxlen=100), deque(test_returns, maxlen=100)
        self.first, self.start = step, time.time()
        self.next_line = self.start + 30
        options = dict(unit="step", unit_scale=True, file=sys.stdout)
        self.bar = tqdm(total=total, initial=step, disable=not (sys.stdout and sys.stdout.isatty()), **options)

    def means(self) -> list[float]:
        """Of the returns of training and of test episodes."""
        return [np.mean(x or math.nan) for x in (self.returns, self.test_returns)]

    def update(self, step: int) -> float:
        rate = (step - self.first) / (time.time() - self.start)  # of this process
        result = "return {:.2f}  test {:.2f}".format(*self.means())
        self.bar.set_postfix_str(result, refresh=False)
        self.bar.update(step - self.bar.n)
        if self.bar.disable and time.time() > self.next_line:
            left = tqdm.format_interval((self.bar.total - step) / rate)
            say(f"step {step}/{self.bar.total}  {rate:.0f} steps/s  {result}  {left} left")
            self.next_line = time.time() + 30
        return rate


@torch.no_grad()
def log(writer: SummaryWriter, step: int, agent: Agent, batch: Batch, stats: dict, args: RunArgs):
    scalars = {f"losses/{name}": values.mean() for name, values in stats.items()}
    scalars["losses/explained_variance"] = 1 - batch.advantages.var() / batch.returns.var()
    # Of the actions taken: the share of positive advantages, and the additive term C_pi of Theorem 3.1.
    scalars["vsop/positive_advantages"] = (batch.advantages > 0).float().mean()
    scalars["vsop/c_pi"] = torch.relu(args.gamma * batch.next_values - batch.values).mean()
    # How far samples of the actor disagree, by a generator of its own: logging does not change learning.
    obs = batch.obs[:: max(1, args.batch_size // 32)]
    generator = torch.Generator(obs.device).manual_seed(step)
    masks = sample_masks(16, FEATURES + WIDTH, p=args.dropout_rate, device=obs.device, generator=generator)
    logits, _ = infer(agent, obs.repeat(16, 1, 1, 1), masks.repeat_interleave(len(obs), dim=0), args)
    scalars["vsop/disagreement"] = logits.softmax(-1).unflatten(0, (16, -1)).std(0).mean()
    writer.add_histogram("vsop/advantages", batch.advantages, step)
    writer.add_histogram("vsop/relu_advantages", batch.advantages.relu(), step)
    if args.spectral_norm:
        agent.hidden.converge()  # as in a rollout, which does it again: logging does not change learning
    weight = agent.hidden.weight / (agent.hidden.sigma() if args.spectral_norm else 1.0)
    scalars["spectral_norm/hidden"] = torch.linalg.matrix_norm(weight, 2)
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
    boxes = tyro.cli(dict, default=dict(learning=Args(), run=RunFlags()), config=[tyro.conf.OmitArgPrefixes], **flags)
    args = RunArgs(**vars(boxes["learning"]), **vars(boxes["run"]))
    if args.resume:
        saved = RunArgs(**load_checkpoint(args.resume)["args"])
        args = tyro.cli(RunArgs, default=saved, **flags)
        for x in fields(Args):
            given, has = getattr(args, x.name), getattr(saved, x.name)
            if given != has and x.name != "total_timesteps":
                fail(f"--{x.name.replace('_', '-')} {given} contradicts {args.resume}, which has {has}")
    return args


def train(args: RunArgs):
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
    saved = load_checkpoint(run_dir) if args.resume else dict(step=0, returns=[], test_returns=[])
    if args.num_iterations * args.batch_size <= saved["step"]:
        return say(f"{run_dir} is already at step {saved['step']}, nothing to do; --total-timesteps extends it")
    if args.track:
        import wandb

        where = dict(project=args.wandb_project_name, entity=args.wandb_entity, name=run_dir.name, id=run_dir.name)
        wandb.init(**where, resume="allow", config=asdict(args), sync_tensorboard=True, save_code=True)
    # With the same seeds a resumed run would play its first episodes once more.
    seeds = np.random.SeedSequence([args.seed, saved["step"] // args.batch_size]).generate_state(2) >> 1
    envs = Envs(make_envs(args, args.num_levels, int(seeds[0])), args)
    test_envs = Envs(make_envs(args, 0, int(seeds[1])), args)
    agent = Agent(envs, args).to(device)
    optimizer = make_optimizer(agent, args)
    if args.resume:
        try:
            restore(saved, agent, optimizer, envs, test_envs)
        except Exception as error:  # of another version of the task, for example
            fail(f"--resume: {run_dir / 'checkpoint.pt'} does not fit the run: {error!r:.200}")
    say(f"{run_dir}: {args.env_id}, on {device}" + (", compiling in the first iteration" if args.compile else ""))
    returns = (saved["returns"], saved["test_returns"])
    progress = Progress(args.num_iterations * args.batch_size, saved["step"], *returns)
    writer = SummaryWriter(str(run_dir), purge_step=saved["step"] + 1)  # later steps will be logged again
    rows = [f"|{name}|{value}|" for name, value in asdict(args).items()]
    writer.add_text("hyperparameters", "\n".join(["|param|value|", "|-|-|", *rows]), saved["step"])
    save(run_dir, args, agent, optimizer, envs, progress)
    signals = []  # received signals, handled after the current iteration; a second one exits immediately
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: signals.append(number) or signal.signal(number, signal.SIG_DFL))
    function = compiled(gradients, device) if args.compile else gradients
    played = (("charts", envs, progress.returns), ("test", test_envs, progress.test_returns))
    loop = learn(args, envs, test_envs, agent, optimizer, device, function)
    for iteration, batch, stats in loop:
        step, last = envs.global_step, iteration == args.num_iterations
        if not stats["grad_norm"].isfinite().all():
            fail(f"the loss is not finite at step {step}; what {run_dir} has is kept", code=1)
        for tag, games, returns in played:
            for when, episode_return, length in games.finished:
                writer.add_scalar(f"{tag}/episodic_return", episode_return, when)
                writer.add_scalar(f"{tag}/episodic_length", length, when)
                returns.append(episode_return)
            games.finished.clear()
        if progress.returns and progress.test_returns:
            mean, test_mean = progress.means()
            writer.add_scalar("test/gap", mean - test_mean, step)
        writer.add_scalar("charts/learning_rate", optimizer.param_groups[0]["lr"], step)
        writer.add_scalar("charts/SPS", progress.update(step), step)
        log(writer, step, agent, batch, stats, args)
        if last or signals or step % args.checkpoint_every < args.batch_size:
            writer.flush()
            save(run_dir, args, agent, optimizer, envs, progress)
        if signals:
            print(f"stopped at step {step}; to continue: --resume {run_dir}", file=sys.stderr)
            sys.exit(128 + signals[0])
    progress.bar.close()
    writer.close()
    for (_, _, returns), kind, mean in zip(played, ("training", "test"), progress.means()):
        say(f"{run_dir}: mean return of the last {len(returns)} {kind} episodes {mean:.2f}")


if __name__ == "__main__":
    train(parse_args())
