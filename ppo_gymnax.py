# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "gymnax==1.0.1",
#     "jax==0.10.2",
#     "numpy==2.4.6",
#     "optax==0.2.8",
#     "six==1.17.0",
#     "tensorboard==2.21.0",
#     "tqdm==4.70.1",
#     "tyro==1.0.16",
#     "wandb==0.31.0",
# ]
# ///
"""PPO in JAX: many seeds in one call, on the tasks of Gymnax and Brax, with discrete or continuous actions.

Several epochs on the same rollout, while the probability ratio stays close to 1:

    J = E[ min(rho h(s, a), clip(rho, 1 - eps, 1 + eps) h(s, a)) ],   rho = pi(a | s, theta) / pi(a | s, theta_old)

    python ppo_gymnax.py --env-id CartPole-v1 --num-seeds 20

Paper: "ReLU to the Rescue: Improve Your On-Policy Actor-Critic with Positive Advantages" (ICML 2024), appendix "Gymnax
Environments". As published there, dropout (theta ~ q(theta | theta_hat, p)) and spectral norm are off.
"Line n" in a comment is a line of Algorithm 1, listed at the top of vsop_continuous.py.
"""

import fcntl
import json
import os
import re
import signal
import sys
import threading
import time
from collections import namedtuple
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass, fields, make_dataclass
from functools import partial
from pathlib import Path
from typing import Literal

# One thread: matrices of this size gain nothing from more. More cores are more processes, each with its own seeds.
os.environ.setdefault("PJRT_NPROC", "1")
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path.home() / ".cache" / "jax"))  # compile once for all runs

try:
    import gymnax
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
    import tyro
    from gymnax.environments.spaces import Box, Discrete
    from jax import random
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.summary.writer import event_file_writer
    from tqdm import tqdm
except ModuleNotFoundError as error:
    sys.exit(f"error: {error}: pip install -r requirements-gymnax.txt")


@dataclass
class Args:  # defaults for Classic Control, and for tasks in no family of the paper's
    env_id: str = "CartPole-v1"  # Gymnax id, or brax/<name>; decides the defaults of what follows
    seed: int = 1  # first seed of the environments, the initial weights and all sampling
    num_seeds: int = 1  # number of seeds trained at once: seed, seed + 1, ...
    total_timesteps: int = 500_000  # environment steps to train each seed for, over all environments
    num_envs: int = 8  # number of parallel environments
    num_steps: int = 8  # steps per environment in a rollout
    learning_rate: float = 1e-3  # learning rate of the optimizer
    anneal_lr: bool = True  # anneal the learning rate linearly to 0 over total_timesteps
    gamma: float = 0.99  # discount factor
    gae_lambda: float = 0.54  # lambda of generalized advantage estimation
    num_minibatches: int = 8  # minibatches per epoch
    update_epochs: int = 3  # passes over each rollout
    max_grad_norm: float = 3.4  # gradients are clipped to this norm
    clip_coef: float = 0.2  # epsilon: how far the probability ratio, and the value, may move from the old one
    ent_coef: float = 0.01  # coefficient of the entropy bonus
    vf_coef: float = 0.5  # coefficient of the value loss, half the critic's squared error
    width: int = 64  # units in each of the two hidden layers
    activation: Literal["tanh", "relu"] = "tanh"  # activation of the hidden layers
    dropout_rate: float = 0.0  # p, probability of dropping a hidden unit; above 0 it sets the weight decay too
    spectral_norm: bool = False  # divide the hidden layers by their spectral norm
    norm_obs: bool = False  # normalize observations by their running mean and variance
    norm_reward: bool = False  # divide rewards by the running standard deviation of the discounted return
    bootstrap_truncated: bool = False  # bootstrap from v(final observation) at a time limit; the authors' code does not

    @property
    def batch_size(self) -> int:
        return self.num_envs * self.num_steps

    @property
    def num_iterations(self) -> int:
        return self.total_timesteps // self.batch_size


# What the paper's tables change for its two other families of tasks.
MINATAR = dict(total_timesteps=10_000_000, num_envs=128, num_steps=64, learning_rate=9e-4, gae_lambda=0.70)
MINATAR |= dict(num_minibatches=8, update_epochs=10, max_grad_norm=1.9, width=512, activation="relu")
BRAX = dict(total_timesteps=50_000_000, num_envs=2048, num_steps=10, learning_rate=4.5e-4, gae_lambda=0.714)
BRAX |= dict(num_minibatches=32, update_epochs=3, max_grad_norm=3.3, width=512, activation="relu")
BRAX |= dict(ent_coef=0.0, norm_obs=True, norm_reward=True)

Batch = namedtuple("Batch", "obs actions logprobs advantages returns values")  # a rollout with one row per step


# -------------------------------------------------------------------------------------------------------- networks
def init_layers(key, inputs, outputs, out_gain, args):
    """(weight, bias) of two hidden layers and the output."""
    sizes, gains = (inputs, args.width, args.width, outputs), (2**0.5, 2**0.5, out_gain)
    layers = zip(random.split(key, 3), gains, sizes, sizes[1:])
    return [(jax.nn.initializers.orthogonal(gain)(key, (m, n)), jnp.zeros(n)) for key, gain, m, n in layers]


def power_iteration(params):
    """Moves each v towards where sigma = |Wv| is the spectral norm of its layer (Miyato et al., 2018)."""
    vectors = {name: [w.T @ (w @ v) for (w, _), v in zip(params[name], vs)] for name, vs in params["vectors"].items()}
    return params | dict(vectors=jax.tree.map(lambda v: v / jnp.linalg.norm(v), vectors))


def converge(params):
    """Layers that act have a spectral norm of 1. One power iteration per gradient step lags behind."""
    return jax.lax.fori_loop(0, 100, lambda _, x: power_iteration(x), params)


def normalized(params, name):
    """The layers of actor or critic, hidden ones divided by their sigma. Without spectral norm there are no vectors."""
    layers, vectors = params[name], jax.lax.stop_gradient(params["vectors"][name])
    return [(w / jnp.linalg.norm(w @ v), b) for (w, b), v in zip(layers, vectors)] + layers[len(vectors) :]


def sample_masks(key, *shape, p):
    """Samples of the dropout posterior: 0 with probability p, else 1 / (1 - p), so that the mean is 1."""
    return random.bernoulli(key, 1 - p, shape) / (1 - p) if p else jnp.ones((shape[0], 1))


def forward(layers, x, masks, args):
    """`masks` has one for each hidden layer. All rows of a batch share it in an update: one sample of the weights."""
    *hidden, (weight_out, bias_out) = layers
    for (weight, bias), mask in zip(hidden, masks):
        x = dict(tanh=jnp.tanh, relu=jax.nn.relu)[args.activation](x @ weight + bias) * mask
    return x @ weight_out + bias_out


def logprobs_and_entropy(outputs, log_std, actions):
    """Of a Gaussian policy or, without log_std, of a softmax over discrete actions."""
    if log_std is None:
        logits = jax.nn.log_softmax(outputs)
        logprobs = (logits * jax.nn.one_hot(actions, outputs.shape[-1])).sum(-1)
        return logprobs, -(jnp.exp(logits) * logits).sum(-1)
    logprobs = jax.scipy.stats.norm.logpdf(actions, outputs, jnp.exp(log_std)).sum(-1)
    return logprobs, (log_std + 0.5 * np.log(2 * np.pi * np.e)).sum()


# -------------------------------------------------------------------------------------------------------- learning
def update_stats(stats, x):
    """Count, mean and variance of all rows so far, with those of x."""
    count, mean, var = stats
    share, delta = len(x) / (count + len(x)), x.mean(0) - mean
    return count + len(x), mean + share * delta, (1 - share) * (var + share * delta**2) + share * x.var(0)


def normalize(x, mean, var):
    return ((x - mean) / jnp.sqrt(var + 1e-8)).clip(-10.0, 10.0)


def collect_rollout(params, envs, key, env, args):
    """Lines 2 to 8: act for num_steps. Every step of every environment samples its own actor weights."""
    actor, log_std = normalized(params, "actor"), params["log_std"]

    def step(old, key):
        key_masks, key_action, key_envs = random.split(key, 3)
        obs, obs_stats, return_stats = old["obs"], old["obs_stats"], old["return_stats"]
        if args.norm_obs:
            obs_stats = update_stats(obs_stats, obs)
            obs = normalize(obs, *obs_stats[1:])
        masks = sample_masks(key_masks, 2, args.num_envs, args.width, p=args.dropout_rate)  # line 5
        outputs = forward(actor, obs, masks, args)
        if log_std is None:
            actions = random.categorical(key_action, outputs)  # line 6
        else:
            actions = outputs + jnp.exp(log_std) * random.normal(key_action, outputs.shape)
        logprobs, _ = logprobs_and_entropy(outputs, log_std, actions)
        keys = random.split(key_envs, args.num_envs)
        raw, state, rewards, terminated, truncated, info = jax.vmap(env.step)(keys, old["state"], actions)  # line 7
        ends, next_obs = terminated | truncated, info["final_observation"].reshape(args.num_envs, -1)
        returns, lengths, discounted = old["tally"]
        tally = jnp.stack([returns + rewards, lengths + 1, args.gamma * discounted + rewards])
        if args.norm_obs:
            next_obs = normalize(next_obs, *obs_stats[1:])
        if args.norm_reward:
            return_stats = update_stats(return_stats, tally[2])
            rewards = normalize(rewards, 0.0, return_stats[2])
        envs = dict(state=state, obs=raw.reshape(args.num_envs, -1), obs_stats=obs_stats, return_stats=return_stats)
        envs |= dict(tally=jnp.where(ends, 0.0, tally), ended=jnp.where(ends, tally, old["ended"]))
        return envs, (obs, actions, logprobs, rewards, terminated, truncated, next_obs)  # line 8

    return jax.lax.scan(step, envs, random.split(key, args.num_steps))


def gae(rewards, values, next_values, ends, gamma, gae_lambda):
    """Generalized advantage estimation; `next_values` is 0 after a terminal step, and no sum crosses an end."""
    xs = (rewards + gamma * next_values - values, gamma * gae_lambda * ~ends)
    return jax.lax.scan(lambda after, x: (x[0] + x[1] * after,) * 2, jnp.zeros_like(values[0]), xs, reverse=True)[1]


def compute_advantages(params, rollout, key, args) -> Batch:
    """Lines 9 and 13: advantages and returns under one sample of the critic, taken before the update."""
    obs, actions, logprobs, rewards, terminated, truncated, next_obs = rollout
    critic, ends = normalized(params, "critic"), terminated | truncated
    masks = sample_masks(key, 2, args.width, p=args.dropout_rate)
    values = forward(critic, obs, masks, args)[..., 0]
    if args.bootstrap_truncated:
        next_values = jnp.where(terminated, 0.0, forward(critic, next_obs, masks, args)[..., 0])
    else:
        last_values = forward(critic, next_obs[-1:], masks, args)[..., 0]
        next_values = jnp.where(ends, 0.0, jnp.concatenate([values[1:], last_values]))
    advantages = gae(rewards, values, next_values, ends, args.gamma, args.gae_lambda)
    columns = (obs, actions, logprobs, advantages, advantages + values, values)
    return Batch(*(x.reshape(args.batch_size, *x.shape[2:]) for x in columns))


def loss_function(params, minibatch: Batch, masks, args):
    """The clipped surrogate for the actor, the clipped squared error for the critic, each under its own sample."""
    outputs = forward(normalized(params, "actor"), minibatch.obs, masks[:2], args)
    values = forward(normalized(params, "critic"), minibatch.obs, masks[2:], args)[:, 0]
    logprobs, entropy = logprobs_and_entropy(outputs, params["log_std"], minibatch.actions)
    logratio = logprobs - minibatch.logprobs
    advantages = (minibatch.advantages - minibatch.advantages.mean()) / (minibatch.advantages.std() + 1e-8)
    ratio, clip = jnp.exp(logratio), args.clip_coef
    policy_loss = -jnp.minimum(ratio * advantages, ratio.clip(1 - clip, 1 + clip) * advantages).mean()
    clipped = minibatch.values + (values - minibatch.values).clip(-clip, clip)
    value_loss = 0.5 * jnp.maximum((values - minibatch.returns) ** 2, (clipped - minibatch.returns) ** 2).mean()
    stats = dict(policy_loss=policy_loss, value_loss=value_loss, entropy=entropy.mean())
    stats["approx_kl"] = (ratio - 1 - logratio).mean()
    stats["clipfrac"] = (jnp.abs(ratio - 1) > clip).mean()
    return policy_loss + args.vf_coef * value_loss - args.ent_coef * stats["entropy"], stats


def make_optimizer(args):
    decay = (1 - args.dropout_rate) / (2 * args.batch_size) if args.dropout_rate else 0.0  # line 10
    return optax.chain(optax.clip_by_global_norm(args.max_grad_norm), optax.adamw(1.0, eps=1e-5, weight_decay=decay))


def init(seed, env, args) -> dict:
    """All there is to the training of one seed, as a pytree."""
    key, key_envs, key_actor, key_critic = random.split(random.PRNGKey(seed), 4)
    obs, env_state = jax.vmap(env.reset)(random.split(key_envs, args.num_envs))
    obs, space = obs.reshape(args.num_envs, -1), env.action_space()
    obs_stats = (0.0, *jnp.zeros((2, obs.shape[1])))
    envs = dict(state=env_state, obs=obs, obs_stats=obs_stats, return_stats=(0.0, 0.0, 0.0))
    # Return, length and discounted return of the episodes in progress, and of the last that ended: NaN if none has.
    envs |= dict(tally=jnp.zeros((3, args.num_envs)), ended=jnp.full((3, args.num_envs), jnp.nan))
    outputs, log_std = (space.n, None) if isinstance(space, Discrete) else (space.shape[0], jnp.zeros(space.shape))
    actor = init_layers(key_actor, obs.shape[1], outputs, 0.01, args)
    critic = init_layers(key_critic, obs.shape[1], 1, 1.0, args)
    vectors = [jnp.ones(args.width)] * 2 if args.spectral_norm else []
    params = dict(actor=actor, critic=critic, log_std=log_std, vectors=dict(actor=vectors, critic=vectors))
    return dict(iteration=0, key=key, envs=envs, params=params, opt_state=make_optimizer(args).init(params))


def update(state, env, args):
    """An iteration of Algorithm 1. Returns the next state and statistics."""
    key, key_rollout, key_critic, key_orders, key_masks = random.split(state["key"], 5)
    params = converge(state["params"]) if args.spectral_norm else state["params"]
    envs, rollout = collect_rollout(params, state["envs"], key_rollout, env, args)
    batch = compute_advantages(params, rollout, key_critic, args)
    lr = args.learning_rate * (1 - state["iteration"] / args.num_iterations if args.anneal_lr else 1)

    def step(carry, x):
        (params, opt_state), (rows, key) = carry, x
        params = power_iteration(params)
        masks = sample_masks(key, 4, args.width, p=args.dropout_rate)  # lines 14 and 16
        minibatch = Batch(*(column[rows] for column in batch))
        grads, stats = jax.grad(loss_function, has_aux=True)(params, minibatch, masks, args)
        updates, opt_state = make_optimizer(args).update(grads, opt_state, params)
        params = jax.tree.map(lambda x, update: x + lr * update, params, updates)
        return (params, opt_state), stats | dict(grad_norm=optax.tree.norm(grads))

    # A random order per epoch. Indices in the low bits of random numbers sort five times faster than pairs of the two.
    bits, shape = args.batch_size.bit_length(), (args.update_epochs, args.batch_size)
    orders = jnp.sort(random.bits(key_orders, shape) << bits | jnp.arange(args.batch_size, dtype=jnp.uint32))
    orders = (orders % 2**bits).reshape(args.update_epochs * args.num_minibatches, -1)
    keys = random.split(key_masks, len(orders))
    (params, opt_state), stats = jax.lax.scan(step, (params, state["opt_state"]), (orders, keys))
    stats = {f"losses/{name}": x.mean() for name, x in stats.items()} | {"charts/learning_rate": lr}
    stats["losses/explained_variance"] = 1 - batch.advantages.var() / batch.returns.var()
    return dict(iteration=state["iteration"] + 1, key=key, envs=envs, params=params, opt_state=opt_state), stats


def learn(states, count, env, args):
    """The training loop: `count` iterations of all seeds at once. Returns the states and the last statistics."""
    updates = jax.vmap(partial(update, env=env, args=args))
    stats = jax.tree.map(lambda x: jnp.zeros(x.shape), jax.eval_shape(updates, states)[1])
    return jax.lax.fori_loop(0, count, lambda _, x: updates(x[0]), (states, stats))


# ================================================================================================================
# That was the algorithm. What follows keeps a run alive and decides nothing about what is learned.
# ================================================================================================================


@dataclass
class RunFlags:
    exp_name: str = Path(__file__).stem  # name of the experiment, part of the run folder's name
    checkpoint_every: int = 100_000  # steps of a seed between checkpoints; SIGTERM and Ctrl-C leave one as well
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


def make_env(env_id: str):
    """A task of Gymnax, or one of Brax with the interface of Gymnax. There a reset costs as much as many steps: as in
    Brax's own training, an environment starts all its episodes alike."""
    try:
        if not env_id.startswith("brax/"):
            return gymnax.make(env_id)[0]
        with redirect_stdout(None):  # it prints which optional packages it lacks
            from brax import envs
        task = envs.create(env_id.removeprefix("brax/"), auto_reset=False)  # with a time limit of 1,000 steps
    except Exception as error:  # a task may raise anything
        fail(f"--env-id: cannot use {env_id}: {error!r:.200}")

    def reset(key):
        state = task.reset(key)
        return state.obs, (state, state)

    def step(key, states, action):
        first, state = states[0], task.step(states[1], action.clip(-1.0, 1.0))
        truncated, info = state.info["truncation"] > 0, dict(final_observation=state.obs)
        then = jax.tree.map(partial(jnp.where, state.done), first, state)
        return then.obs, (first, then), state.reward, (state.done > 0) & ~truncated, truncated, info

    space = Box(-1.0, 1.0, (task.action_size,))
    return namedtuple("BraxEnv", "reset step action_space")(reset, step, lambda: space)


def write(path: Path, tree, args: RunArgs):
    """The arrays of a tree by name, and the settings. Atomic: an interruption leaves the previous file."""
    arrays = {jax.tree_util.keystr(keys, simple=True, separator="/"): x for keys, x in jax.tree.leaves_with_path(tree)}
    part, meta = path.with_suffix(".part"), dict(script=Path(__file__).stem, args=asdict(args) | dict(resume=None))
    with open(part, "wb") as file:
        np.savez(file, meta=json.dumps(meta, default=str), **arrays)
    part.replace(path)


def save_checkpoint(run_dir: Path, states: dict, writers: list, args: RunArgs):
    """Everything needed to continue as if nothing had happened and, for each seed, everything needed to act."""
    states = jax.device_get(states)
    for i, writer in enumerate(writers):
        writer.flush()
        state = jax.tree.map(partial(np.take, indices=i, axis=0), states)
        params = converge(state["params"]) if args.spectral_norm else state["params"]
        policy = dict(layers=normalized(params, "actor"), log_std=params["log_std"])
        if args.norm_obs:
            _, mean, var = state["envs"]["obs_stats"]
            policy |= dict(obs_mean=mean, obs_std=np.sqrt(var + 1e-8))
        write(run_dir / f"seed_{args.seed + i}" / "policy.npz", policy, args)
    write(run_dir / "checkpoint.npz", states, args)


def load_checkpoint(run_dir: Path):
    """The arguments and the arrays of a run."""
    path, script = run_dir / "checkpoint.npz", Path(__file__).stem
    try:
        arrays = dict(np.load(path))
        meta = json.loads(str(arrays.pop("meta")))
        if meta["script"] != script or meta["args"].keys() != asdict(RunArgs()).keys():
            raise ValueError(f"written by {meta['script']}.py or another version of {script}.py")
        return meta["args"], arrays
    except Exception as error:  # a file that is not a checkpoint may raise anything
        fail(f"--resume: {path} cannot be used ({error!r:.200})")


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
    """From the command line, in two boxes of --help. The task decides the defaults or, with --resume, the saved
    arguments are used, and what decides learning is fixed."""
    argv = [f"{float(x):.0f}" if re.fullmatch(r"\d+e\d+", x) else x for x in sys.argv[1:]]  # 1e6 is an integer too
    first, _ = tyro.cli(RunArgs, args=argv, add_help=False, return_unknown_args=True)
    family = MINATAR if first.env_id.endswith("-MinAtar") else BRAX if first.env_id.startswith("brax/") else {}
    defaults = load_checkpoint(first.resume)[0] if first.resume else asdict(first) | vars(Args(first.env_id, **family))
    boxes = dict(learning=Args, run=RunFlags)
    boxes = {name: box(**{x.name: defaults[x.name] for x in fields(box)}) for name, box in boxes.items()}
    flags = dict(description=__doc__.partition("\n\n")[0], args=argv)
    boxes = tyro.cli(dict, default=boxes, config=[tyro.conf.OmitArgPrefixes], **flags)
    args = RunArgs(**vars(boxes["learning"]), **vars(boxes["run"]))
    limits = dict(seed=(0, 2**31 - 1), total_timesteps=(args.batch_size, np.inf))  # one rollout at least
    limits |= dict(gamma=(0, 1), gae_lambda=(0, 1), dropout_rate=(0, 0.99))
    for name, x in asdict(args).items():
        flag, (low, high) = f"--{name.replace('_', '-')}", limits.get(name, (int(type(x) is int), 2**31 - 1))
        if type(x) in (int, float) and not low <= x <= high:
            fail(f"{flag} must be in [{low}, {high}], got {x}")
        if args.resume and name in vars(Args()) and name != "total_timesteps" and x != defaults[name]:
            fail(f"{flag} {x} contradicts {args.resume}, which has {defaults[name]}")
    if args.batch_size % args.num_minibatches:
        fail(f"--num-minibatches {args.num_minibatches} does not divide a rollout of {args.batch_size} steps")
    return args


def log(writers: list, step: int, rate: float, states: dict, stats: dict):
    """To the TensorBoard file of each seed, except what is not known yet."""
    returns, lengths, _ = np.asarray(jnp.nanmean(states["envs"]["ended"], 2)).T
    stats |= {"charts/episodic_return": returns, "charts/episodic_length": lengths}
    stats["charts/SPS"] = np.full(len(writers), rate)
    for i, writer in enumerate(writers):
        values = [dict(tag=tag, simple_value=x[i]) for tag, x in stats.items() if np.isfinite(x[i])]
        writer.add_event(Event(wall_time=time.time(), step=step, summary=dict(value=values)))


def run(args: RunArgs, env, run_dir: Path):
    seeds, log_every = np.arange(args.seed, args.seed + args.num_seeds), max(1, args.num_iterations // 100)
    states = jax.device_get(jax.jit(jax.vmap(partial(init, env=env, args=args)))(seeds))
    if args.resume:
        states = jax.tree.unflatten(jax.tree.structure(states), load_checkpoint(run_dir)[1].values())
    iteration, start = int(states["iteration"][0]), time.time()
    step = saved_step = iteration * args.batch_size
    if iteration >= args.num_iterations and (run_dir / "results.json").exists():
        return say(f"{run_dir} is already at step {step}, nothing to do; --total-timesteps extends it")
    say(" ".join(f"{name}={x}" for name, x in asdict(args).items()))
    say(f"{run_dir}: {args.env_id}, {args.num_seeds} seed(s) on {jax.devices()[0].platform}, compiling")
    if args.track:
        import wandb

        where = dict(project=args.wandb_project_name, entity=args.wandb_entity, name=run_dir.name, id=run_dir.name)
        wandb.tensorboard.patch(root_logdir=str(run_dir))  # each seed has a folder below it
        wandb.init(**where, resume="allow", config=asdict(args), save_code=True)
    threading.excepthook = lambda error: None  # TensorBoard writes in a thread; its error comes up in the next call
    writers = [event_file_writer.EventFileWriter(str(run_dir / f"seed_{seed}")) for seed in seeds]
    for writer in writers:  # TensorBoard drops what an interrupted run logged after the checkpoint
        writer.add_event(Event(step=step + 1, session_log=dict(status="START")))
    save_checkpoint(run_dir, states, writers, args)
    signals = []  # received signals, handled after the current chunk; a second one exits immediately
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: signals.append(number) or signal.signal(number, signal.SIG_DFL))
    # A progress bar on a terminal, otherwise a line every half minute, with the steps of all seeds.
    first, total = step * args.num_seeds, args.num_iterations * args.batch_size * args.num_seeds
    options = dict(unit="step", unit_scale=True, file=sys.stdout)
    bar = tqdm(total=total, initial=first, disable=not (sys.stdout and sys.stdout.isatty()), **options)
    chunk, count, next_line = jax.jit(partial(learn, env=env, args=args), donate_argnums=0), 1, time.time() + 30
    while iteration < args.num_iterations:
        before, count = time.time(), min(count, args.num_iterations - iteration, log_every - iteration % log_every)
        states, stats = chunk(states, count)
        stats, iteration = jax.device_get(stats), iteration + count
        count = max(1, count // 2) if time.time() - before > 1 else 2 * count  # chunks of about a second
        step, last = iteration * args.batch_size, iteration == args.num_iterations
        if not np.isfinite(stats["losses/grad_norm"]).all():
            fail(f"a loss is not finite at step {step}; what {run_dir} has is kept", code=1)
        done, mean = step * args.num_seeds, float(jnp.nanmean(states["envs"]["ended"][:, 0]))
        rate = (done - first) / (time.time() - start)
        bar.set_postfix_str(f"return {mean:.2f}", refresh=False)
        bar.update(done - bar.n)
        if bar.disable and time.time() > next_line:
            left, next_line = tqdm.format_interval((total - done) / rate), time.time() + 30
            say(f"step {done}/{total}  {rate:.0f} steps/s  return {mean:.2f}  {left} left")
        if last or iteration % log_every == 0:
            log(writers, step, rate, states, stats)
        if last or signals or step - saved_step >= args.checkpoint_every:
            save_checkpoint(run_dir, states, writers, args)
            saved_step = step
        if signals:
            print(f"stopped at step {step}; to continue: --resume {run_dir}", file=sys.stderr)
            sys.exit(128 + signals[0])
    bar.close()
    returns = jnp.nanmean(states["envs"]["ended"][:, 0], 1)  # of each environment the last episode, as in the paper
    count, mean = int(jnp.isfinite(returns).sum()), float(jnp.nanmean(returns))
    error = float(jnp.nanstd(returns, ddof=1)) / max(count, 1) ** 0.5
    result = dict(seeds=seeds.tolist(), returns=returns.tolist(), mean=mean, standard_error=error, args=asdict(args))
    (run_dir / "results.json").write_text(json.dumps(result, default=str))
    spread = f", standard error {error:.2f}, 68 % interval [{mean - error:.2f}, {mean + error:.2f}]"
    say(f"{run_dir}: mean return of {count} seed(s) {mean:.2f}" + spread * (count > 1))


def train(args: RunArgs) -> Path:
    env = make_env(args.env_id)
    run_dir, _lock = open_run(args)
    try:
        run(args, env, run_dir)
    except Exception as error:
        # A full disk or memory, or W&B without an account, is told in one line.
        known = r"OSError.*(space left|quota|too large)|\w*MemoryError|\w*Error.*(RESOURCE_EXHAUSTED|memory)|UsageError"
        if not re.match(known, repr(error)):
            sys.excepthook(type(error), error, error.__traceback__)
        fail(f"{error!r:.200}; what {run_dir} has is kept", code=1)
    return run_dir


if __name__ == "__main__":
    train(parse_args())
