"""Objectives and updates against closed forms, hand-derived scores, tables and numeric integration."""

import copy
import math

import numpy as np
import pytest
import torch
from conftest import SCRIPTS, load, small_agent

import a3c_continuous
import ppo_continuous
import rmpg_continuous
import vsop_continuous


def data(rows, seed=0):
    """obs, actions, old_logprobs, advantages, returns of a random minibatch."""
    g = torch.Generator().manual_seed(seed)
    obs, actions = torch.randn(rows, 5, generator=g), torch.randn(rows, 3, generator=g)
    return obs, actions, *torch.randn(3, rows, generator=g)


def named_gradients(script, agent, minibatch, args, masks=None):
    extra = () if masks is None else (masks,)
    grads, stats = script.gradients(agent, minibatch, *extra, args)
    return dict(zip(dict(agent.named_parameters()), grads, strict=True)), stats


def sum_of_scores(agent, means, actions, weights):
    """sum of weight_i * d log pi(a_i | s_i) / d parameter: by hand through the Gaussian, then back through the mean."""
    std = agent.log_std.exp()
    of_mean = weights[:, None] * (actions - means) / std**2
    of_log_std = (weights[:, None] * (((actions - means) / std) ** 2 - 1)).sum(0)
    actor = dict(agent.actor.named_parameters())
    grads = torch.autograd.grad(means, list(actor.values()), grad_outputs=of_mean.detach())
    return {f"actor.{name}": g for name, g in zip(actor, grads)} | {"log_std": of_log_std.detach()}


@pytest.mark.parametrize("relu", [True, False])
def test_vsop_gradient_is_h_plus_times_the_score(relu):
    args, agent = small_agent(vsop_continuous, max_grad_norm=1e9, relu_advantage=relu)
    agent.log_std.data.uniform_(-0.5, 0.5)
    obs, actions, old, advantages, returns = data(16)
    masks = vsop_continuous.sample_masks(4, args.width, p=0.3, device="cpu")
    grads, _ = named_gradients(vsop_continuous, agent, (obs, actions, old, advantages, returns), args, masks)
    h = advantages.clamp(min=0) if relu else advantages
    for name, expected in sum_of_scores(agent, agent.actor(obs, masks[:2]), actions, h).items():
        torch.testing.assert_close(grads[name], -expected / 16, atol=1e-6, rtol=1e-4)


def test_vsop_actor_gradient_is_zero_without_positive_advantages():
    args, agent = small_agent(vsop_continuous)
    obs, actions, old, advantages, returns = data(16)
    minibatch = (obs, actions, old, -advantages.abs(), returns)
    grads, _ = named_gradients(vsop_continuous, agent, minibatch, args, torch.ones(4, args.width))
    for name, grad in grads.items():
        assert (grad == 0).all() == (not name.startswith("critic")), name


def test_a3c_gradient_is_the_advantage_times_the_score():
    args, agent = small_agent(a3c_continuous, max_grad_norm=1e9)
    obs, actions, old, advantages, returns = data(16)
    grads, _ = named_gradients(a3c_continuous, agent, (obs, actions, old, advantages, returns), args)
    for name, expected in sum_of_scores(agent, agent.actor(obs), actions, advantages).items():
        torch.testing.assert_close(grads[name], -expected / 16, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("script", [vsop_continuous, a3c_continuous])
def test_critic_descends_half_the_mean_squared_error(script):
    args, agent = small_agent(script, max_grad_norm=1e9)
    minibatch = data(16)
    masks = torch.ones(4, args.width) if script is vsop_continuous else None
    grads, stats = named_gradients(script, agent, minibatch, args, masks)
    errors = agent.critic(minibatch[0]).squeeze(-1) - minibatch[4]
    torch.testing.assert_close(grads["critic.out.bias"], errors.mean().reshape(1))  # d/db of 0.5 * mean(error^2)
    torch.testing.assert_close(stats["value_loss"], errors.square().mean())


def test_gradient_is_clipped_to_the_norm():
    args, agent = small_agent(vsop_continuous, max_grad_norm=0.1)
    grads, stats = named_gradients(vsop_continuous, agent, data(16), args, torch.ones(4, args.width))
    assert stats["grad_norm"] > 0.1
    assert math.isclose(math.sqrt(sum(g.square().sum().item() for g in grads.values())), 0.1, rel_tol=1e-4)


def test_entropy_and_its_coefficient():
    args, agent = small_agent(vsop_continuous, ent_coef=0.5, max_grad_norm=1e9)
    agent.log_std.data = torch.tensor([0.1, -0.4, 0.7])
    obs, actions, old, advantages, returns = data(16)
    minibatch = (obs, actions, old, -advantages.abs(), returns)
    grads, stats = named_gradients(vsop_continuous, agent, minibatch, args, torch.ones(4, args.width))
    expected = torch.distributions.Normal(0, agent.log_std.exp()).entropy().sum()
    torch.testing.assert_close(stats["entropy"], expected.detach())
    torch.testing.assert_close(grads["log_std"], torch.full((3,), -0.5))


@pytest.mark.parametrize("p, steps, envs", [(0.025, 2048, 1), (0.5, 8, 2)])
def test_weight_decay_is_decoupled_and_of_the_stated_size(p, steps, envs):
    args, agent = small_agent(
        vsop_continuous, dropout_rate=p, num_steps=steps, num_envs=envs, total_timesteps=steps * envs
    )
    before = [parameter.detach().clone() for parameter in agent.parameters()]
    optimizer = vsop_continuous.Optimizer(agent, args)
    with torch.no_grad():
        optimizer.step([torch.zeros_like(parameter) for parameter in agent.parameters()], optimizer.rates())
    shrink = 1 - args.learning_rate * (1 - p) / (2 * steps * envs)
    for old, new in zip(before, agent.parameters()):
        torch.testing.assert_close(new.detach(), old * shrink, atol=0, rtol=1e-7)
    assert optimizer.decay == pytest.approx(2.38e-4 if steps == 2048 else 0.5 / 32, rel=1e-3)


@pytest.mark.parametrize("name, optimizer, settings", [
    ("vsop_continuous", torch.optim.AdamW, dict(lr=2e-4, eps=1e-8, weight_decay=0.975 / 32)),
    ("rmpg_continuous", torch.optim.AdamW, dict(lr=2e-4, eps=1e-8, weight_decay=1 / 32)),
    ("vsppo_continuous", torch.optim.AdamW, dict(lr=2.5e-4, eps=1e-8, weight_decay=0.965 / 32)),
    ("ppo_continuous", torch.optim.Adam, dict(lr=3e-4, eps=1e-5)),
    ("a3c_continuous", torch.optim.RMSprop, dict(lr=7e-4, eps=3e-6, alpha=0.99)),
])  # fmt: skip
def test_optimizer_is_torchs_with_the_papers_settings(name, optimizer, settings):
    script = load(name)
    args, agent = small_agent(script)
    twin = copy.deepcopy(agent)
    ours, theirs = script.Optimizer(agent, args), optimizer(twin.parameters(), **settings)
    for step in range(30):
        ours.lr = theirs.param_groups[0]["lr"] = settings["lr"] * (1 - step / 30)
        grads = [torch.randn_like(parameter) * 10.0 ** (step % 7 - 5) for parameter in agent.parameters()]
        for parameter, grad in zip(twin.parameters(), grads):
            parameter.grad = grad
        with torch.no_grad():
            ours.step(grads, ours.rates())
        theirs.step()
        for one, other in zip(agent.parameters(), twin.parameters()):
            torch.testing.assert_close(one, other, atol=1e-7, rtol=1e-5)


# ratio, advantage, loss, derivative of the loss by the ratio; clip_coef 0.2
PPO_CASES = [
    (1.0, 2.0, -2.0, -2.0),
    (1.1, 2.0, -2.2, -2.0),
    (1.5, 2.0, -2.4, 0.0),  # a good action already made likelier by enough: clipped
    (0.5, 2.0, -1.0, -2.0),  # a good action made less likely: full gradient back
    (1.0, -2.0, 2.0, 2.0),
    (0.5, -2.0, 1.6, 0.0),  # a bad action already made rarer by enough: clipped
    (1.5, -2.0, 3.0, 2.0),  # a bad action made likelier: full gradient back
    (3.0, 0.0, 0.0, 0.0),
]


@pytest.mark.parametrize("ratio, advantage, loss, slope", PPO_CASES)
@pytest.mark.parametrize("name", ["ppo_continuous", "vsppo_continuous"])
def test_ppo_policy_loss(name, ratio, advantage, loss, slope):
    ratio = torch.tensor([ratio], requires_grad=True)
    found = load(name).ppo_policy_loss(ratio, torch.tensor([advantage]), 0.2)
    found.backward()
    assert found.item() == pytest.approx(loss)
    assert ratio.grad.item() == pytest.approx(slope)


# value, old value, return, loss, derivative by the value; clip_coef 0.2
@pytest.mark.parametrize("value, old, target, loss, slope", [
    (1.1, 1.0, 2.0, 0.5 * 0.81, -0.9),
    (1.5, 1.0, 2.0, 0.5 * 0.64, 0.0),  # moved towards the target by more than 0.2: the clipped error is larger
    (0.5, 1.0, 2.0, 0.5 * 2.25, -1.5),  # moved away from it: the true error is larger
])  # fmt: skip
def test_ppo_value_loss(value, old, target, loss, slope):
    value, old, target = torch.tensor([value], requires_grad=True), torch.tensor([old]), torch.tensor([target])
    found = ppo_continuous.ppo_value_loss(value, old, target, 0.2)
    found.backward()
    assert found.item() == pytest.approx(loss)
    assert value.grad.item() == pytest.approx(slope)
    unclipped = ppo_continuous.ppo_value_loss(value, old, target, math.inf)
    assert unclipped.item() == pytest.approx(0.5 * (value - target).square().item())


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("clip_values", [True, False])
def test_ppo_loss_is_made_of_its_parts(normalize, clip_values):
    args, agent = small_agent(ppo_continuous, norm_adv=normalize, clip_vloss=clip_values)
    obs, actions, _, advantages, returns = data(16)
    normal = torch.distributions.Normal(agent.actor(obs), agent.log_std.exp())
    old_logprobs = normal.log_prob(actions).sum(-1).detach() + 0.3 * torch.randn(16)
    old_values = torch.randn(16)
    loss, stats = ppo_continuous.loss_function(
        agent, (obs, actions, old_logprobs, advantages, returns, old_values), args
    )
    h = (advantages - advantages.mean()) / advantages.std() if normalize else advantages
    ratio = (normal.log_prob(actions).sum(-1) - old_logprobs).exp()
    policy = -torch.minimum(ratio * h, ratio.clamp(0.8, 1.2) * h).mean()
    values = agent.critic(obs).squeeze(-1)
    near = old_values + (values - old_values).clamp(-0.2, 0.2) if clip_values else values
    value = torch.maximum((values - returns) ** 2, (near - returns) ** 2).mean() / 2
    torch.testing.assert_close(loss, policy + 0.5 * value)
    torch.testing.assert_close(stats["clipfrac"], ((ratio - 1).abs() > 0.2).float().mean())
    torch.testing.assert_close(stats["approx_kl"], (ratio - 1 - ratio.log()).mean(), atol=1e-6, rtol=1e-4)


def test_rmpg_gradient_is_the_integral_over_all_actions():
    """One action dimension: relu(q - v) * d pi / d parameter, integrated by the trapezoidal rule on another grid."""
    args, agent = small_agent(rmpg_continuous, action_dim=1, max_grad_norm=1e9, vf_coef=0.0)
    agent.log_std.data.fill_(-0.5)
    agent.actor.out.bias.data.fill_(0.3)
    obs = torch.randn(1, 5)
    low, high, k = -2.0, 2.0, 4000

    @torch.no_grad()
    def h_plus(actions):
        q = agent.critic(torch.cat([obs.expand(len(actions), -1), actions[:, None]], dim=-1)).squeeze(-1)
        return torch.relu(q - center)

    center = -10.0
    center = h_plus(torch.linspace(low, high, 101)).mean() - 10.0  # so that about half of the actions count

    uniform = low + (high - low) * (torch.arange(k) + 0.5) / k
    minibatch = (
        obs,
        torch.zeros(1, 1),
        torch.zeros(1),
        torch.zeros(1),
        uniform.view(1, k, 1),
        h_plus(uniform).view(1, k),
    )
    grads, _ = named_gradients(rmpg_continuous, agent, minibatch, args, torch.ones(4, args.width))

    grid = torch.linspace(low, high, 10_001)
    mean, std = agent.actor(obs).item(), math.exp(-0.5)
    z = (grid.double() - mean) / std
    density = torch.exp(-0.5 * z**2) / (std * math.sqrt(2 * math.pi))
    h = h_plus(grid).double()
    assert 0.1 < (h > 0).double().mean() < 0.9
    of_mean = torch.trapezoid(h * density * z / std, grid.double())
    of_log_std = torch.trapezoid(h * density * (z**2 - 1), grid.double())
    assert grads["actor.out.bias"].item() == pytest.approx(-of_mean.item(), rel=1e-3, abs=1e-6)
    assert grads["log_std"].item() == pytest.approx(-of_log_std.item(), rel=1e-3, abs=1e-6)


def test_rmpg_critic_learns_q_of_the_action_taken():
    args, agent = small_agent(rmpg_continuous, max_grad_norm=1e9)
    obs, actions, old, _, returns = data(16)
    minibatch = (obs, actions, old, returns, torch.zeros(16, 4, 3), torch.zeros(16, 4))
    grads, stats = named_gradients(rmpg_continuous, agent, minibatch, args, torch.ones(4, args.width))
    errors = agent.critic(torch.cat([obs, actions], dim=-1)).squeeze(-1) - returns
    torch.testing.assert_close(grads["critic.out.bias"], errors.mean().reshape(1))


@pytest.mark.parametrize("name", SCRIPTS)
def test_logprob_is_torchs(name):
    mean, log_std, actions = torch.randn(9, 3), torch.randn(3), torch.randn(9, 3)
    expected = torch.distributions.Normal(mean, log_std.exp()).log_prob(actions).sum(-1)
    torch.testing.assert_close(load(name).gaussian_logprob(actions, mean, log_std), expected)


def test_mechanisms_report_what_they_say():
    args, agent = small_agent(vsop_continuous, dropout_rate=0.5)
    advantages, values = np.array([[1.0], [-2.0], [3.0], [-1.0]]), np.array([[1.0], [2.0], [0.0], [1.0]])
    next_values = np.array([[2.0], [0.0], [1.0], [0.0]])
    est = vsop_continuous.Estimate(advantages, values, next_values, (torch.randn(4, 5),))
    found = vsop_continuous.mechanisms(agent, est, args)
    assert found["positive_advantages"] == 0.5
    assert found["c_pi"] == pytest.approx((0.99 * 2 - 1 + 0.99 * 1) / 4)
    assert found["disagreement"] > 0
    args.dropout_rate = 0.0
    assert vsop_continuous.mechanisms(agent, est, args)["disagreement"] == 0


@pytest.mark.parametrize("name", SCRIPTS)
def test_compiled_step_is_the_eager_one(name):
    """To rounding, over several calls, so that the power iteration and the optimizer's state are compared as well."""
    script = load(name)
    args, agent = small_agent(script, width=32)
    twin = copy.deepcopy(agent)
    optimizers = [script.Optimizer(x, args) for x in (agent, twin)]
    compiled = script.compiled(script.gradient_step, torch.device("cpu"))
    assert compiled is not script.gradient_step
    columns = data(16)
    if "rmpg" in name:
        columns = (*columns[:3], columns[4], torch.randn(16, 7, 3), torch.rand(16, 7))
    if "ppo" in name:
        columns = (*columns, torch.randn(16))
    start = [parameter.detach().clone() for parameter in agent.parameters()]
    for seed in range(5):
        torch.manual_seed(seed)
        stats = script.update(agent, optimizers[0], script.gradient_step, columns, args)
        torch.manual_seed(seed)
        fast_stats = script.update(twin, optimizers[1], compiled, columns, args)
        assert stats.keys() == fast_stats.keys()
        for key in stats:
            torch.testing.assert_close(fast_stats[key], stats[key], atol=1e-6, rtol=1e-4)
    for one, other in zip(agent.buffers(), twin.buffers()):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)
    # The first moment is the gradient's average, which Adam's step hides: it takes the sign of the tiniest gradient.
    for key, value in optimizers[0].state_dict().items():
        torch.testing.assert_close(optimizers[1].state_dict()[key], value, atol=1e-6, rtol=1e-4)
    assert any(not torch.equal(old, new) for old, new in zip(start, twin.parameters()))
