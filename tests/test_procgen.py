"""The ProcGen scripts: what they rely on in EnvPool, their network, their learning, and runs as a user makes them."""

import os
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from conftest import GAME_SCRIPTS, ROOT, load, refused, run, run_dir, scalars

import enjoy

TINY = "--num-envs 8 --num-steps 64 --num-minibatches 2 --update-epochs 1 --total-timesteps 512".split()
CPU = torch.device("cpu")


@pytest.fixture(params=GAME_SCRIPTS)
def script(request):
    return load(request.param)


@pytest.fixture(scope="module")
def vsop():
    return load("vsop_procgen")


def make(script, num_levels=200, seed=1, **settings):
    torch.manual_seed(0)
    defaults = dict(env_id="bossfight", num_envs=4, num_steps=8, num_minibatches=1, total_timesteps=10**6)
    args = script.Args(**(defaults | settings))
    envs = script.Envs(script.make_envs(args, num_levels, seed), args)
    return args, envs, script.Agent(envs, args)


def collect(script, args, envs, agent):
    obs = torch.empty((args.num_steps, *envs.obs.shape), dtype=torch.uint8)
    test_envs = script.Envs(script.make_envs(args, 0, 7), args)
    return script.collect_rollout(envs, test_envs, agent, args, obs)


class Recorder:
    """A pool whose answers can be looked at afterwards."""

    def __init__(self, pool):
        self.pool, self.infos = pool, []

    def step(self, actions):
        answer = self.pool.step(actions)
        self.infos.append(answer[4])
        return answer

    def reset(self, ids):
        return self.pool.reset(ids)

    def __len__(self):
        return len(self.pool)


# ---------------------------------------------------------------------------------------------------- conventions


def test_envpool_by_itself_takes_a_step_that_never_was(vsop):
    """The reason for resetting in Envs. If this fails, EnvPool has changed, and Envs is to be looked at again."""
    args, envs, _ = make(vsop, num_envs=8)
    rng, ended = np.random.default_rng(0), np.zeros(8, dtype=bool)
    bogus = 0
    for _ in range(300):
        _, reward, terminated, truncated, info = envs.envs.step(rng.integers(15, size=8).astype(np.int32))
        assert (info["elapsed_step"][ended] == 0).all() and (reward[ended] == 0).all()
        bogus += ended.sum()
        ended = terminated | truncated
    assert bogus > 5


def test_every_step_acts(vsop):
    """The step after an end is the first of the new episode, its action counts, and its observation comes before it."""
    args, envs, _ = make(vsop, num_envs=8)
    envs.envs = pool = Recorder(envs.envs)
    rng, length, ends = np.random.default_rng(0), np.zeros(8, dtype=int), 0
    for _ in range(300):
        next_obs, _, terminated, truncated = envs.step(rng.integers(15, size=8).astype(np.int32))
        length += 1
        np.testing.assert_array_equal(pool.infos[-1]["elapsed_step"], length)
        ended = terminated | truncated
        for i in range(8):  # a new level looks different, and otherwise the next action is on what this one led to
            assert np.array_equal(envs.obs[i], next_obs[i]) != ended[i]
        length[ended] = 0
        ends += ended.sum()
    assert ends > 5


def test_the_last_reward_belongs_to_the_episode_that_ends(vsop):
    """In coinrun the coin is the only reward, and ends the level."""
    args, envs, _ = make(vsop, env_id="coinrun", num_envs=64, num_steps=1)
    ended_with = []
    for _ in range(400):
        _, rewards, terminated, truncated = envs.step(np.full(64, 8, dtype=np.int32))  # jumps to the right
        assert (rewards[~terminated] == 0).all()
        ended_with += rewards[terminated].tolist()
    assert set(ended_with) == {0.0, 10.0}


def test_levels(vsop):
    def seen(num_levels):
        args, envs, _ = make(vsop, num_levels=num_levels, num_envs=32, seed=3)
        envs.envs = pool = Recorder(envs.envs)
        for _ in range(200):
            envs.step(np.zeros(32, dtype=np.int32))
        return {int(seed) for info in pool.infos for seed in info["level_seed"]}

    few, all_levels = seen(20), seen(0)
    assert few == set(range(20))  # all of the training levels, and no others
    assert max(all_levels) > 10**6 and len(all_levels) > 60


def test_frames_are_bytes_with_colours_last(vsop):
    args, envs, _ = make(vsop, env_id="fruitbot")
    assert envs.obs.shape == (4, 64, 64, 3) and envs.obs.dtype == np.uint8 and envs.num_actions == 15
    means = envs.obs.reshape(-1, 3).mean(0)
    assert means.max() - means.min() > 5  # a colour, not columns of a picture


def test_a_time_limit_is_no_true_end(vsop):
    args, envs, _ = make(vsop, env_id="maze", num_envs=2)
    for t in range(500):
        _, _, terminated, truncated = envs.step(np.full(2, 4, dtype=np.int32))  # stands still
        assert (truncated == (t == 499)).all() and not terminated.any()


# --------------------------------------------------------------------------------------------- network and learning


def test_the_rollout_is_written_once_and_stays_bytes(script):
    args, envs, agent = make(script)
    rollout = collect(script, args, envs, agent)
    batch = script.compute_advantages(agent, rollout, args, CPU)
    assert batch.obs.dtype == torch.uint8 and batch.obs.data_ptr() == rollout.obs.data_ptr()
    batch = batch._replace(returns=torch.arange(32.0))
    (minibatch,) = script.minibatches(batch, args)
    rows = minibatch.returns.long()
    assert sorted(rows.tolist()) == list(range(32))
    torch.testing.assert_close(minibatch.actions, batch.actions[rows])  # columns stay together
    torch.testing.assert_close(minibatch.obs, batch.obs[rows])
    assert all(conv.weight.is_contiguous(memory_format=torch.channels_last) for conv in convolutions(agent))


def convolutions(agent):
    return [module for module in agent.modules() if isinstance(module, torch.nn.Conv2d)]


def test_log_probabilities_are_those_of_the_actions_taken(script):
    settings = {} if script.__name__ == "ppo_procgen" else dict(thompson=False)
    args, envs, agent = make(script, **settings)
    agent.actor.weight.data *= 100
    rollout = collect(script, args, envs, agent)
    with torch.no_grad():
        logits, _ = agent(rollout.obs.flatten(0, 1))
    expected = torch.distributions.Categorical(logits=logits).log_prob(torch.tensor(rollout.actions.ravel()))
    np.testing.assert_allclose(rollout.logprobs.ravel(), expected, atol=1e-4)


def test_each_step_and_environment_has_its_own_sample_and_the_test_has_none(vsop, monkeypatch):
    args, envs, agent = make(vsop, dropout_rate=0.3)
    used = []
    forward = agent.forward
    monkeypatch.setattr(
        agent, "forward", lambda frames, masks: used.append(masks.split([2048, 256], -1)) or forward(frames, masks)
    )
    rollout = collect(vsop, args, envs, agent)
    for layer, units in enumerate((2048, 256)):
        masks = torch.stack([masks[layer] for masks in used])
        assert masks.shape == (8, 8, units)
        acting, testing = masks[:, :4].flatten(0, 1), masks[:, 4:]
        assert len(acting.unique(dim=0)) == 32 and (testing == 1).all()
        assert acting.unique().tolist() == pytest.approx([0, 1 / 0.7])
    used.clear()
    vsop.compute_advantages(agent, rollout, args, CPU)
    for layer in range(2):  # one sample for all states
        rows = torch.cat([masks[layer] for masks in used])
        assert len(rows) == 32 + 4 and (rows == rows[0]).all() and (rows == 0).any()
    used.clear()
    args.thompson = False
    collect(vsop, args, envs, agent)
    vsop.compute_advantages(agent, rollout, args, CPU)
    assert all((x == 1).all() for masks in used for x in masks)


@pytest.mark.parametrize("bootstrap", [False, True])
def test_advantages_against_the_sum_of_residuals(script, bootstrap):
    settings = {} if script.__name__ == "ppo_procgen" else dict(thompson=False)
    args, envs, agent = make(script, bootstrap_truncated=bootstrap, num_steps=40, num_envs=2, **settings)
    rollout = collect(script, args, envs, agent)
    assert rollout.terminated.any()
    frame = np.full((64, 64, 3), 200, dtype=np.uint8)
    rollout.truncated[5, 1] = True  # a time limit, as if the level had not been over
    if bootstrap:
        rollout.final_obs[5, 1] = frame
    batch = script.compute_advantages(agent, rollout, args, CPU)
    advantages = batch.advantages.view(40, 2)
    with torch.no_grad():
        values = agent(rollout.obs.flatten(0, 1))[1].view(40, 2).numpy()
        last = agent(torch.as_tensor(envs.obs))[1].numpy()
        cut_off = agent(torch.as_tensor(frame[None]))[1].item()
    for i in range(2):
        for t in range(40):
            expected, weight = 0.0, 1.0
            for s in range(t, 40):
                following = values[s + 1, i] if s < 39 else last[i]
                if rollout.terminated[s, i]:
                    following = 0.0
                if rollout.truncated[s, i]:
                    following = cut_off if bootstrap else 0.0
                expected += weight * (rollout.rewards[s, i] + args.gamma * following - values[s, i])
                weight *= args.gamma * args.gae_lambda
                if rollout.terminated[s, i] or rollout.truncated[s, i]:
                    break
            assert advantages[t, i].item() == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("bootstrap", [False, True])
def test_the_return_that_scales_rewards_restarts_at_every_end(script, bootstrap):
    args, envs, _ = make(script, num_envs=1, gamma=0.9, bootstrap_truncated=bootstrap)
    rewards, truncated = np.array([[1.0], [2.0], [4.0]]), np.array([[False], [True], [False]])
    scaled = envs.scale_rewards(rewards, np.zeros_like(truncated), truncated)
    assert scaled[2, 0] == pytest.approx(4.0 / np.std([1.0, 2.9, 4.0]))
    assert envs.episodes == [(4.0, 1, 4.0)] and [x[1:] for x in envs.finished] == [(3.0, 2)]


def filled_minibatch(script, args, rows):
    """A minibatch that no game has made."""
    generator = torch.Generator().manual_seed(0)
    obs = torch.randint(256, (rows, 64, 64, 3), generator=generator, dtype=torch.uint8)
    actions = torch.randint(15, (rows,), generator=generator)
    logprobs, *columns = torch.randn((5, rows), generator=generator)
    masks = (script.sample_masks(2048 + 256, p=args.dropout_rate),) if hasattr(script, "sample_masks") else ()
    return script.Batch(obs, actions, -2.7 + 0.1 * logprobs, *columns, *masks)


def test_the_gradient_in_parts_is_that_of_the_whole(script):
    args, envs, agent = make(script, max_grad_norm=1e9)
    minibatch = filled_minibatch(script, args, 300)
    grads, stats = script.gradients(agent, minibatch, args)
    if script.__name__ == "ppo_procgen":
        h = minibatch.advantages
        loss, _ = script.loss_function(agent, minibatch._replace(advantages=(h - h.mean()) / (h.std() + 1e-8)), args)
    else:
        loss, _ = script.loss_function(agent, minibatch, args)
    expected = torch.autograd.grad(loss, list(agent.parameters()))
    for grad, x in zip(grads, expected):
        torch.testing.assert_close(grad, x, atol=1e-5, rtol=1e-3)
    norm = torch.cat([x.flatten() for x in expected]).norm()
    assert stats["grad_norm"].item() == pytest.approx(norm.item(), rel=1e-3)
    args.max_grad_norm = 0.5 * norm.item()
    clipped, _ = script.gradients(agent, minibatch, args)
    assert torch.cat([x.flatten() for x in clipped]).norm().item() == pytest.approx(args.max_grad_norm, rel=0.01)


def test_settings_are_those_of_the_authors_code(script):
    """With a shared trunk and gradients clipped at 0.5, the critic's weight decides how much reaches the policy."""
    args, envs, agent = make(script)
    optimizer = script.make_optimizer(agent, args)
    assert type(optimizer) is torch.optim.Adam
    assert (optimizer.defaults["eps"], optimizer.defaults["weight_decay"]) == (1e-5, 0)
    minibatch = filled_minibatch(script, args, 6)
    minibatch = minibatch._replace(values=minibatch.returns)  # PPO: nothing to clip
    _, stats = script.loss_function(agent, minibatch, args)
    loss, _ = script.loss_function(agent, minibatch._replace(advantages=torch.zeros(6)), args)
    values = agent(minibatch.obs, *minibatch[7:])[1]
    expected = 0.25 * ((values - minibatch.returns) ** 2).mean() - args.ent_coef * stats["entropy"]
    if script.__name__ == "vsop_procgen":
        torch.testing.assert_close(loss, expected)
    else:
        clipped = minibatch.returns + (values - minibatch.returns).clamp(-0.2, 0.2)
        worse = torch.max((values - minibatch.returns) ** 2, (clipped - minibatch.returns) ** 2)
        torch.testing.assert_close(loss, 0.25 * worse.mean() - args.ent_coef * stats["entropy"])


def test_vsop_loss_against_the_formula(vsop):
    args, envs, agent = make(vsop, ent_coef=0.1, vf_coef=0.3)
    minibatch = filled_minibatch(vsop, args, 6)
    actions, advantages, returns = minibatch.actions, minibatch.advantages, minibatch.returns
    loss, stats = vsop.loss_function(agent, minibatch, args)
    logits, values = agent(minibatch.obs, minibatch.masks)
    policy = torch.distributions.Categorical(logits=logits)
    terms = [-max(h.item(), 0.0) * policy.log_prob(actions)[i] for i, h in enumerate(advantages)]
    expected = sum(terms) / 6 + 0.3 * ((values - returns) ** 2).mean() - 0.1 * policy.entropy().mean()
    torch.testing.assert_close(loss, expected)
    args.relu_advantage = False
    loss, _ = vsop.loss_function(agent, minibatch, args)
    signed = sum(-h * policy.log_prob(actions)[i] for i, h in enumerate(advantages)) / 6
    torch.testing.assert_close(loss - expected, signed - sum(terms) / 6)


def test_ppo_loss_against_the_formula():
    ppo = load("ppo_procgen")
    args, envs, agent = make(ppo, ent_coef=0.1, vf_coef=0.3)
    obs, actions, old_logprobs, advantages, returns, old_values, _ = minibatch = filled_minibatch(ppo, args, 6)
    loss, _ = ppo.loss_function(agent, minibatch, args)
    logits, values = agent(obs)
    policy = torch.distributions.Categorical(logits=logits)
    policy_terms, value_terms = [], []
    for i in range(6):
        ratio = (policy.log_prob(actions)[i] - old_logprobs[i]).exp()
        clipped = min(max(ratio.item(), 0.8), 1.2)
        policy_terms.append(-min(ratio.item() * advantages[i].item(), clipped * advantages[i].item()))
        near = old_values[i] + min(max((values[i] - old_values[i]).item(), -0.2), 0.2)
        value_terms.append(0.5 * max((values[i] - returns[i]).item() ** 2, (near - returns[i]).item() ** 2))
    expected = np.mean(policy_terms) + 0.3 * np.mean(value_terms) - 0.1 * policy.entropy().mean().item()
    assert loss.item() == pytest.approx(expected, rel=1e-4)


def test_spectral_norm_of_the_hidden_layer(vsop):
    args, envs, agent = make(vsop)
    agent.hidden.weight.data += 0.01 * torch.randn_like(agent.hidden.weight)
    collect(vsop, args, envs, agent)  # which brings u and v to convergence
    exact = torch.linalg.matrix_norm(agent.hidden.weight, 2)
    assert agent.hidden.sigma().item() == pytest.approx(exact.item(), rel=1e-3)
    x = torch.randn(3, 2048)
    expected = x @ (agent.hidden.weight / exact).T + agent.hidden.bias
    torch.testing.assert_close(agent.hidden(x), expected, atol=1e-4, rtol=1e-3)
    _, _, plain = make(vsop, spectral_norm=False)
    assert type(plain.hidden) is torch.nn.Linear


def test_the_same_seed_plays_the_same(script):
    def rollout(seed):
        args, envs, agent = make(script, seed=seed)
        return collect(script, args, envs, agent)

    one, again, other = rollout(1), rollout(1), rollout(2)
    assert torch.equal(one.obs, again.obs) and np.array_equal(one.actions, again.actions)
    assert not torch.equal(one.obs, other.obs)


# ------------------------------------------------------------------------------------------------- command line


@pytest.mark.parametrize("name, game", [("vsop_procgen", "fruitbot"), ("ppo_procgen", "starpilot")])
def test_smoke(name, game, tmp_path):
    mode = "hard" if game == "starpilot" else "easy"
    done = run(name, *TINY, "--env-id", game, "--distribution-mode", mode, cwd=tmp_path)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    values, tags = scalars(tmp_path)
    line = rf"runs/{run_dir(tmp_path).name}: mean return of the last \d+ {{}} episodes (-?\d+\.\d\d|nan)\n"
    start = rf"runs/{run_dir(tmp_path).name}: {game}, on (cpu|cuda)\n"
    lines = re.sub(r"step \d+/.*\n", "", done.stdout)  # progress, on a slow machine
    assert re.fullmatch(start + line.format("training") + line.format("test"), lines), done.stdout
    expected = {f"losses/{tag}" for tag in ("value_loss", "policy_loss", "entropy", "approx_kl", "grad_norm")}
    expected |= {"charts/learning_rate", "charts/SPS", "vsop/positive_advantages", "vsop/c_pi", "spectral_norm/hidden"}
    if game != "starpilot":
        expected |= {f"{kind}/{tag}" for kind in ("charts", "test") for tag in ("episodic_return", "episodic_length")}
        expected |= {"test/gap"}
        lengths = [value for _, value in values["test/episodic_length"]]
        assert all(1 <= length <= 64 for length in lengths)
        gap = np.mean([x for _, x in values["charts/episodic_return"]])
        gap -= np.mean([x for _, x in values["test/episodic_return"]])
        assert values["test/gap"][-1][1] == pytest.approx(gap, abs=1e-4)
    assert expected <= set(values), expected - set(values)
    assert {"vsop/advantages", "vsop/relu_advantages"} <= set(tags["histograms"])
    assert all(np.isfinite(value) for tag in expected for _, value in values[tag])


def play(*options):
    command = [sys.executable, str(ROOT / "enjoy.py"), *map(str, options)]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.mark.parametrize("name", ["vsop_procgen", pytest.param("ppo_procgen", marks=pytest.mark.slow)])
def test_a_run_that_was_stopped_resumes(name, tmp_path):
    options = (*TINY, *"--num-steps 32 --total-timesteps 100000 --checkpoint-every 1024 --env-id bossfight".split())
    command = [sys.executable, str(ROOT / f"{name}.py"), *options]
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as process:
        while process.poll() is None:
            time.sleep(0.1)
            found = list(tmp_path.glob("runs/*/checkpoint.pt"))
            if found and torch.load(found[0], weights_only=True)["step"]:
                break
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 143
        assert re.match(r"stopped at step \d+; .*--resume", process.stderr.read())
    folder = run_dir(tmp_path)
    stopped = torch.load(folder / "checkpoint.pt", weights_only=True)
    assert stopped["step"] > 0 and stopped["test_returns"]
    total = stopped["step"] + 2 * 256
    done = run(name, "--resume", folder, "--total-timesteps", total, cwd=tmp_path)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    after = torch.load(folder / "checkpoint.pt", weights_only=True)
    updates, updates_before = (x["optimizer"]["state"][0]["step"] for x in (after, stopped))
    assert after["step"] == total and updates == updates_before + 4
    known = stopped["returns"][-20:]  # an episode of before is still counted
    assert any(after["returns"][i : i + len(known)] == known for i in range(len(after["returns"])))
    values, _ = scalars(tmp_path)
    for tag in ("charts", "test"):
        steps = [step for step, _ in values[f"{tag}/episodic_return"]]
        assert steps == sorted(steps) and steps[-1] > stopped["step"]
        # Episodes in progress started again: none that ends after the stop is longer than the steps since.
        lengths = zip(values[f"{tag}/episodic_length"], steps)
        assert all(length <= (step - stopped["step"]) / 8 for (_, length), step in lengths if step > stopped["step"])
    assert after["stats"][0] == total
    done = run(name, "--resume", folder, cwd=tmp_path)
    assert done.returncode == 0 and "nothing to do" in done.stdout and done.stdout.count("\n") == 1, done

    done = play(folder, "--episodes", 2, "--video", tmp_path / "out.mp4")
    assert done.returncode == 0 and done.stderr == "", done.stderr
    assert re.search(rf"bossfight, {name}, mean weights: mean [\d.]+, standard deviation [\d.]+\n", done.stdout)
    assert (tmp_path / "out.mp4").stat().st_size > 1000


def test_enjoy_acts_as_the_script_does(script, tmp_path):
    args, envs, agent = make(script)
    agent.actor.weight.data *= 50
    optimizer = script.make_optimizer(agent, args)
    script.save(tmp_path, script.RunArgs(**vars(args)), agent, optimizer, envs, script.Progress(1))
    policy = enjoy.load_policy(tmp_path)

    class Draw:  # stands where a probability ends: the action is one or the other
        def __init__(self, value):
            self.value = value

        def random(self):
            return self.value

    frames = np.random.default_rng(0).integers(256, size=(3, 64, 64, 3), dtype=np.uint8)
    with torch.no_grad():
        ends = agent(torch.as_tensor(frames))[0].softmax(-1).cumsum(-1).numpy()
    for frame, borders in zip(frames, ends):
        for action in range(14):
            assert policy.act(frame, Draw(borders[action] - 1e-3), False) <= action
            assert policy.act(frame, Draw(borders[action] + 1e-3), False) > action
    rng = np.random.default_rng(0)
    actions = [int(policy.act(frames[0], rng, False)) for _ in range(300)]
    counts = np.bincount(actions, minlength=15) / 300
    np.testing.assert_allclose(counts, np.diff(ends[0], prepend=0), atol=0.1)


BAD = {
    "--env-id starpilots": "starpilot,",
    "--num-minibatches 3": "16384",
    "--num-levels 0": "--num-levels",
    "--seed -1": "got -1",
    "--mixed-precision --no-cuda": "--mixed-precision",
    "--compile --no-cuda": "--compile",
}


@pytest.mark.parametrize("options", BAD)
def test_bad_input_is_one_line_and_code_2(options, tmp_path, monkeypatch, capsys):
    """It names the flag, and what is wrong with it."""
    monkeypatch.chdir(tmp_path)
    line = refused(monkeypatch, capsys, "vsop_procgen", *options.split())
    assert options.split()[0] in line and BAD[options] in line
    assert not (tmp_path / "runs").exists()


def test_a_missing_library_is_one_line(tmp_path):
    """As where PyQt5-Qt5 is not installed: a package of that name without a file comes first."""
    package = tmp_path / "PyQt5_Qt5-5.15.19.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: PyQt5-Qt5\nVersion: 5.15.19\n")
    (package / "RECORD").write_text("")
    done = run(
        "vsop_procgen", *TINY, cwd=tmp_path, PYTHONPATH=str(tmp_path) + os.pathsep + os.environ.get("PYTHONPATH", "")
    )
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert "pip install -r requirements-procgen.txt" in done.stderr and not (tmp_path / "runs").exists()
