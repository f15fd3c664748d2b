"""enjoy.py as a user runs it."""

import os
import re
import subprocess
import sys

import numpy as np
import pytest
import torch
from conftest import ROOT, SCRIPTS, load, refused, run, run_dir

import enjoy

TINY = "--total-timesteps 256 --num-steps 64 --num-minibatches 4 --update-epochs 1 --width 16 --no-compile".split()


def play(*options, **env):
    command = [sys.executable, str(ROOT / "enjoy.py"), *map(str, options)]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | env)


@pytest.fixture(scope="module", params=SCRIPTS)
def trained(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    options = ("--env-id", "Hopper-v4", *TINY)
    done = run(request.param, *options, cwd=folder)
    assert done.returncode == 0, done.stderr
    return request.param, run_dir(folder)


def test_prints_every_return_and_their_mean(trained):
    name, folder = trained
    done = play(folder, "--episodes", 3)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    returns = [float(x) for x in re.findall(r"episode \d: return (-?[\d.]+), \d+ steps", done.stdout)]
    assert len(returns) == 3
    line = rf"Hopper-v4, {name}, posterior mean: mean (-?[\d.]+), standard deviation ([\d.]+)\n"
    mean, deviation = map(float, re.search(line, done.stdout).groups())
    assert mean == pytest.approx(np.mean(returns), abs=0.01) and deviation == pytest.approx(np.std(returns), abs=0.01)
    assert (folder / "policy.pt").stat().st_size < 500_000


def test_acts_as_the_script_does(trained):
    """The same action for the same raw observation, from the file alone and from the script's own network."""
    name, folder = trained
    script, policy = load(name), enjoy.load_policy(folder)
    state = torch.load(folder / "checkpoint.pt", weights_only=True)
    args = script.Args(**state["args"])
    envs = script.Envs(args, folder)
    envs.obs_stats.load_state_dict(state["envs"]["obs_stats"])
    agent = script.Agent(envs, args)
    agent.load_state_dict(state["agent"])
    for raw in 3 * np.random.default_rng(0).normal(size=(20, 11)):
        obs = ((raw - envs.obs_stats.mean) / envs.obs_stats.std).clip(-10, 10)
        with torch.no_grad():
            expected = agent.actor(torch.tensor(obs[None], dtype=torch.float32))[0].clamp(-1, 1)
        np.testing.assert_allclose(policy.act(raw, None, False), expected, atol=1e-5)


def test_thompson_draws_weights_and_noise(trained):
    name, folder = trained
    policy, obs = enjoy.load_policy(folder), np.ones(11)
    assert np.array_equal(policy.act(obs, None, False), policy.act(obs, None, False))
    policy.low, policy.high, rng = -np.inf, np.inf, np.random.default_rng(0)
    draws = np.array([policy.act(obs, rng, True) for _ in range(4000)])
    np.testing.assert_allclose(draws.std(0), policy.noise_scale, rtol=0.1)
    policy.noise_scale = 0.0
    draws = np.array([policy.act(obs, rng, True) for _ in range(100)])
    assert (np.ptp(draws, axis=0).max() > 0) == (
        name in ("vsop_continuous", "vsppo_continuous")
    )  # the others have no dropout


@pytest.mark.parametrize("trained", ["vsop_continuous"], indirect=True)
def test_films_without_a_display(trained, tmp_path):
    _, folder = trained
    done = play(folder / "policy.pt", "--episodes", 1, "--video", tmp_path / "out.mp4", DISPLAY="")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out.mp4").stat().st_size > 5000


class Payload:
    def __reduce__(self):
        return os.mkdir, ("payload-was-here",)


@pytest.mark.parametrize("trained", ["vsop_continuous"], indirect=True)
def test_bad_input_is_one_line(trained, tmp_path, monkeypatch, capsys):
    _, folder = trained
    monkeypatch.chdir(tmp_path)
    for name in ("DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    torch.save(dict(script=Payload()), tmp_path / "payload.pt")
    (tmp_path / "text.pt").write_text("hello")
    policy = torch.load(folder / "policy.pt", weights_only=True)
    torch.save(policy | dict(env_id="Hoper-v4"), tmp_path / "unknown.pt")
    torch.save(policy | dict(env_id="Ant-v4"), tmp_path / "other.pt")
    for options, expected in {
        ("payload.pt",): "payload.pt is no policy file of this project, or is damaged (UnpicklingError)",
        ("text.pt",): "text.pt is no policy file of this project, or is damaged",
        ("nowhere",): "there is no policy file nowhere",
        ("unknown.pt",): "unknown task 'Hoper-v4'; the nearest names are",
        ("other.pt",): "Ant-v4 has 27 observations here, the policy 11",
        (folder, "--seed", -1): "--seed must be at least 0, got -1",
        (folder, "--episodes", 0): "--episodes must be at least 1, got 0",
        (folder, "--video", "no/where.mp4"): "there is no folder no for the video",
        (folder, "--render"): "--render needs a display; --video films without one",
    }.items():
        assert refused(monkeypatch, capsys, "enjoy", *options).startswith(expected)
    assert not (tmp_path / "payload-was-here").exists()
