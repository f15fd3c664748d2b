"""The JAX scripts: vsop_gymnax.py, ppo_gymnax.py, a3c_gymnax.py and dpo_gymnax.py."""

import ast
import fcntl
import itertools
import json
import os
import re
import runpy
import signal
import subprocess
import sys
import time
import tomllib
from dataclasses import asdict, replace
from functools import partial
from importlib.util import find_spec
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import ROOT, load, random_minibatch, refused, run, run_dir, small_agent, wait_for
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

if not find_spec("gymnax"):
    pytest.skip("gymnax is not installed", allow_module_level=True)
VSOP, A3C, PPO, DPO = SCRIPTS = ("vsop_gymnax", "a3c_gymnax", "ppo_gymnax", "dpo_gymnax")
vsop = load(VSOP)  # before JAX, which reads the settings of the compilation cache when it is imported
import gymnax
import jax
import jax.numpy as jnp
from gymnax.environments.spaces import Box

# Nothing here is large, and compiling is most of the time.
jax.config.update("jax_disable_most_optimizations", True)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
SMALL = dict(num_envs=4, num_steps=8, num_minibatches=2, update_epochs=2, width=8, total_timesteps=320)
CLOSE = dict(rtol=1e-4, atol=1e-6)


@pytest.fixture(params=SCRIPTS)
def script(request):
    return load(request.param)


def start(script, env_id, seeds=(1,), **settings):
    """Settings, the task and the first states of some seeds."""
    args = script.Args(**(SMALL | dict(env_id=env_id) | settings))
    env = script.make_env(env_id)
    return args, env, jax.jit(jax.vmap(partial(script.init, env=env, args=args)))(jnp.array(seeds))


def one(tree):
    return jax.tree.map(lambda x: x[0], tree)


class Still:
    """A task in which nothing changes; it ends at every third step, by its time limit at every sixth."""

    def action_space(self):
        return Box(-1.0, 1.0, (2,))

    def reset(self, key):
        return jnp.ones(3), jnp.zeros((), jnp.int32)

    def step(self, key, time, action):
        time = time + 1
        return jnp.ones(3), time, 1.0, time % 6 == 3, time % 6 == 0, dict(final_observation=jnp.full(3, 2.0))


# ------------------------------------------------------------------------------------------------------ formulas


def test_gae_is_the_sum_it_stands_for():
    rng = np.random.default_rng(0)
    rewards, values, next_values = rng.normal(size=(3, 7, 2))
    ends = rng.random((7, 2)) < 0.3
    found = vsop.gae(*map(jnp.asarray, (rewards, values, next_values, ends)), 0.9, 0.7)
    for t, i in itertools.product(range(7), range(2)):
        expected, weight = 0.0, 1.0
        for k in range(t, 7):
            expected += weight * (rewards[k, i] + 0.9 * next_values[k, i] - values[k, i])
            if ends[k, i]:
                break
            weight *= 0.9 * 0.7
        np.testing.assert_allclose(found[t, i], expected, **CLOSE)


@pytest.mark.parametrize("bootstrap", [False, True])
def test_next_values_at_episode_ends(bootstrap):
    """Lambda 0 leaves reward + gamma * next value - value: nothing follows a terminal step, and v(final observation)
    follows a time limit if asked for."""
    args, env, states = start_still(bootstrap_truncated=bootstrap, gae_lambda=0.0)
    state = one(states)
    collect = jax.jit(partial(vsop.collect_rollout, env=env, args=args))
    _, rollout = collect(state["params"], state["envs"], state["key"])
    batch = vsop.compute_advantages(state["params"], rollout, state["key"], args)
    now, final = (
        vsop.forward(state["params"]["critic"], jnp.full((1, 3), x), jnp.ones((2, 1)), args)[0, 0] for x in (1.0, 2.0)
    )
    next_values = np.array([now, now, 0.0, now, now, final if bootstrap else 0.0, now, final])
    if bootstrap:  # every step leads to the same final observation in this task
        next_values[[0, 1, 3, 4, 6]] = final
    expected = 1.0 + args.gamma * next_values - now
    np.testing.assert_allclose(batch.advantages.reshape(8, 4)[:, 0], expected, **CLOSE)
    np.testing.assert_allclose(batch.returns, batch.advantages + now, **CLOSE)


def start_still(script=vsop, **settings):
    args = script.Args(**(SMALL | settings))
    return args, Still(), jax.jit(jax.vmap(partial(script.init, env=Still(), args=args)))(jnp.array([1]))


def test_running_statistics_are_those_of_all_rows():
    rows = np.random.default_rng(0).normal(3.0, 2.0, size=(5, 4, 3))
    stats = (0.0, jnp.zeros(3), jnp.zeros(3))
    for x in rows:
        stats = vsop.update_stats(stats, jnp.asarray(x))
    np.testing.assert_allclose(stats[1], rows.reshape(-1, 3).mean(0), **CLOSE)
    np.testing.assert_allclose(stats[2], rows.reshape(-1, 3).var(0), **CLOSE)


def numbers(discrete, seed=0):
    """A network's outputs for a minibatch, and the minibatch."""
    rng = np.random.default_rng(seed)
    n, dim = 6, 3
    outputs, values = rng.normal(size=(n, dim)), rng.normal(size=n)
    actions = rng.integers(dim, size=n) if discrete else rng.normal(size=(n, dim))
    log_std = None if discrete else rng.normal(size=dim) * 0.3
    logprobs, advantages, returns, old_values = rng.normal(size=(4, n)) * [[0.2], [1.0], [1.0], [1.0]]
    return outputs, values, log_std, actions, logprobs, advantages, returns, old_values


def loss_of(script, args, outputs, values, log_std, actions, logprobs, advantages, returns, old_values):
    """The script's loss where the networks give these outputs: the observation is both, and picks them out."""
    dim = outputs.shape[1]
    eye = jnp.eye(dim + 1)
    layers = [(eye, jnp.zeros(dim + 1))] * 2
    params = dict(actor=[*layers, (eye[:, :dim], jnp.zeros(dim))], critic=[*layers, (eye[:, dim:], jnp.zeros(1))])
    params |= dict(log_std=None if log_std is None else jnp.asarray(log_std), vectors=dict(actor=[], critic=[]))
    obs = jnp.concatenate([outputs, values[:, None]], 1)
    batch = script.Batch(obs, *map(jnp.asarray, (actions, logprobs, advantages, returns, old_values)))
    return script.loss_function(params, batch, jnp.ones((4, 1)), args)


def numpy_loss(name, args, outputs, values, log_std, actions, old_logprobs, advantages, returns, old_values):
    if log_std is None:
        p = np.exp(outputs) / np.exp(outputs).sum(1, keepdims=True)
        logprobs, entropy = np.log(p[np.arange(len(p)), actions]), -(p * np.log(p)).sum(1).mean()
    else:
        std = np.exp(log_std)
        density = np.exp(-0.5 * ((actions - outputs) / std) ** 2) / (std * np.sqrt(2 * np.pi))
        logprobs, entropy = np.log(density).sum(1), (0.5 * np.log(2 * np.pi * np.e * std**2)).sum()
    ratio, square = np.exp(logprobs - old_logprobs), (values - returns) ** 2
    if name in (PPO, DPO):
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
        moved = old_values + np.clip(values - old_values, -0.2, 0.2)
        value_loss = 0.5 * np.maximum(square, (moved - returns) ** 2).mean()
    else:
        value_loss = square.mean()
    if name == VSOP:
        objective = np.maximum(advantages, 0.0) * logprobs
    elif name == A3C:
        objective = advantages * logprobs
    elif name == PPO:
        objective = np.minimum(ratio * advantages, np.clip(ratio, 0.8, 1.2) * advantages)
    else:
        objective = ratio * advantages - np.array([drift(r, a) for r, a in zip(ratio, advantages)])
    return -objective.mean() + args.vf_coef * value_loss - args.ent_coef * entropy


def drift(ratio, advantage, alpha=2.0, beta=0.6):
    """Of Lu et al., "Discovered Policy Optimisation": what is subtracted from ratio * advantage."""
    x, scale = ((ratio - 1) * advantage, alpha) if advantage >= 0 else (np.log(ratio) * advantage, beta)
    return max(0.0, x - scale * np.tanh(x / scale))


@pytest.mark.parametrize("discrete", [True, False])
@pytest.mark.parametrize("name", SCRIPTS)
def test_losses_are_their_formulas(name, discrete):
    """The same closed formulas as those of the torch scripts' tests."""
    args = load(name).Args(activation="relu", ent_coef=0.3, vf_coef=0.7)
    for seed in range(5):
        inputs = numbers(discrete, seed)
        inputs[0][:], inputs[1][:] = abs(inputs[0]), abs(inputs[1])  # relu lets them pass
        loss, stats = loss_of(load(name), args, *inputs)
        np.testing.assert_allclose(loss, numpy_loss(name, args, *inputs), rtol=1e-4, atol=1e-5)
        assert all(jnp.isfinite(x) for x in stats.values())


def as_in_jax(agent):
    """The parameters of a torch agent. Converged, its u is what the JAX scripts call v, for they transpose weights."""
    params = dict(log_std=agent.log_std.detach().numpy(), vectors={})
    for name in ("actor", "critic"):
        network = getattr(agent, name)
        layers = [*network.hidden, network.out]
        params[name] = [(x.weight.detach().numpy().T, x.bias.detach().numpy()) for x in layers]
        params["vectors"][name] = [x.u.numpy() for x in network.hidden if hasattr(x, "u")]
    return jax.tree.map(jnp.asarray, params)


@pytest.mark.parametrize(
    "name, settings", [("vsop", dict(dropout_rate=0.3)), ("a3c", {}), ("ppo", dict(norm_adv=False))]
)
def test_losses_and_gradients_are_those_of_the_torch_scripts(name, settings):
    """At the same weights, minibatch and masks. PPO's advantages are normalized here for torch, which divides by
    another estimate of their deviation."""
    script, torch_script = load(f"{name}_gymnax"), load(f"{name}_continuous")
    torch_args, agent = small_agent(torch_script, ent_coef=0.3, vf_coef=0.7, **settings)
    for x in agent.parameters():
        x.data += 0.3 * torch.randn_like(x)
    [x.converge() for x in agent.modules() if hasattr(x, "converge")]
    minibatch = random_minibatch(torch_script, torch_args)
    masks = torch.ones(4, torch_args.width)
    if name == "vsop":
        masks = torch_script.sample_masks(4, torch_args.width, p=0.3)
        minibatch = minibatch._replace(masks=masks)
    means, log_std, values = agent(minibatch.obs, *(minibatch.masks,) if name == "vsop" else ())
    logprobs = torch_script.gaussian_logprob(minibatch.actions, means, log_std).detach()
    minibatch = minibatch._replace(  # near enough for some ratios and values to be clipped, and others not
        logprobs=logprobs + 0.2 * torch.randn_like(logprobs), values=values.detach() + 0.2 * torch.randn_like(values)
    )
    batch = script.Batch(*(jnp.asarray(getattr(minibatch, column).numpy()) for column in script.Batch._fields))
    if name == "ppo":
        x = minibatch.advantages
        minibatch = minibatch._replace(advantages=(x - x.mean()) / x.std(correction=0))
    expected, torch_stats = torch_script.loss_function(agent, minibatch, torch_args)
    expected.backward()
    args = script.Args(ent_coef=0.3, vf_coef=0.7, activation=torch_script.activation.__name__)
    differentiate = jax.value_and_grad(script.loss_function, has_aux=True)
    (loss, stats), gradients = differentiate(as_in_jax(agent), batch, jnp.asarray(masks.numpy()), args)
    np.testing.assert_allclose(loss, expected.item(), **CLOSE)
    assert stats.keys() == torch_stats.keys()
    for key in stats:
        np.testing.assert_allclose(stats[key], torch_stats[key].item(), **CLOSE, err_msg=key)
    np.testing.assert_allclose(gradients["log_std"], agent.log_std.grad, **CLOSE)
    for network in ("actor", "critic"):
        layers = [*getattr(agent, network).hidden, getattr(agent, network).out]
        for (weight, bias), layer in zip(gradients[network], layers, strict=True):
            np.testing.assert_allclose(weight, layer.weight.grad.T, **CLOSE)
            np.testing.assert_allclose(bias, layer.bias.grad, **CLOSE)


def test_gradient_of_dpo():
    """Numerically, and by its sign: a larger ratio costs drift where the advantage is positive, a smaller one where it
    is negative, and at ratio 1 the gradient is that of the plain surrogate."""
    dpo = load(DPO)
    args = dpo.Args(ent_coef=0.0, vf_coef=0.0, activation="relu")
    inputs = list(numbers(True))
    inputs[0][:], inputs[1][:] = abs(inputs[0]), abs(inputs[1])

    def objective(outputs):
        return loss_of(dpo, args, outputs, *inputs[1:])[0]

    found, step = jax.grad(objective)(jnp.asarray(inputs[0])), 1e-5
    for i in np.ndindex(inputs[0].shape):
        up, down = inputs[0].copy(), inputs[0].copy()
        up[i], down[i] = up[i] + step, down[i] - step
        slope = (numpy_loss(DPO, args, up, *inputs[1:]) - numpy_loss(DPO, args, down, *inputs[1:])) / (2 * step)
        np.testing.assert_allclose(found[i], slope, rtol=1e-3, atol=1e-5)
    assert drift(3.0, 1.0) > 0 == drift(0.5, 1.0) and drift(0.3, -1.0) > 0 == drift(2.0, -1.0)


def test_vsop_leaves_the_policy_alone_where_all_advantages_are_negative():
    inputs = list(numbers(False))
    inputs[5] = -abs(inputs[5])
    for name, zero in ((VSOP, True), (A3C, False)):
        script = load(name)
        args = script.Args(ent_coef=0.0, vf_coef=0.0)
        gradient = jax.grad(lambda outputs: loss_of(script, args, outputs, *inputs[1:])[0])(jnp.asarray(inputs[0]))  # noqa: B023
        assert (abs(gradient).max() == 0) == zero


def test_spectral_norm():
    """Converged, the layers that act have norm 1; and sigma is differentiated through W, with v constant."""
    args, _, states = start(vsop, "CartPole-v1", spectral_norm=True)
    params = one(states)["params"]
    (weight, bias), *others = params["actor"]
    weight = 3.0 * weight + 0.5
    params = params | dict(actor=[(weight, bias), *others])
    params = vsop.converge(params)
    for name in ("actor", "critic"):
        *hidden, output = vsop.normalized(params, name)
        assert all(abs(np.linalg.norm(w, 2) - 1) < 1e-3 for w, _ in hidden)
        assert output[0] is params[name][-1][0]
    gradient = jax.grad(lambda w: vsop.normalized(params | dict(actor=[(w, bias), *others]), "actor")[0][0][0, 0])(
        weight
    )
    u, sigmas, v = np.linalg.svd(weight)
    u, sigma, v, first = u[:, 0], sigmas[0], v[0], np.asarray(weight)[0, 0]
    expected = -first / sigma**2 * np.outer(u, v)
    expected[0, 0] += 1 / sigma
    np.testing.assert_allclose(gradient, expected, rtol=1e-3, atol=1e-4)


def test_dropout_samples_differ():
    """By step, environment and iteration in the rollout, where an observation always has the same action otherwise;
    and all rows of a minibatch share one sample."""
    for p in (0.0, 0.5):
        args, env, states = start_still(dropout_rate=p)
        state = one(states)
        state["params"]["log_std"] = jnp.full(2, -30.0)  # no noise
        keys = jax.random.split(state["key"])
        collect = jax.jit(partial(vsop.collect_rollout, env=env, args=args))
        rollouts = [collect(state["params"], state["envs"], key)[1] for key in keys]
        actions = np.array([rollout[1] for rollout in rollouts]).reshape(-1, 2)
        distinct = len(np.unique(actions.round(7), axis=0))
        assert distinct == 1 if p == 0.0 else distinct > len(actions) // 2
    masks = vsop.sample_masks(keys[0], 4, args.width, p=0.5)
    rows = vsop.forward(state["params"]["actor"], jnp.ones((3, 3)), masks[:2], args)
    assert (rows == rows[0]).all() and set(np.unique(masks)) == {0.0, 2.0}


def test_dropout_is_sampled_again_in_every_update():
    """The same update with another key gives the critic other weights, although it sees the same numbers: the masks
    were not drawn once, while tracing."""
    args, env, states = start_still(dropout_rate=0.5, num_minibatches=1, update_epochs=1)
    update = jax.jit(partial(vsop.update, env=env, args=args))
    found = [update(dict(one(states), key=jax.random.PRNGKey(k)))[0]["params"]["critic"][2][0] for k in (1, 2)]
    assert (np.asarray(found[0]) != np.asarray(found[1])).any()


# -------------------------------------------------------------------------------------------------- whole updates


QUICK = ("Acrobot-v1", "MountainCarContinuous-v0", "Freeway-MinAtar", "Catch-bsuite", "FrozenLake-misc")
OTHERS = set(gymnax.registered_envs) - {*QUICK, "MNISTBandit-bsuite"}


@pytest.mark.parametrize("env_id", [*QUICK, *(pytest.param(e, marks=pytest.mark.slow) for e in sorted(OTHERS))])
def test_every_task_of_gymnax_fits(env_id):
    """An update leaves shapes and types of the state as they are. Traced, not compiled. (MNIST needs the network.)"""
    args = vsop.Args(**(SMALL | dict(env_id=env_id, norm_obs=True, norm_reward=True, bootstrap_truncated=True)))
    env = vsop.make_env(env_id)
    state = jax.eval_shape(partial(vsop.init, env=env, args=args), 1)
    after, stats = jax.eval_shape(partial(vsop.update, env=env, args=args), state)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), state) == jax.tree.map(lambda x: (x.shape, x.dtype), after)
    assert all(x.shape == () for x in stats.values())


@pytest.mark.parametrize(
    "env_id, settings",
    [
        ("Pendulum-v1", dict(norm_obs=True, norm_reward=True)),
        pytest.param("CartPole-v1", dict(dropout_rate=0.1), marks=pytest.mark.slow),
    ],
)
def test_seeds_at_once_are_seeds_one_by_one(env_id, settings):
    args, env, states = start(vsop, env_id, seeds=(3, 4, 5), **settings)
    update = jax.jit(jax.vmap(partial(vsop.update, env=env, args=args)))
    alone = [jax.tree.map(lambda x: x[i : i + 1], states) for i in range(3)]  # noqa: B023
    assert (np.asarray(states["params"]["actor"][0][0][0]) != np.asarray(states["params"]["actor"][0][0][1])).any()
    for _ in range(2):
        states, _ = update(states)
        alone = [update(state)[0] for state in alone]
    for i in range(3):
        for x, y in zip(jax.tree.leaves(jax.tree.map(lambda x: x[i], states)), jax.tree.leaves(one(alone[i]))):  # noqa: B023
            np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-4)


def test_chunks_of_any_length_are_the_same_to_the_bit():
    """Their length depends on how busy the machine is."""
    args, env, states = start(vsop, "Pendulum-v1", seeds=(3, 4), norm_obs=True, norm_reward=True)
    learn = jax.jit(partial(vsop.learn, env=env, args=args))
    at_once, in_parts = learn(states, 4)[0], learn(learn(states, 1)[0], 3)[0]
    assert int(at_once["iteration"][0]) == 4
    for x, y in zip(jax.tree.leaves(at_once), jax.tree.leaves(in_parts)):
        np.testing.assert_array_equal(x, y)


def test_an_epoch_sees_every_row_once(monkeypatch):
    seen = []
    loss = vsop.loss_function

    def spy(params, minibatch, masks, args):
        jax.debug.callback(lambda x: seen.extend(np.asarray(x).tolist()), minibatch.advantages)
        return loss(params, minibatch, masks, args)

    monkeypatch.setattr(vsop, "loss_function", spy)
    args, env, states = start(vsop, "CartPole-v1", num_minibatches=4, update_epochs=3)
    jax.block_until_ready(jax.jit(partial(vsop.update, env=env, args=args))(one(states)))
    jax.effects_barrier()
    epochs = np.array(seen).reshape(3, args.batch_size)
    assert (np.sort(epochs) == np.sort(epochs)[0]).all() and (epochs[0] != epochs[1]).any()


@pytest.mark.parametrize(
    "name, steps",
    [(VSOP, 61_440), *(pytest.param(name, 60_000, marks=pytest.mark.slow) for name in (PPO, A3C, DPO))],
)
def test_learns_cartpole(name, steps):
    """A random policy has 22; with the sign of the objective turned around it is 9."""
    script = load(name)
    args, env, states = start(script, seeds=(1, 2, 3), **asdict(script.Args(total_timesteps=steps)))
    states, _ = jax.jit(partial(script.learn, env=env, args=args))(states, args.num_iterations)
    assert np.nanmean(states["envs"]["ended"][:, 0]) > 80


# --------------------------------------------------------------------------------------------------------- a run


def run_args(script, tmp_path, monkeypatch, **settings):
    monkeypatch.chdir(tmp_path)
    return script.RunArgs(**(SMALL | dict(num_seeds=2) | settings))


def scalars(folder):
    events = EventAccumulator(str(folder), size_guidance=dict(scalars=0))
    events.Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def checkpoint(folder):
    return {name: x for name, x in np.load(folder / "checkpoint.npz").items() if name != "meta"}


@pytest.mark.parametrize(
    "name, settings",
    [
        (VSOP, dict(dropout_rate=0.1, spectral_norm=True)),
        pytest.param(PPO, dict(env_id="Pendulum-v1", norm_obs=True, norm_reward=True), marks=pytest.mark.slow),
    ],
)
def test_resumes_to_the_bit(name, settings, tmp_path, monkeypatch, capsys):
    """A run that dies three iterations after a checkpoint, and is stopped by SIGTERM later, ends like one that never
    was; TensorBoard shows no step twice."""
    script = load(name)
    args = run_args(script, tmp_path, monkeypatch, checkpoint_every=160, **settings)
    through = script.train(args)
    log, handlers = script.log, {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def dies(writers, step, *rest):
        log(writers, step, *rest)
        if step == 8 * args.batch_size:
            [writer.flush() for writer in writers]
            raise ZeroDivisionError

    def is_stopped(writers, step, *rest):
        if step == 7 * args.batch_size:
            os.kill(os.getpid(), signal.SIGTERM)
        log(writers, step, *rest)

    monkeypatch.setattr(script, "log", dies)
    with pytest.raises(SystemExit) as death:  # after its traceback
        script.train(replace(args, exp_name="broken"))
    del death  # its traceback holds the lock
    folder = next(path for path in (tmp_path / "runs").iterdir() if "broken" in path.name)
    assert checkpoint(folder)["iteration"][0] == 5
    args = replace(args, exp_name="broken", resume=folder)
    monkeypatch.setattr(script, "log", is_stopped)
    with pytest.raises(SystemExit) as stop:
        script.train(args)
    assert stop.value.code == 128 + signal.SIGTERM and checkpoint(folder)["iteration"][0] == 7
    del stop
    assert f"--resume {folder}" in capsys.readouterr().err
    monkeypatch.setattr(script, "log", log)
    script.train(args)
    for number, handler in handlers.items():
        signal.signal(number, handler)
    expected, found = checkpoint(through), checkpoint(folder)
    assert expected.keys() == found.keys() and int(found["iteration"][0]) == args.num_iterations
    for key in expected:
        np.testing.assert_array_equal(expected[key], found[key], err_msg=key)
    for seed in ("seed_1", "seed_2"):
        one_run, other = scalars(through / seed), scalars(folder / seed)
        one_run.pop("charts/SPS"), other.pop("charts/SPS")
        assert one_run == other


@pytest.mark.parametrize("script", [VSOP, PPO], indirect=True)
def test_files_of_a_run(script, tmp_path, monkeypatch, capsys):
    """And its output, with a clock that goes fast: a line for each half minute."""
    clock = SimpleNamespace(time=map(float, itertools.count(0, 40)).__next__, time_ns=time.time_ns)
    monkeypatch.setattr(script, "time", clock)
    folder = script.train(
        run_args(script, tmp_path, monkeypatch, seed=7, env_id="CartPole-v1", num_steps=32, total_timesteps=1280)
    )
    results = json.loads((folder / "results.json").read_text())
    assert results["seeds"] == [7, 8] and len(results["returns"]) == 2
    mean, error = np.mean(results["returns"]), np.std(results["returns"], ddof=1) / np.sqrt(2)
    np.testing.assert_allclose([results["mean"], results["standard_error"]], [mean, error], rtol=1e-5)
    out = capsys.readouterr().out
    assert f"2 seed(s) {mean:.2f}" in out and "68 % interval" in out and "num_steps=32" in out
    lines = re.findall(r"(?m)^step (\d+)/2560  \d+ steps/s  return \d+\.\d\d  \d\d:\d\d left$", out)
    assert lines == [str(step) for step in range(256, 2561, 256)]
    assert results["args"]["num_steps"] == 32
    for i, seed in enumerate((7, 8)):
        logged = scalars(folder / f"seed_{seed}")
        tags = "charts/episodic_return charts/episodic_length charts/learning_rate charts/SPS losses/policy_loss"
        tags += " losses/value_loss losses/entropy losses/approx_kl losses/explained_variance losses/grad_norm"
        assert set(tags.split()) <= logged.keys()
        assert logged["charts/episodic_return"][-1] == (1280, pytest.approx(results["returns"][i]))
        assert [step for step, _ in logged["losses/entropy"]] == list(range(128, 1281, 128))
        policy = np.load(folder / f"seed_{seed}" / "policy.npz", allow_pickle=False)
        meta = json.loads(str(policy["meta"]))
        assert meta["script"] == script.__name__ and meta["args"]["env_id"] == "CartPole-v1"
        x = np.ones(4, np.float32)
        for layer in range(3):
            x = x @ policy[f"layers/{layer}/0"] + policy[f"layers/{layer}/1"]
            x = np.tanh(x) if layer < 2 else x
        state = checkpoint(folder)
        layers = [tuple(jnp.asarray(state[f"params/actor/{k}/{j}"][i]) for j in range(2)) for k in range(3)]
        expected = script.forward(layers, jnp.ones(4), jnp.ones((2, 1)), script.Args())
        np.testing.assert_allclose(x, expected, **CLOSE)
        assert "log_std" not in policy and "obs_mean" not in policy


def test_a_run_in_which_no_episode_ends(tmp_path, monkeypatch):
    """An episode of Pendulum has 200 steps, the run 80: episodes that have not ended count as none, not as 0. The
    policy is a Gaussian one, with the spectral norm folded in and observations scaled by their statistics."""
    folder = vsop.train(run_args(vsop, tmp_path, monkeypatch, env_id="Pendulum-v1", spectral_norm=True, norm_obs=True))
    assert "charts/episodic_return" not in scalars(folder / "seed_1") and "losses/entropy" in scalars(folder / "seed_1")
    assert np.isnan(json.loads((folder / "results.json").read_text())["mean"])
    policy = np.load(folder / "seed_1" / "policy.npz", allow_pickle=False)
    assert policy["log_std"].shape == (1,) and policy["obs_mean"].shape == policy["obs_std"].shape == (3,)
    assert all(abs(np.linalg.norm(policy[f"layers/{i}/0"], 2) - 1) < 1e-4 for i in range(2))


# -------------------------------------------------------------------------------------------------- command line


@pytest.mark.parametrize(
    "options, message",
    [
        (["--env-id", "CartPole-v9"], "CartPole-v9"),
        (["--env-id", "brax/aunt"], "brax/aunt"),
        (["--num-seeds", "0"], "--num-seeds must be in [1, "),
        (["--dropout-rate", "1"], "--dropout-rate must be in [0, 0.99]"),
        (["--learning-rate", "nan"], "--learning-rate must be in [0, "),
        (["--num-minibatches", "3", "--num-envs", "4", "--num-steps", "4"], "--num-minibatches 3 does not divide"),
        (["--total-timesteps", "10"], "--total-timesteps must be in [1024, "),
        (["--resume", "nowhere"], "--resume: nowhere"),
    ],
)
def test_bad_input_is_one_line(options, message, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert message in refused(monkeypatch, capsys, VSOP, *options)
    assert not (tmp_path / "runs").exists()


def parsed(script, monkeypatch, *options):
    monkeypatch.setattr(sys, "argv", [script.__name__, *options])
    return script.parse_args()


def test_defaults_are_those_of_the_family(script, monkeypatch):
    args = parsed(script, monkeypatch, "--env-id", "Breakout-MinAtar", "--num-steps", "2")
    assert args.num_envs == 128 and args.num_steps == 2 and args.activation == "relu" and not args.norm_obs
    args = parsed(script, monkeypatch, "--env-id", "brax/ant", "--no-norm-obs")
    assert args.num_envs == 2048 and args.ent_coef == 0.0 and args.norm_reward and not args.norm_obs
    assert parsed(script, monkeypatch, "--env-id", "Acrobot-v1").activation == "tanh"
    assert set(script.MINATAR) | set(script.BRAX) <= asdict(script.Args()).keys()


PAPER = """learning_rate 1e-3 8.5e-4 5.5e-4 1e-3 9e-4 7.5e-4 7e-4 1e-3 4.5e-4 1e-4 7e-4 2e-4
num_envs 8 16 8 4 128 128 128 128 2048 2048 2048 2048
num_steps 8 64 4 4 64 32 4 16 10 10 5 10
gae_lambda 0.54 0.58 0.13 1.0 0.70 0.82 0.87 0.70 0.714 1.0 0.97 0.942
num_minibatches 8 16 8 1 8 16 2 8 32 64 2 32
update_epochs 3 8 1 10 10 9 1 6 3 2 1 6
max_grad_norm 3.4 1.9 3.8 5.0 1.9 2.8 1.3 0.4 3.3 3.7 1.0 0.4
width 64 64 64 64 512 512 512 256 512 512 128 512
ent_coef 0.01 0.01 0.01 0.01 0.01 0.01 0.01 0.01 0 0 0 0"""


def test_defaults_are_the_paper_s():
    """Columns: PPO, VSOP, A3C and DPO on Classic Control, MinAtar and Brax."""
    for name, *row in map(str.split, PAPER.splitlines()):
        for i, expected in enumerate(row):
            script = load((PPO, VSOP, A3C, DPO)[i % 4])
            settings = vars(script.Args()) | ({}, script.MINATAR, script.BRAX)[i // 4]
            assert settings[name] == float(expected), (script.__name__, name, i // 4)


def test_resume_refuses_what_would_change_the_learning(tmp_path, monkeypatch, capsys):
    folder = vsop.train(run_args(vsop, tmp_path, monkeypatch))
    with open(folder / ".lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        assert "another process is training" in refused_later(monkeypatch, capsys, "--resume", folder)
    assert "--gamma 0.5 contradicts" in refused_later(monkeypatch, capsys, "--resume", folder, "--gamma", "0.5")
    for total in (320, 64):
        vsop.train(parsed(vsop, monkeypatch, "--resume", str(folder), "--total-timesteps", str(total)))
        assert "nothing to do" in capsys.readouterr().out
    with open(folder / "checkpoint.npz", "r+b") as file:
        file.seek(2000)
        file.write(b"damage")
    assert "cannot be used" in refused_later(monkeypatch, capsys, "--resume", folder)
    assert "contradicts" not in refused_later(monkeypatch, capsys, "--resume", tmp_path)


def refused_later(monkeypatch, capsys, *options, code=2):
    """As `refused`, after a line on stdout perhaps."""
    capsys.readouterr()
    monkeypatch.setattr(sys, "argv", [VSOP, *map(str, options)])
    with pytest.raises(SystemExit) as stop:
        vsop.train(vsop.parse_args())
    error = capsys.readouterr().err
    assert stop.value.code == code and error.startswith("error: ") and error.count("\n") == 1
    return error


def test_wandb_without_an_account_is_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    options = [f"--{name.replace('_', '-')}={x}" for name, x in SMALL.items()]
    assert "UsageError" in refused_later(monkeypatch, capsys, "--track", *options, code=1)
    import wandb

    wandb.tensorboard.unpatch()  # the script patched it for this process


def test_a_full_disk_keeps_the_last_checkpoint(tmp_path, monkeypatch, capsys):
    """What is written through a link to /dev/full fails as on a full disk."""
    args = run_args(vsop, tmp_path, monkeypatch, checkpoint_every=32)
    log = vsop.log

    def fills_up(writers, step, *rest):
        log(writers, step, *rest)
        if step == 5 * args.batch_size:
            (run_dir(tmp_path) / "checkpoint.part").symlink_to("/dev/full")

    monkeypatch.setattr(vsop, "log", fills_up)
    with pytest.raises(SystemExit) as stop:
        vsop.train(args)
    error, folder = capsys.readouterr().err, run_dir(tmp_path)
    assert stop.value.code == 1 and error.startswith("error: ") and error.count("\n") == 1
    assert "No space left on device" in error and folder.name in error
    assert checkpoint(folder)["iteration"][0] == 4


@pytest.mark.parametrize("redirect", [">&-", "| head -1"])
def test_closed_output(redirect, tmp_path):
    """The run ends as it would. 2e3 is an integer, too."""
    command = f'"{sys.executable}" "{ROOT}/{VSOP}.py" --total-timesteps 2e3 {redirect}'
    done = subprocess.run(command, shell=True, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    assert done.stderr == ""
    assert checkpoint(run_dir(tmp_path))["iteration"][0] == 1


def test_missing_package_is_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "optax", None)
    with pytest.raises(SystemExit) as stop:
        runpy.run_path(str(ROOT / f"{VSOP}.py"))
    assert "optax" in stop.value.code and "pip install -r requirements-gymnax.txt" in stop.value.code


def test_help_opens_with_what_the_script_is(script, monkeypatch, capsys):
    with pytest.raises(SystemExit):
        parsed(script, monkeypatch, "--env-id", "Breakout-MinAtar", "--help")
    text = capsys.readouterr().out
    assert script.__doc__.partition(":")[0] in text and "10000000" in text
    assert 0 < text.find("learning options") < text.find("run options") < text.find("--checkpoint-every")


@pytest.mark.slow
def test_resumes_after_sigkill(tmp_path):
    options = ["--total-timesteps", 204800, "--num-seeds", 2, "--checkpoint-every", 4096]
    (tmp_path / "through").mkdir(), (tmp_path / "killed").mkdir()
    assert run(VSOP, *options, cwd=tmp_path / "through").returncode == 0
    command = [sys.executable, str(ROOT / f"{VSOP}.py"), *map(str, options)]
    with subprocess.Popen(command, cwd=tmp_path / "killed", stdout=subprocess.DEVNULL) as process:
        wait_for(lambda: list((tmp_path / "killed").glob("runs/*/checkpoint.npz")))
        folder = run_dir(tmp_path / "killed")
        wait_for(lambda: checkpoint(folder)["iteration"][0] > 20)
        process.kill()
    done = run(VSOP, "--resume", folder, cwd=tmp_path / "killed")
    assert done.returncode == 0, done.stderr
    expected, found = checkpoint(run_dir(tmp_path / "through")), checkpoint(folder)
    for key in expected:
        np.testing.assert_array_equal(expected[key], found[key], err_msg=key)


@pytest.mark.slow
@pytest.mark.parametrize("env_id", ["Breakout-MinAtar", "brax/ant"])
def test_tiny_run_of_the_other_families(env_id, script, tmp_path):
    if env_id.startswith("brax/"):
        pytest.importorskip("brax")
    small = ["--num-envs", 8, "--num-steps", 8, "--num-minibatches", 2, "--total-timesteps", 128, "--width", 32]
    done = run(script.__name__, "--env-id", env_id, *small, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


# ------------------------------------------------------------------------------------------------------ the files


def blocks(name):
    source = (ROOT / f"{name}.py").read_text()
    nodes = [node for node in ast.parse(source).body if isinstance(node, (ast.FunctionDef, ast.ClassDef))]
    return {node.name: ast.get_source_segment(source, node) for node in nodes}


def test_shared_blocks_are_identical_and_in_the_same_order():
    """Settings and objective are the algorithm's."""
    first = blocks(VSOP)
    for name in SCRIPTS[1:]:
        other = blocks(name)
        assert list(first) == list(other)
        different = {block for block in first if first[block] != other[block]}
        assert different == {"Args", "loss_function"}


@pytest.mark.parametrize("name", SCRIPTS)
def test_inline_metadata_agrees_with_requirements(name):
    source = (ROOT / f"{name}.py").read_text()
    (block,) = re.findall(r"(?m)^# /// script$\s((?:^#(?:| .*)$\s)+)^# ///$", source)
    metadata = tomllib.loads("".join(line[2:] for line in block.splitlines(keepends=True)))
    lines = (ROOT / "requirements-gymnax.txt").read_text().splitlines()
    assert metadata["dependencies"] == [line for line in lines if not line.startswith(("#", "pygame", "moviepy"))]
    assert all(re.fullmatch(r"[\w\-\[\]]+==[\w.]+", line) for line in metadata["dependencies"])
