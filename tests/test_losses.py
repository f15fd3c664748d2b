"""Objectives and updates against closed forms, hand-derived scores, tables and numeric integration."""

import copy
import math
import sys

import pytest
import torch
from conftest import SCRIPTS, load, random_minibatch, small_agent

import a3c_continuous
import ppo_continuous
import rmpg_continuous
import vsop_continuous


def named_gradients(script, agent, minibatch, args):
    grads, stats = script.gradients(agent, minibatch, args)
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
    masks = vsop_continuous.sample_masks(4, args.width, p=0.3, device="cpu")
    minibatch = random_minibatch(vsop_continuous, args, masks=masks)
    grads, _ = named_gradients(vsop_continuous, agent, minibatch, args)
    h = minibatch.advantages.clamp(min=0) if relu else minibatch.advantages
    means = agent.actor(minibatch.obs, masks[:2])
    for name, expected in sum_of_scores(agent, means, minibatch.actions, h).items():
        torch.testing.assert_close(grads[name], -expected / 16, atol=1e-6, rtol=1e-4)


def test_vsop_actor_gradient_is_zero_without_positive_advantages():
    args, agent = small_agent(vsop_continuous)
    minibatch = random_minibatch(vsop_continuous, args, advantages=-torch.rand(16))
    grads, _ = named_gradients(vsop_continuous, agent, minibatch, args)
    for name, grad in grads.items():
        assert (grad == 0).all() == (not name.startswith("critic")), name


def test_a3c_gradient_is_the_advantage_times_the_score():
    args, agent = small_agent(a3c_continuous, max_grad_norm=1e9)
    minibatch = random_minibatch(a3c_continuous, args)
    grads, _ = named_gradients(a3c_continuous, agent, minibatch, args)
    scores = sum_of_scores(agent, agent.actor(minibatch.obs), minibatch.actions, minibatch.advantages)
    for name, expected in scores.items():
        torch.testing.assert_close(grads[name], -expected / 16, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("script", [vsop_continuous, a3c_continuous])
def test_critic_descends_half_the_mean_squared_error(script):
    args, agent = small_agent(script, max_grad_norm=1e9)
    minibatch = random_minibatch(script, args)
    grads, stats = named_gradients(script, agent, minibatch, args)
    errors = agent.critic(minibatch.obs).squeeze(-1) - minibatch.returns
    torch.testing.assert_close(grads["critic.out.bias"], errors.mean().reshape(1))  # d/db of 0.5 * mean(error^2)
    torch.testing.assert_close(stats["value_loss"], errors.square().mean())


def test_gradient_is_clipped_to_the_norm():
    args, agent = small_agent(vsop_continuous, max_grad_norm=0.1)
    grads, stats = named_gradients(vsop_continuous, agent, random_minibatch(vsop_continuous, args), args)
    assert stats["grad_norm"] > 0.1
    assert math.isclose(math.sqrt(sum(g.square().sum().item() for g in grads.values())), 0.1, rel_tol=1e-4)


def test_entropy_and_its_coefficient():
    args, agent = small_agent(vsop_continuous, ent_coef=0.5, max_grad_norm=1e9)
    agent.log_std.data = torch.tensor([0.1, -0.4, 0.7])
    minibatch = random_minibatch(vsop_continuous, args, advantages=-torch.rand(16))
    grads, stats = named_gradients(vsop_continuous, agent, minibatch, args)
    expected = torch.distributions.Normal(0, agent.log_std.exp()).entropy().sum()
    torch.testing.assert_close(stats["entropy"], expected.detach())
    torch.testing.assert_close(grads["log_std"], torch.full((3,), -0.5))


@pytest.mark.parametrize("name, optimizer, settings", [
    ("vsop_continuous", torch.optim.AdamW, dict(lr=2e-4, eps=1e-8, weight_decay=0.975 / 32)),
    ("rmpg_continuous", torch.optim.AdamW, dict(lr=2e-4, eps=1e-8, weight_decay=1 / 32)),
    ("vsppo_continuous", torch.optim.AdamW, dict(lr=2.5e-4, eps=1e-8, weight_decay=0.965 / 32)),
    ("ppo_continuous", torch.optim.Adam, dict(lr=3e-4, eps=1e-5, weight_decay=0)),
    ("a3c_continuous", torch.optim.RMSprop, dict(lr=7e-4, eps=3e-6, alpha=0.99, weight_decay=0)),
])  # fmt: skip
def test_optimizer_has_the_papers_settings(name, optimizer, settings):
    script = load(name)
    args, agent = small_agent(script)
    found = script.make_optimizer(agent, args)
    assert type(found) is optimizer and len(found.param_groups) == 1
    assert {key: found.param_groups[0][key] for key in settings} == pytest.approx(settings)
    assert len(found.param_groups[0]["params"]) == len(list(agent.parameters()))


@pytest.mark.parametrize("name", SCRIPTS)
def test_no_tensor_of_an_update_is_left_on_the_cpu(name):
    """On the meta device, where an operation with a tensor of the CPU is an error, as it is on a GPU."""
    script, device = load(name), torch.device("meta")
    args, agent = small_agent(script, num_minibatches=2)
    batch = random_minibatch(script, args)
    batch = script.Batch(*(x.to(device) for x in batch))
    agent = agent.to(device)
    for minibatch in script.minibatches(batch, args):
        grads, stats = script.gradients(agent, minibatch, args)
        assert all(x.device == device for x in (*grads, *stats.values()))


@pytest.mark.parametrize("name", SCRIPTS)
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_compiled_on_cuda_is_the_eager_one(name):
    compare_compiled_with_eager(name, torch.device("cuda"))


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
    obs, actions, _, advantages, returns, old_values, _ = minibatch = random_minibatch(ppo_continuous, args)
    normal = torch.distributions.Normal(agent.actor(obs), agent.log_std.exp())
    old_logprobs = normal.log_prob(actions).sum(-1).detach() + 0.3 * torch.randn(16)
    loss, stats = ppo_continuous.loss_function(agent, minibatch._replace(logprobs=old_logprobs), args)
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
    columns = dict(obs=obs, uniform=uniform.view(1, k, 1), h_plus=(high - low) * h_plus(uniform).view(1, k))
    minibatch = random_minibatch(rmpg_continuous, args, rows=1, action_dim=1, **columns)
    grads, _ = named_gradients(rmpg_continuous, agent, minibatch, args)

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
    minibatch = random_minibatch(rmpg_continuous, args)
    grads, stats = named_gradients(rmpg_continuous, agent, minibatch, args)
    pairs = torch.cat([minibatch.obs, minibatch.actions], dim=-1)
    errors = agent.critic(pairs).squeeze(-1) - minibatch.returns
    torch.testing.assert_close(grads["critic.out.bias"], errors.mean().reshape(1))


@pytest.mark.parametrize("name", SCRIPTS)
def test_logprob_is_torchs(name):
    mean, log_std, actions = torch.randn(9, 3), torch.randn(3), torch.randn(9, 3)
    expected = torch.distributions.Normal(mean, log_std.exp()).log_prob(actions).sum(-1)
    torch.testing.assert_close(load(name).gaussian_logprob(actions, mean, log_std), expected)


class Logged(dict):
    """A writer that keeps what it is given."""

    def add_scalar(self, tag, value, step):
        self[tag] = value

    add_histogram = add_scalar


def test_the_log_says_what_the_mechanisms_do():
    args, agent = small_agent(vsop_continuous, dropout_rate=0.5)
    columns = dict(advantages=[1.0, -2.0, 3.0, -1.0], values=[1.0, 2.0, 0.0, 1.0], next_values=[2.0, 0.0, 1.0, 0.0])
    columns = {name: torch.tensor(x) for name, x in columns.items()}
    batch, logged = random_minibatch(vsop_continuous, args, rows=4, **columns), Logged()
    state = torch.get_rng_state()
    vsop_continuous.log(logged, 2048, agent, batch, {}, args, detailed=True)
    assert torch.equal(state, torch.get_rng_state())  # logging does not change learning
    assert logged["vsop/positive_advantages"] == 0.5
    assert logged["vsop/c_pi"] == pytest.approx((0.99 * 2 - 1 + 0.99 * 1) / 4)
    assert logged["vsop/disagreement"] > 0
    assert [logged[f"spectral_norm/critic_{i}"] for i in range(2)] == pytest.approx([1.0, 1.0], abs=1e-3)
    args.dropout_rate = 0.0
    vsop_continuous.log(logged, 2048, agent, batch, {}, args, detailed=False)
    assert logged["vsop/disagreement"] == 0


@torch.no_grad()
def step(agent, optimizer, gradients, minibatch, args):
    grads, stats = gradients(agent, minibatch, args)
    for parameter, x in zip(agent.parameters(), grads, strict=True):
        parameter.grad = x
    optimizer.step()
    return stats


def compare_compiled_with_eager(name, device):
    """To rounding, over several calls, so that the power iteration and the optimizer's state are compared as well."""
    script = load(name)
    args, agent = small_agent(script, width=32)
    agent = agent.to(device)
    twin = copy.deepcopy(agent)
    optimizers = [script.make_optimizer(x, args) for x in (agent, twin)]
    fast = script.compiled(script.gradients, device)
    start = [parameter.detach().clone() for parameter in agent.parameters()]
    for seed in range(5):
        minibatch = random_minibatch(script, args)
        if hasattr(minibatch, "masks"):
            torch.manual_seed(seed)
            minibatch = minibatch._replace(masks=script.sample_masks(4, args.width, p=args.dropout_rate, device="cpu"))
        minibatch = script.Batch(*(x.to(device) for x in minibatch))
        (stats, fast_stats) = (
            step(x, optimizer, function, minibatch, args)
            for x, optimizer, function in zip((agent, twin), optimizers, (script.gradients, fast))
        )
        assert stats.keys() == fast_stats.keys()
        for key in stats:
            torch.testing.assert_close(fast_stats[key], stats[key], atol=1e-6, rtol=1e-4)
    for one, other in zip(agent.buffers(), twin.buffers()):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)
    # The first moment is the gradient's average, which Adam's step hides: it takes the sign of the tiniest gradient.
    for one, other in zip(*(optimizer.state.values() for optimizer in optimizers)):
        for key in one:
            torch.testing.assert_close(other[key], one[key], atol=1e-6, rtol=1e-4)
    assert any(not torch.equal(old, new) for old, new in zip(start, twin.parameters()))


@pytest.mark.parametrize("name", ["vsop_continuous", *(pytest.param(x, marks=pytest.mark.slow) for x in SCRIPTS[1:])])
def test_compiled_step_is_the_eager_one(name, capsys):
    compare_compiled_with_eager(name, torch.device("cpu"))
    if " " not in sys.prefix:  # torch does not quote the path of its headers, and gcc fails
        assert capsys.readouterr().err == ""  # it was compiled


@pytest.mark.parametrize("target_kl, updates", [(0.3, 4), (0.5, 8), (math.inf, 12)])
def test_passes_over_a_rollout_end_at_the_target_kl(target_kl, updates):
    """Of three passes with four minibatches each. The divergence is 0.05 more after each minibatch."""
    settings = dict(num_steps=16, num_minibatches=4, update_epochs=3, total_timesteps=16, width=8, target_kl=target_kl)
    args = vsop_continuous.Args(env_id="Pendulum-v1", **settings)
    envs = vsop_continuous.Envs([vsop_continuous.make_env(args)], args)
    agent = vsop_continuous.Agent(envs, args)
    calls = []

    def gradients(*inputs):
        calls.append(inputs)
        grads, stats = vsop_continuous.gradients(*inputs)
        return grads, stats | dict(approx_kl=torch.tensor(0.05 * (len(calls) + 3)))

    optimizer = vsop_continuous.make_optimizer(agent, args)
    ((_, _, stats),) = vsop_continuous.learn(args, envs, agent, optimizer, torch.device("cpu"), gradients)
    assert len(calls) == len(stats["approx_kl"]) == updates


def test_a_setting_changed_in_mid_run_reaches_the_compiled_gradient():
    args, agent = small_agent(a3c_continuous)
    minibatch = random_minibatch(a3c_continuous, args)
    fast = a3c_continuous.compiled(a3c_continuous.gradients, torch.device("cpu"))
    for args.ent_coef in (0.0, 0.7):
        expected, _ = a3c_continuous.gradients(agent, minibatch, args)
        for x, y in zip(fast(agent, minibatch, args)[0], expected):
            torch.testing.assert_close(x, y, atol=1e-6, rtol=1e-4)
