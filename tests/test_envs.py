"""Normalization, episode ends and rollouts, on a task whose every number is known."""

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import load


class Counter(gym.Env):
    """Observes (episode, step); the reward counts all steps so far; ends by a time limit of 5 and by itself after 7."""

    action_space = gym.spaces.Box(-0.5, 0.5, (2,), np.float32)

    def __init__(self, observation="box"):
        self.episode, self.t, self.total, self.actions = 0, 0, 0, []
        box = gym.spaces.Box(-np.inf, np.inf, (1,), np.float64)
        both = gym.spaces.Box(-np.inf, np.inf, (1, 2), np.float64)
        self.observation_space = both if observation == "box" else gym.spaces.Dict(a=box, b=box)
        self.observation = observation

    def observe(self):
        x, y = float(self.episode), float(self.t)
        return np.array([[x, y]]) if self.observation == "box" else dict(a=np.array([x]), b=np.array([y]))

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.episode, self.t = self.episode + 1, 0
        return self.observe(), {}

    def step(self, action):
        assert self.action_space.contains(action), action
        self.actions.append(action)
        self.t, self.total = self.t + 1, self.total + 1
        odd = self.episode % 2
        return self.observe(), float(self.total), bool(not odd and self.t == 7), bool(odd and self.t == 5), {}


gym.register("Counter-v0", Counter)
gym.register("CounterDict-v0", Counter, kwargs=dict(observation="dict"))


def make(script, **settings):
    settings = dict(env_id="Counter-v0", num_steps=24, num_minibatches=1, total_timesteps=10_000, width=8) | settings
    args = script.Args(**settings)
    envs = script.Envs([script.make_env(args) for _ in range(args.num_envs)], args)
    return args, envs, script.Agent(envs, args)


def test_running_stats_are_numpys_over_the_whole_history(script):
    xs = np.random.default_rng(0).normal(1000.0, 3.0, size=(300, 4))
    vectors, numbers = script.RunningStats(4), script.RunningStats()
    for t, x in enumerate(xs, start=1):
        vectors.update(x)
        numbers.update(float(x[0]))
        np.testing.assert_allclose(vectors.mean, xs[:t].mean(0), rtol=1e-12)
        np.testing.assert_allclose(vectors.std, np.sqrt(xs[:t].var(0) + 1e-8), rtol=1e-9)
        assert (numbers.mean, numbers.std) == pytest.approx((vectors.mean[0], vectors.std[0]), rel=1e-12)


def test_rollout_has_same_step_resets_and_no_bogus_transition(script):
    args, envs, agent = make(script, norm_obs=False, norm_reward=False)
    rollout = script.collect_rollout(envs, agent, args)
    obs, next_obs = rollout.obs[:, 0], rollout.next_obs[:, 0]
    starts = [0, 5, 12, 17]  # episodes of 5 (time limit), 7 (true end), 5, 7 steps
    for t in range(24):
        episode = sum(t >= s for s in starts)
        np.testing.assert_array_equal(obs[t], (episode, t - starts[episode - 1]))
        np.testing.assert_array_equal(next_obs[t], (episode, t - starts[episode - 1] + 1))
    np.testing.assert_array_equal(rollout.rewards[:, 0], np.arange(1, 25))
    assert np.flatnonzero(rollout.truncated).tolist() == [4, 16]
    assert np.flatnonzero(rollout.terminated).tolist() == [11, 23]
    assert envs.finished == [(5, 15.0, 5), (12, 63.0, 7), (17, 75.0, 5), (24, 147.0, 7)]
    np.testing.assert_array_equal(envs.obs[0], (5, 0))


def test_actions_are_clipped_for_the_task_and_kept_as_sampled(script):
    args, envs, agent = make(script)
    rollout = script.collect_rollout(envs, agent, args)
    sent = np.array(envs.envs[0].unwrapped.actions)
    assert np.abs(rollout.actions).max() > 0.5
    np.testing.assert_array_equal(sent, rollout.actions[:, 0].clip(-0.5, 0.5))


def test_logprobs_are_of_the_unclipped_action_under_the_policy_that_acted(script):
    args, envs, agent = make(script)
    agent.log_std.data = torch.tensor([0.3, -0.6])
    if hasattr(args, "thompson"):
        args.thompson = False
    rollout = script.collect_rollout(envs, agent, args)
    normal = torch.distributions.Normal(agent.actor(torch.as_tensor(rollout.obs[:, 0])), agent.log_std.exp())
    expected = normal.log_prob(torch.as_tensor(rollout.actions[:, 0])).sum(-1).detach()
    np.testing.assert_allclose(rollout.logprobs[:, 0], expected, atol=1e-4)


def test_observations_are_normalized_by_all_that_was_seen_so_far(script):
    args, envs, agent = make(script)
    rollout = script.collect_rollout(envs, agent, args)
    seen = [np.array([1.0, 0.0])]
    episode, t = 1, 0
    for step in range(24):
        t += 1
        seen.append(np.array([episode, t], dtype=float))
        history = np.array(seen)
        expected = ((history[-1] - history.mean(0)) / np.sqrt(history.var(0) + 1e-8)).clip(-10, 10)
        np.testing.assert_allclose(rollout.next_obs[step, 0], expected, atol=1e-5)
        if rollout.terminated[step, 0] or rollout.truncated[step, 0]:
            episode, t = episode + 1, 0
            seen.append(np.array([episode, t], dtype=float))


@pytest.mark.parametrize("bootstrap", [True, False])
def test_rewards_are_divided_by_the_deviation_of_the_discounted_return(script, bootstrap):
    """The return restarts at every end, or, like Gymnasium's NormalizeReward, only at a true end."""
    args, envs, agent = make(script, gamma=0.9, bootstrap_truncated=bootstrap)
    rollout = script.collect_rollout(envs, agent, args)
    returns, running = [], 0.0
    for step in range(24):
        running = 0.9 * running + (step + 1)
        returns.append(running)
        expected = np.clip((step + 1) / np.sqrt(np.var(returns) + 1e-8), -10, 10)
        assert rollout.rewards[step, 0] == pytest.approx(expected, rel=1e-6)
        if rollout.terminated[step, 0] or (rollout.truncated[step, 0] and bootstrap):
            running = 0.0
    assert rollout.rewards[0, 0] == 10.0  # clipped
    assert envs.finished[0][1] == 15.0  # logged returns are of the task's own reward


@pytest.mark.parametrize("num_envs", [1, 3, 256])
def test_any_number_of_environments(script, num_envs):
    args, envs, agent = make(script, num_envs=num_envs, num_steps=6)
    rollout = script.collect_rollout(envs, agent, args)
    assert rollout.obs.shape == (6, num_envs, 2) and rollout.actions.shape == (6, num_envs, 2)
    assert envs.global_step == args.batch_size == 6 * num_envs
    assert rollout.truncated.sum() == num_envs
    batch = script.compute_advantages(agent, rollout, args, torch.device("cpu"))
    assert all(len(column) == 6 * num_envs for column in batch if column is not None)
    # Rows of the batch belong together: step t of environment n is row t * num_envs + n.
    torch.testing.assert_close(batch.actions, torch.as_tensor(rollout.actions.reshape(-1, 2)))


def test_dict_observations_are_flattened(script):
    _, envs, _ = make(script, env_id="CounterDict-v0", norm_obs=False)
    np.testing.assert_array_equal(envs.obs, [[1, 0]])


def test_each_step_and_environment_has_its_own_sample_of_the_actor(bayesian, monkeypatch):
    args, envs, agent = make(bayesian, num_envs=4, num_steps=6, width=64, dropout_rate=0.3)
    original, used = bayesian.numpy_forward, []
    monkeypatch.setattr(bayesian, "numpy_forward", lambda *a: used.append(a[2].copy()) or original(*a))
    bayesian.collect_rollout(envs, agent, args)
    samples = np.array(used).swapaxes(1, 2).reshape(6 * 4, -1)  # step and environment by units of both layers
    assert samples.shape == (24, 128) and len(np.unique(samples, axis=0)) == 24
    used.clear()
    args.thompson = False
    bayesian.collect_rollout(envs, agent, args)
    assert (np.array(used) == 1).all()


def test_environments_start_from_different_seeds():
    script = load("vsop_continuous")
    _, envs, _ = make(script, env_id="Reacher-v4", num_envs=2, norm_obs=False)
    assert not np.allclose(envs.obs[0], envs.obs[1])
    first, _ = gym.make("Reacher-v4").reset(seed=2)
    np.testing.assert_allclose(envs.obs[1], first, rtol=1e-6)


def test_environment_arguments():
    script = load("vsop_continuous")
    _, envs, _ = make(script, env_id="Counter-v0", env_kwargs=dict(observation="dict"), norm_obs=False)
    assert envs.envs[0].unwrapped.observation == "dict"
    np.testing.assert_array_equal(envs.obs, [[1, 0]])
