"""Spectral norm, masks, initialization, and the numpy twin of the actor."""

import itertools
from types import SimpleNamespace

import numpy as np
import torch
from conftest import random_minibatch, small_agent


def hidden_layers(agent):
    return [layer for network in (agent.actor, agent.critic) for layer in network.hidden]


def test_spectral_norm_is_one_and_outputs_are_not_normalized(bayesian):
    _, agent = small_agent(bayesian, width=32)
    for layer in hidden_layers(agent):
        torch.nn.init.normal_(layer.weight)
    for network in (agent.actor, agent.critic):
        layers = list(network.layers())
        for weight, _ in layers[:2]:
            assert abs(torch.linalg.svdvals(weight)[0] - 1) < 1e-4
        torch.testing.assert_close(layers[2][0], network.out.weight)  # outputs are not normalized


def test_spectral_norm_gradient_matches_a_numeric_one(bayesian):
    """Against differences of W / sigma_max(W), with sigma_max from an SVD of each disturbed W."""
    layer = bayesian.SpectralLinear(3, 4).double()
    for _ in range(500):
        layer.power_iteration()
    x, c = torch.randn(6, 3).double(), torch.randn(6, 4).double()
    (layer(x) * c).sum().backward()

    def exact(weight):
        return (x @ (weight / torch.linalg.svdvals(weight)[0]).T * c).sum().item()

    numeric = torch.zeros(4, 3).double()
    for i, j in itertools.product(range(4), range(3)):
        step = torch.zeros(4, 3).double()
        step[i, j] = 1e-6
        numeric[i, j] = (exact(layer.weight.detach() + step) - exact(layer.weight.detach() - step)) / 2e-6
    torch.testing.assert_close(layer.weight.grad, numeric, atol=1e-6, rtol=1e-5)


def test_one_power_iteration_per_gradient(bayesian):
    args, agent = small_agent(bayesian)
    for layer in hidden_layers(agent):
        torch.nn.init.normal_(layer.weight)
    layer = agent.actor.hidden[1]
    v = torch.nn.functional.normalize(layer.weight.T @ layer.u, dim=0)
    u = torch.nn.functional.normalize(layer.weight @ v, dim=0)
    bayesian.gradients(agent, random_minibatch(bayesian, args), args)
    torch.testing.assert_close(layer.u, u)
    torch.testing.assert_close(layer.v, v)


def test_without_spectral_norm_layers_are_plain():
    import vsop_continuous as script

    _, agent = small_agent(script, spectral_norm=False)
    assert all(type(layer) is torch.nn.Linear for layer in hidden_layers(agent))
    torch.testing.assert_close(next(agent.actor.layers())[0], agent.actor.hidden[0].weight)


def test_rows_of_a_batch_share_the_mask(bayesian):
    args, agent = small_agent(bayesian)
    state = torch.randn(5).expand(64, 5)
    masks = bayesian.sample_masks(2, args.width, p=0.5, device="cpu")
    out = agent.actor(state, masks)
    torch.testing.assert_close(out, out[:1].expand_as(out))
    assert not torch.equal(out[0], agent.actor(state, bayesian.sample_masks(2, args.width, p=0.5, device="cpu"))[0])


def test_mask_values_and_rate(bayesian):
    masks = bayesian.sample_masks(1000, 1000, p=0.025, device="cpu")
    scale = torch.tensor(1 / 0.975)
    assert ((masks == 0) | torch.isclose(masks, scale)).all()
    assert abs((masks == 0).float().mean() - 0.025) < 1e-3
    assert (bayesian.sample_masks(100, p=0.0, device="cpu") == 1).all()


def test_expectation_over_all_masks_is_the_mean_network(bayesian):
    """Exactly, over the 2^width masks of the last hidden layer, behind which the network is linear."""
    args, agent = small_agent(bayesian, width=6)
    state, p = torch.randn(4, 5).double(), 0.3
    agent = agent.double()
    expected = torch.zeros(4, 3).double()
    for kept in itertools.product((0.0, 1.0), repeat=6):
        kept = torch.tensor(kept).double()
        probability = p ** (6 - kept.sum()) * (1 - p) ** kept.sum()
        expected += probability * agent.actor(state, (torch.ones(6).double(), kept / (1 - p)))
    torch.testing.assert_close(expected, agent.actor(state))


def test_initialization(script):
    _, agent = small_agent(script, obs_dim=5, width=32)
    for layer in hidden_layers(agent):
        torch.testing.assert_close(torch.linalg.svdvals(layer.weight), torch.full((min(layer.weight.shape),), 2**0.5))
    torch.testing.assert_close(torch.linalg.svdvals(agent.actor.out.weight), torch.full((3,), 0.01))
    torch.testing.assert_close(torch.linalg.svdvals(agent.critic.out.weight), torch.ones(1))
    assert all((p == 0).all() for name, p in agent.named_parameters() if name.endswith("bias") or name == "log_std")


def test_numpy_actor_is_the_torch_actor(script):
    args, agent = small_agent(script, width=32)
    for parameter in agent.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    obs = torch.randn(7, 5)
    layers = agent.actor.numpy_layers()
    mean = agent.actor(obs).detach().numpy()
    np.testing.assert_allclose(script.numpy_forward(layers, obs.numpy()), mean, atol=1e-5)
    if hasattr(script, "sample_masks"):
        masks = script.sample_masks(2, 7, 32, p=0.5, device="cpu")  # a mask per row, as in a rollout
        sampled = agent.actor(obs, masks).detach().numpy()
        np.testing.assert_allclose(script.numpy_forward(layers, obs.numpy(), masks.numpy()), sampled, atol=1e-5)
        assert np.abs(sampled - mean).max() > 1e-3


def test_layers_that_act_have_a_spectral_norm_of_one(bayesian, monkeypatch):
    """By SVD at the moment of acting. The singular values are close to each other, as in a trained network, and u and v
    come from other weights: hundreds of power iterations would not be enough."""
    args, agent = small_agent(bayesian, width=64, num_steps=4, total_timesteps=4)
    for layer in hidden_layers(agent):
        torch.nn.init.orthogonal_(layer.weight, 2**0.5)
        layer.weight.data += 1e-3 * torch.randn_like(layer.weight)
    envs = SimpleNamespace(obs_dim=5, action_dim=3, obs=np.zeros((1, 5), dtype=np.float32))
    envs.step = lambda actions: (envs.obs, [0.0], [False], [False])
    envs.scale_rewards = lambda rewards, *ends: rewards
    original, norms = bayesian.numpy_forward, []

    def forward(layers, *inputs):
        norms.extend(np.linalg.norm(weight, 2) for weight, _ in layers[:2])
        return original(layers, *inputs)

    monkeypatch.setattr(bayesian, "numpy_forward", forward)
    bayesian.collect_rollout(envs, agent, args)
    assert len(norms) == 8
    np.testing.assert_allclose(norms, 1.0, atol=1e-3)
