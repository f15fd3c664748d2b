"""Advantage estimation against sums written out term by term."""

import numpy as np
import pytest
import torch
from conftest import small_agent

STEPS, ENVS, OBS = 40, 3, 5


def random_rollout(script, rng):
    obs = rng.normal(size=(STEPS, ENVS, OBS)).astype(np.float32)
    next_obs = np.concatenate([obs[1:], rng.normal(size=(1, ENVS, OBS)).astype(np.float32)])
    terminated = rng.random((STEPS, ENVS)) < 0.1
    truncated = rng.random((STEPS, ENVS)) < 0.1
    ends = terminated | truncated
    next_obs[ends] = rng.normal(size=(ends.sum(), OBS))
    actions = rng.normal(size=(STEPS, ENVS, 3)).astype(np.float32)
    rewards, logprobs = rng.normal(size=(2, STEPS, ENVS))
    return script.Rollout(obs, actions, logprobs, rewards, next_obs, terminated, truncated)


def brute_force(rollout, values, next_values, args):
    """sum over k of (gamma lambda)^(k - t) delta_k, for every t and k up to the end of t's episode."""
    expected = np.zeros((STEPS, ENVS))
    for n in range(ENVS):
        for t in range(STEPS):
            for k in range(t, STEPS):
                ended = rollout.terminated[k, n] or rollout.truncated[k, n]
                cut = rollout.terminated[k, n] or (rollout.truncated[k, n] and not args.bootstrap_truncated)
                delta = rollout.rewards[k, n] + args.gamma * next_values[k, n] * (not cut) - values[k, n]
                expected[t, n] += (args.gamma * args.gae_lambda) ** (k - t) * delta
                if ended:
                    break
    return expected


@torch.no_grad()
def state_values(agent, obs, masks=None):
    x = torch.as_tensor(obs).flatten(0, -2)
    if agent.critic.hidden[0].in_features > OBS:  # RMPG's q(s, a)
        x = torch.cat([x, torch.zeros(len(x), 3)], dim=-1)
    return (agent.critic(x) if masks is None else agent.critic(x, masks)).view(obs.shape[:-1]).numpy()


@pytest.mark.parametrize("bootstrap", [False, True])
def test_estimate_is_the_brute_force_sum(script, bootstrap):
    settings = dict(gamma=0.9, gae_lambda=0.7, num_steps=STEPS, num_envs=ENVS)
    settings |= {} if bootstrap else dict(bootstrap_truncated=False)
    if hasattr(script.Args, "dropout_rate"):
        settings["dropout_rate"] = 0.0
    args, agent = small_agent(script, **settings)
    assert args.bootstrap_truncated == bootstrap
    if hasattr(script, "action_values"):  # a critic that ignores the action: then v is q, whatever the sampled actions
        agent.critic.hidden[0].weight.data[:, OBS:] = 0.0
    rollout = random_rollout(script, np.random.default_rng(0))
    batch = script.compute_advantages(agent, rollout, args, torch.device("cpu"))
    values, next_values = state_values(agent, rollout.obs), state_values(agent, rollout.next_obs)
    np.testing.assert_allclose(batch.values, values.ravel(), atol=1e-5)
    expected = brute_force(rollout, values, next_values, args)
    np.testing.assert_allclose(batch.advantages, expected.ravel(), atol=1e-5)
    np.testing.assert_allclose(batch.returns, (expected + values).ravel(), atol=1e-5)


def test_advantages_are_of_one_sample_of_the_critic():
    import vsop_continuous as script

    args, agent = small_agent(script, dropout_rate=0.4, num_steps=STEPS, num_envs=ENVS)
    rollout = random_rollout(script, np.random.default_rng(0))
    torch.manual_seed(7)
    batch = script.compute_advantages(agent, rollout, args, torch.device("cpu"))
    torch.manual_seed(7)
    masks = script.sample_masks(2, args.width, p=0.4, device="cpu")
    expected = brute_force(
        rollout, state_values(agent, rollout.obs, masks), state_values(agent, rollout.next_obs, masks), args
    )
    np.testing.assert_allclose(batch.advantages, expected.ravel(), atol=1e-5)


def test_without_thompson_sampling_the_critic_is_the_posterior_mean():
    import vsop_continuous as script

    args, agent = small_agent(script, dropout_rate=0.4, thompson=False, num_steps=STEPS, num_envs=ENVS)
    rollout = random_rollout(script, np.random.default_rng(0))
    batch = script.compute_advantages(agent, rollout, args, torch.device("cpu"))
    np.testing.assert_allclose(batch.values, state_values(agent, rollout.obs).ravel(), atol=1e-6)


def test_rmpg_evaluates_the_same_q_as_its_critic():
    import rmpg_continuous as script

    args, agent = small_agent(script, mc_samples=7, num_steps=STEPS, num_envs=ENVS)
    rollout = random_rollout(script, np.random.default_rng(0))
    batch = script.compute_advantages(agent, rollout, args, torch.device("cpu"))
    uniform = batch.uniform
    assert uniform.shape == (STEPS * ENVS, 7, 3) and uniform.abs().max() <= 2 and uniform.std() > 1
    pairs = torch.cat([batch.obs.unsqueeze(1).expand(-1, 7, -1), uniform], dim=-1)
    q = agent.critic(pairs.flatten(0, 1)).view(-1, 7)
    volume = 4.0**3  # of the actions, [-2, 2] in three dimensions
    torch.testing.assert_close(batch.h_plus, volume * torch.relu(q - batch.values[:, None]), atol=1e-3, rtol=1e-4)


def test_rmpg_value_is_the_mean_of_q_over_the_policy():
    import rmpg_continuous as script

    args, agent = small_agent(script, mc_samples=20_000, num_steps=2, num_envs=1)
    obs = np.ones((2, 1, OBS), dtype=np.float32)
    nothing = np.zeros((2, 1), dtype=bool)
    rollout = script.Rollout(obs, np.zeros((2, 1, 3)), np.zeros((2, 1)), np.zeros((2, 1)), obs, nothing, nothing)
    batch = script.compute_advantages(agent, rollout, args, torch.device("cpu"))
    torch.manual_seed(0)
    state = torch.ones(200_000, OBS)
    actions = agent.actor(state) + agent.log_std.exp() * torch.randn(200_000, 3)
    expected = agent.critic(torch.cat([state, actions], dim=-1)).mean()
    np.testing.assert_allclose(batch.values, expected.item(), atol=0.03)
