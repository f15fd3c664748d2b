"""The inequalities behind Theorem 3.1, on random small Markov decision processes, with the script's own advantages."""

import numpy as np
import pytest

from vsop_continuous import gae


class MDP:
    """Random transitions, non-negative rewards r(s, a, s') and a random policy; with `ends`, state 0 is absorbing."""

    def __init__(self, seed, gamma, ends=False, states=6, actions=4):
        rng = np.random.default_rng(seed)
        self.gamma = gamma
        self.p = rng.dirichlet(np.full(states, 0.3), size=(states, actions))
        self.r = rng.exponential(size=(states, actions, states)) * (rng.random((states, actions, states)) < 0.5)
        self.pi = rng.dirichlet(np.ones(actions), size=states)
        self.position = rng.normal(size=(states, 2))
        if ends:
            self.p = 0.9 * self.p
            self.p[:, :, 0] += 0.1
            self.p[0], self.r[0] = np.eye(states)[0], 0.0
        self.alive = np.arange(states) >= ends

    def solve(self):
        """v, q and h of the policy, from the linear system v = r_pi + gamma P_pi v."""
        reward, transition = np.einsum("sax,sax->sa", self.p, self.r), np.einsum("sa,sax->sx", self.pi, self.p)
        i = self.alive
        system = np.eye(i.sum()) - self.gamma * transition[np.ix_(i, i)]
        v = np.zeros(len(i))
        v[i] = np.linalg.solve(system, (self.pi * reward).sum(1)[i])
        q = reward + self.gamma * self.p @ v
        # The script's estimator, on all transitions as rollouts of one step; its mean over s' is q - v.
        values, next_values = (np.broadcast_to(x, self.p.shape).reshape(1, -1) for x in (v[:, None, None], v))
        ends = np.ones_like(values, dtype=bool)
        advantages = gae(self.r.reshape(1, -1), values, next_values, ends, self.gamma, 0.95)
        h = (self.p * advantages.reshape(self.p.shape)).sum(-1)
        np.testing.assert_allclose(h, q - v[:, None], atol=1e-9)
        return v, q, h

    def expect(self, x):
        """E over a ~ pi and s' ~ p of x(s, a, s')."""
        return np.einsum("sa,sax,sax->s", self.pi, self.p, np.broadcast_to(x, self.p.shape))

    def c_pi(self, v):
        return self.expect(np.maximum(self.gamma * v[None, None, :] - v[:, None, None], 0.0))


@pytest.mark.parametrize("ends", [False, True])
def test_positive_advantage_is_bounded(ends):
    strict = 0
    for seed in range(100):
        mdp = MDP(seed, gamma=0.9, ends=ends)
        v, q, h = mdp.solve()
        np.testing.assert_allclose((mdp.pi * h).sum(1), 0.0, atol=1e-10)  # it is an advantage
        h_plus = (mdp.pi * np.maximum(h, 0.0)).sum(1)
        assert (h_plus <= mdp.expect(mdp.r) + mdp.c_pi(v) + 1e-10).all()
        assert (h_plus <= v + 1e-10).all()
        strict += (h_plus > 1e-3).any()
    assert strict > 90  # the bounds were not met by zeros


def test_bounds_need_non_negative_rewards():
    violated = 0
    for seed in range(100):
        mdp = MDP(seed, gamma=0.9)
        mdp.r = mdp.r - 2.0
        v, _, h = mdp.solve()
        h_plus = (mdp.pi * np.maximum(h, 0.0)).sum(1)
        violated += (h_plus > v).any() and (h_plus > mdp.expect(mdp.r) + mdp.c_pi(v)).any()
    assert violated > 90


def test_additive_term_is_bounded_by_the_lipschitz_constant():
    for seed in range(100):
        mdp = MDP(seed, gamma=1.0, ends=True)
        v, _, _ = mdp.solve()
        distance = np.linalg.norm(mdp.position[:, None] - mdp.position[None], axis=-1)
        off_diagonal = distance > 0
        lipschitz = (np.abs(v[:, None] - v[None])[off_diagonal] / distance[off_diagonal]).max()
        bound = lipschitz / 2 * mdp.expect(distance[:, None, :])
        assert (mdp.c_pi(v) <= bound + 1e-10).all()
        assert mdp.c_pi(v).max() > 0


def test_advantages_do_not_change_with_a_shift_of_the_rewards():
    for seed in range(20):
        mdp = MDP(seed, gamma=0.9)
        v, _, h = mdp.solve()
        mdp.r = mdp.r + 5.0
        shifted_v, _, shifted_h = mdp.solve()
        np.testing.assert_allclose(shifted_h, h, atol=1e-9)
        np.testing.assert_allclose(shifted_v, v + 5.0 / (1 - 0.9))
