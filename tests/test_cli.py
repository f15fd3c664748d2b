"""The scripts as a user runs them."""

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import get_args, get_type_hints

import numpy as np
import pytest
import torch
from conftest import BAYESIAN, GAME_SCRIPTS, ROOT, SCRIPTS, load, own_task, refused, run, run_dir, scalars

TINY = "--total-timesteps 256 --num-steps 64 --num-minibatches 4 --update-epochs 2 --width 16 --no-compile".split()


@pytest.mark.parametrize("name", SCRIPTS)
def test_smoke(name, tmp_path):
    done = run(name, *TINY, "--env-id", "Pendulum-v1", "--total-timesteps", 1280, "--num-envs", 2, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    folder = run_dir(tmp_path)
    assert re.fullmatch(rf"Pendulum-v1__{name}__1__\d+", folder.name)
    first, last = done.stdout.splitlines()
    assert first.startswith(f"runs/{folder.name}: Pendulum-v1, gradients on cpu")
    assert re.fullmatch(rf"runs/{folder.name}: mean return of the last 6 episodes -\d+\.\d\d", last), done.stdout
    values, tags = scalars(tmp_path)
    expected = {f"charts/{tag}" for tag in ("episodic_return", "episodic_length", "learning_rate", "SPS")}
    losses = ("value_loss", "policy_loss", "entropy", "approx_kl", "explained_variance", "grad_norm")
    expected |= {f"losses/{tag}" for tag in losses} | {"vsop/positive_advantages", "vsop/c_pi"}
    expected |= {f"spectral_norm/{network}_{i}" for network in ("actor", "critic") for i in range(3)}
    expected |= {"vsop/disagreement"} if name in BAYESIAN else {"losses/clipfrac"} if "ppo" in name else set()
    assert expected <= set(values), expected - set(values)
    assert {"vsop/advantages", "vsop/relu_advantages"} <= set(tags["histograms"])
    assert all(np.isfinite(value) for tag in expected for _, value in values[tag])
    assert [step for step, _ in values["charts/episodic_return"]] == [400, 400, 800, 800, 1200, 1200]
    assert {length for _, length in values["charts/episodic_length"]} == {200}
    policy = torch.load(folder / "policy.pt", weights_only=True)
    assert policy["script"] == name and policy["args"]["env_id"] == "Pendulum-v1"
    assert [tuple(weight.shape) for weight, _ in policy["layers"]] == [(16, 3), (16, 16), (1, 16)]


@pytest.mark.parametrize("task", ["HalfCheetah-v4", "Humanoid-v5", "Pusher-v5", "MountainCarContinuous-v0"])
def test_tasks(task, tmp_path):
    done = run("vsop_continuous", *TINY, "--env-id", task, cwd=tmp_path)
    assert done.returncode == 0 and done.stderr == "", done.stderr


def test_same_seed_same_bits(tmp_path):
    def result(number, *options):
        folder = tmp_path / str(number)
        folder.mkdir()
        done = run("vsop_continuous", *TINY, "--env-id", "Reacher-v4", "--num-envs", 2, *options, cwd=folder)
        assert done.returncode == 0, done.stderr
        policy = torch.load(run_dir(folder) / "policy.pt", weights_only=True)
        return scalars(folder)[0]["charts/episodic_return"], torch.cat([w.flatten() for w, _ in policy["layers"]])

    returns, weights = result(1)
    assert len(returns) > 2
    again, same_weights = result(2)
    assert returns == again and torch.equal(weights, same_weights)
    other, _ = result(3, "--seed", 2)
    assert returns != other


@pytest.mark.parametrize("name", [*SCRIPTS, *GAME_SCRIPTS])
def test_help_lists_every_flag_with_its_meaning(name, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--help"])
    with pytest.raises(SystemExit) as stop:
        load(name).parse_args()
    text = capsys.readouterr().out
    assert stop.value.code == 0
    for flag in vars(load(name).RunArgs()):
        assert flag.replace("_", "-") in text, flag
    assert load(name).__doc__.split(":")[0] in text
    learning, run = text.split(" run options ")  # what decides the learning has a box of its own
    learning = learning.split(" learning options ")[1]
    assert "--learning-rate" in learning and "--gamma" in learning and "--seed" in learning
    assert "--checkpoint-every" in run and "--resume" in run and "--learning-rate" not in run


def test_a_preset_replaces_defaults_and_not_flags(monkeypatch, tmp_path, capsys):
    script = load("vsop_continuous")
    settings = script.PRESETS["few-actions"]
    tuned = script.Args(preset="few-actions", **settings)
    assert tuned != script.Args(preset="few-actions")
    assert get_args(get_type_hints(script.Args)["preset"]) == tuple(script.PRESETS)

    def parsed(*options):
        monkeypatch.setattr(sys, "argv", ["vsop_continuous.py", *map(str, options)])
        return script.Args(**{x.name: getattr(script.parse_args(), x.name) for x in fields(script.Args)})

    assert parsed() == parsed("--preset", "paper") == script.Args()
    assert parsed("--preset", "few-actions") == tuned
    assert parsed("--gae-lambda", 0.5, "--preset", "few-actions") == replace(tuned, gae_lambda=0.5)
    done = run("vsop_continuous", *TINY, *own_task(tmp_path), "--preset", "few-actions", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    resume = ("--resume", run_dir(tmp_path))
    assert parsed(*resume).learning_rate == settings["learning_rate"]
    assert "--preset" in refused(monkeypatch, capsys, "vsop_continuous", *resume, "--preset", "paper")


BAD = [  # the first flag is the one to blame
    "--env-id HalfCheeta-v4",
    "--env-id Pusher-v4",
    "--env-id CartPole-v1",
    "--env-id not_there:Task-v0",
    "--env-kwargs nope 1 --env-id Hopper-v4",
    "--num-minibatches 33",
    "--dropout-rate 1",
    "--dropout-rate -0.1",
    "--learning-rate -0.001",
    "--learning-rate nan",
    "--total-timesteps 0",
    "--seed -1",
    "--seed 99999999999999999999",
    "--num-steps 0",
    "--num-envs 0",
    "--gamma 1.5",
    "--checkpoint-every 0",
    "--resume nowhere",
]


@pytest.mark.parametrize("options", BAD)
def test_bad_input_is_one_line_and_code_2(options, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    flag = options.split()[0].replace("env-kwargs", "env-id")
    assert flag in refused(monkeypatch, capsys, "vsop_continuous", *options.split())
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_script_checks_its_input(name, capsys):
    script = load(name)
    for bad in (dict(learning_rate=-1.0), dict(num_steps=0), dict(num_minibatches=3), dict(total_timesteps=0)):
        with pytest.raises(SystemExit, match="2"):
            script.check(script.RunArgs(**bad))
        assert capsys.readouterr().err.count("\n") == 1


def test_a_task_in_the_current_folder(tmp_path):
    done = run("vsop_continuous", *TINY, *own_task(tmp_path), cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_steps_in_powers_of_ten(tmp_path):
    done = run("vsop_continuous", *own_task(tmp_path), *TINY, "--total-timesteps", "1e3", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert torch.load(run_dir(tmp_path) / "checkpoint.pt", weights_only=True)["args"]["total_timesteps"] == 1000


def test_integer_actions_are_refused(tmp_path):
    done = run("vsop_continuous", *TINY, *own_task(tmp_path, actions="np.int64"), cwd=tmp_path)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "--env-id" in done.stderr, done.stderr


@pytest.mark.parametrize("error", ["open('not there')", "raise SystemExit(0)", "raise ValueError('out of memory')"])
def test_a_task_that_raises_shows_its_traceback_and_keeps_the_checkpoint(error, tmp_path):
    done = run("vsop_continuous", *TINY, *own_task(tmp_path, f"if self.t == 30: {error}"), cwd=tmp_path)
    assert done.returncode == 1
    *trace, last = done.stderr.splitlines()
    assert trace[0].startswith("Traceback") and "own.py" in done.stderr
    assert last.startswith("error: ") and str(run_dir(tmp_path).name) in last
    assert (run_dir(tmp_path) / "checkpoint.pt").exists()


@pytest.mark.parametrize("redirect", [">&-", "| head -1"])
def test_closed_output(redirect, tmp_path):
    options = " ".join((*TINY, *own_task(tmp_path)))
    command = f'"{sys.executable}" "{ROOT}/vsop_continuous.py" {options} {redirect}'
    done = subprocess.run(command, shell=True, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    assert done.stderr == ""
    assert torch.load(run_dir(tmp_path) / "checkpoint.pt", weights_only=True)["step"] == 256


def test_unwritable_runs_folder(tmp_path):
    (tmp_path / "runs").write_text("a file where the folder should be")
    done = run("vsop_continuous", *TINY, "--env-id", "Pendulum-v1", cwd=tmp_path)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert done.stderr.startswith("error: ")


def test_rmpg_refuses_unbounded_actions(tmp_path):
    (tmp_path / "unbounded.py").write_text(
        "import gymnasium as gym, numpy as np\n"
        "class Env(gym.Env):\n"
        "    action_space = observation_space = gym.spaces.Box(-np.inf, np.inf, (1,))\n"
        "    def reset(self, seed=None, options=None): return np.zeros(1), {}\n"
        "    def step(self, action): return np.zeros(1), 0.0, False, False, {}\n"
        "gym.register('Unbounded-v0', Env)\n"
    )
    done = run("rmpg_continuous", "--env-id", "unbounded:Unbounded-v0", cwd=tmp_path, PYTHONPATH=str(tmp_path))
    assert done.returncode == 2
    assert done.stderr.startswith("error: unbounded:Unbounded-v0") and done.stderr.count("\n") == 1


@pytest.mark.slow  # a tracked run is resumed by default in test_checkpoints.py
def test_wandb_offline(tmp_path):
    options = ("--track", "--wandb-project-name", "some-project", "--env-id", "Pendulum-v1")
    done = run("vsop_continuous", *TINY, *options, cwd=tmp_path, WANDB_MODE="offline")
    assert done.returncode == 0, done.stderr
    (folder,) = (tmp_path / "wandb").glob("offline-run-*")
    assert list(folder.glob("run-*.wandb"))[0].stat().st_size > 1000


def test_wandb_without_an_account_is_one_line(tmp_path):
    options = ("--track", "--env-id", "Pendulum-v1")
    account = dict(WANDB_MODE="online", WANDB_API_KEY="", HOME=str(tmp_path), NETRC=str(tmp_path / "netrc"))
    done = run("vsop_continuous", *TINY, *options, cwd=tmp_path, **account)
    assert done.returncode == 1 and done.stderr.count("\n") == 1, done.stderr


def test_unscaled_observations_and_rewards(tmp_path):
    options = ("--no-norm-obs", "--no-norm-reward", "--env-id", "Pendulum-v1")
    done = run("vsop_continuous", *TINY, *options, cwd=tmp_path, PYTHONWARNINGS="error::RuntimeWarning")
    assert done.returncode == 0 and done.stderr == "", done.stderr


def test_capture_video(tmp_path):
    done = run("ppo_continuous", *TINY, "--capture-video", "--env-id", "InvertedPendulum-v4", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert next(run_dir(tmp_path).glob("videos/*/*-episode-0.mp4")).stat().st_size > 1000


def test_learning_rate_is_annealed_unless_told_otherwise(tmp_path):
    for folder, options, expected in (("a", (), [2e-4, 1e-4]), ("b", ("--no-anneal-lr",), [2e-4, 2e-4])):
        (tmp_path / folder).mkdir()
        tiny = ("--total-timesteps", 4096, "--update-epochs", 1, "--num-minibatches", 1, "--no-compile")
        run("vsop_continuous", *tiny, *options, "--env-id", "Pendulum-v1", cwd=tmp_path / folder)
        rates = [value for _, value in scalars(tmp_path / folder)[0]["charts/learning_rate"]]
        assert rates == pytest.approx(expected)


def test_a_plain_line_now_and_then_when_the_output_is_not_a_terminal(capsys, monkeypatch):
    script = load("vsop_continuous")
    now = 0.0
    monkeypatch.setattr(script, "time", SimpleNamespace(time=lambda: now))
    progress = script.Progress(10_000_000)
    progress.returns.extend([1.0, 2.0])
    now = 10.0
    assert progress.update(1000) == 100.0
    assert capsys.readouterr().out == ""
    now = 40.0
    progress.update(4000)
    assert capsys.readouterr().out == "step 4000/10000000  100 steps/s  return 1.50  27:46:00 left\n"
    now = 50.0
    progress.update(5000)
    assert capsys.readouterr().out == ""


def test_a_progress_bar_on_a_terminal(tmp_path):
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 120, 0, 0))
    command = [sys.executable, ROOT / "a3c_continuous.py", *TINY, "--env-id", "Pendulum-v1"]
    done = subprocess.run(command, cwd=tmp_path, stdout=theirs, stderr=theirs, timeout=120)
    screen = os.read(ours, 100_000).decode()
    assert done.returncode == 0
    assert re.search(r"100%\|█+\| 256/256 \[00:\d\d<00:00, +[\d.]+k?step/s, return -[\d.]+\]", screen), screen
    assert screen.count("\n") == 3  # the first line, the bar and the last line, nothing else


def test_a_compiler_that_does_not_work_is_one_line_and_the_run_continues(tmp_path):
    options = (
        "--env-id",
        "Hopper-v4",
        "--num-steps",
        64,
        "--num-minibatches",
        1,
        "--width",
        8,
        "--total-timesteps",
        128,
    )
    env = dict(CXX="/bin/false", TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "cache"))
    done = run("a3c_continuous", *options, cwd=tmp_path, **env)
    assert done.returncode == 0 and done.stderr.count("\n") == 1 and "uncompiled" in done.stderr, done.stderr
