"""enjoy.py as a user runs it."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import ROOT, SCRIPTS, load, refused, run, run_dir

import enjoy

TINY = "--total-timesteps 256 --num-steps 64 --num-minibatches 4 --update-epochs 1 --width 16 --no-compile".split()
QUICK = ("vsop_continuous", "ppo_continuous")  # the others write the same format
ALL = [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in SCRIPTS]


def play(*options, shell="", **env):
    """enjoy.py through its command line; `shell` is appended to it."""
    command = ["sh", "-c", f'"$@" {shell}', "sh", sys.executable, ROOT / "enjoy.py", *map(str, options)]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | env, timeout=1200)


@pytest.mark.parametrize("name", ALL)
def test_plays_what_a_script_saved(name, tmp_path):
    done = run(name, "--env-id", "Hopper-v4", *TINY, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    folder = run_dir(tmp_path)
    assert (folder / "policy.pt").stat().st_size < 500_000
    done = play(folder, "--episodes", 3)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    returns = [float(x) for x in re.findall(r"episode \d: return (-?[\d.]+), \d+ steps", done.stdout)]
    assert len(returns) == 3
    mean, deviation = map(float, re.search(r"mean (-?[\d.]+), standard deviation ([\d.]+)\n", done.stdout).groups())
    assert mean == pytest.approx(np.mean(returns), abs=0.01) and deviation == pytest.approx(np.std(returns), abs=0.01)

    # The same action for the same raw observation as the script's own network.
    script, policy = load(name), enjoy.load_policy(folder)
    state = torch.load(folder / "checkpoint.pt", weights_only=True)
    spaces = SimpleNamespace(obs_dim=11, action_dim=3, low=policy.low, high=policy.high)
    agent = script.Agent(spaces, SimpleNamespace(**state["args"]))
    agent.load_state_dict(state["agent"])
    for raw in 3 * np.random.default_rng(0).normal(size=(20, 11)):
        obs = ((raw - policy.mean) / policy.std).clip(-10, 10)
        with torch.no_grad():
            expected = agent.actor(torch.tensor(obs[None], dtype=torch.float32))[0].clamp(-1, 1)
        np.testing.assert_allclose(policy.act(raw, None, False), expected, atol=1e-5)

    # --thompson samples the noise, and the weights where there is dropout.
    obs, rng = np.ones(11), np.random.default_rng(0)
    policy.low, policy.high = -np.inf, np.inf
    samples = np.array([policy.act(obs, rng, True) for _ in range(4000)])
    np.testing.assert_allclose(samples.std(0), policy.noise_scale, rtol=0.1)
    policy.noise_scale = 0.0
    samples = np.array([policy.act(obs, rng, True) for _ in range(100)])
    assert (np.ptp(samples, axis=0).max() > 0) == (name in ("vsop_continuous", "vsppo_continuous"))


TASK = """
import sys
import gymnasium as gym
import numpy as np

class Task(gym.Env):  # takes no render_mode
    observation_space, action_space = gym.spaces.Box(-1, 1, (11,)), gym.spaces.Box(-1, 1, (3,))

    def __init__(self, limit=5, fault=""):
        self.limit, self.fault = limit, fault

    def reset(self, seed=None, options=None):
        self.steps = 0
        return np.zeros(11), {}

    def step(self, action):
        self.steps += 1
        if self.fault == "raise":
            raise FileNotFoundError("of the task")
        if self.fault == "exit":
            sys.exit(0)
        return np.full(11, np.nan if self.fault == "nan" else 0.0), 1.0, self.steps >= self.limit, False, {}

gym.register("Task-v0", Task)
"""


@pytest.fixture
def save(tmp_path, monkeypatch):
    """Writes an untrained policy for Hopper-v4, with changes; the current folder has a module with a task."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])
    monkeypatch.delitem(sys.modules, "my_module", raising=False)
    (tmp_path / "my_module.py").write_text(TASK)
    generator = torch.Generator().manual_seed(0)
    layers = [(torch.randn(n, m, generator=generator), torch.zeros(n)) for m, n in ((11, 8), (8, 8), (8, 3))]
    args = dict(norm_obs=True, env_kwargs=dict(max_episode_steps=6))
    policy = dict(script="vsop_continuous", env_id="Hopper-v4", args=args, activation="tanh")
    policy |= dict(layers=layers, log_std=torch.zeros(3), obs_mean=torch.zeros(11), obs_std=torch.ones(11))
    policy |= dict(action_low=-torch.ones(3), action_high=torch.ones(3))

    def save(name="policy.pt", without=None, **changes):
        content = policy | changes
        torch.save({key: content[key] for key in content if key != without}, tmp_path / name)
        return tmp_path / name

    return save


def of_module(**env_kwargs):
    return dict(env_id="my_module:Task-v0", args=dict(norm_obs=True, env_kwargs=env_kwargs))


def test_films_without_a_display(save, tmp_path):
    done = play(save(), "--episodes", 1, "--video", tmp_path / "a b.mp4", DISPLAY="")
    assert done.returncode == 0 and ", 6 steps" in done.stdout, done.stderr
    assert (tmp_path / "a b.mp4").stat().st_size > 3000


def test_module_of_a_task_is_imported_only_on_request(save, monkeypatch, capsys):
    assert "--trust-module" in refused(monkeypatch, capsys, "enjoy", save(**of_module()))
    hidden = dict(norm_obs=True, env_kwargs=dict(inner="my_module:Task-v0"))
    assert "--trust-module" in refused(monkeypatch, capsys, "enjoy", save(args=hidden))
    assert "my_module" not in sys.modules
    assert enjoy.enjoy(enjoy.Args(save(**of_module()), trust_module=True, episodes=2)) == [5, 5]
    assert enjoy.enjoy(enjoy.Args(save(**of_module(limit=3)), trust_module=True, episodes=2)) == [3, 3]


@pytest.mark.parametrize("fault", ["raise", "exit"])
def test_task_that_fails_shows_its_traceback_and_one_line(fault, save, capsys):
    with pytest.raises(SystemExit) as stop:
        enjoy.enjoy(enjoy.Args(save(**of_module(fault=fault)), trust_module=True))
    *trace, last = capsys.readouterr().err.splitlines()
    assert stop.value.code == 1 and trace[0].startswith("Traceback") and last.startswith("error: my_module:Task-v0")


class Payload:
    def __reduce__(self):
        return os.mkdir, ("payload-was-here",)


def test_bad_input_is_one_line(save, tmp_path, monkeypatch, capsys):
    for name in ("DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    torch.save(dict(script=Payload()), tmp_path / "payload.pt")
    (tmp_path / "text.pt").write_text("hello")
    (tmp_path / "cut.pt").write_bytes(save().read_bytes()[:1000])
    infinite = torch.full((8, 11), torch.inf)
    layers = torch.load(save(), weights_only=True)["layers"]
    save("infinite.pt", layers=[(infinite, layers[0][1]), *layers[1:]])
    save("nan.pt", log_std=torch.full((3,), torch.nan))
    save("order.pt", layers=layers[::-1])
    save("one.pt", obs_mean=torch.zeros(1))
    save("narrow.pt", layers=[*layers[:2], (torch.zeros(1, 8), torch.zeros(1))])
    save("game.pt", weights={"convs.0.weight": torch.zeros(1)}, args=dict(distribution_mode="easy"))
    save("unknown.pt", env_id="Hoper-v4")
    save("other.pt", env_id="Ant-v4")
    save("kwargs.pt", args=dict(norm_obs=True, env_kwargs=dict(nonsense=1)))
    save("module.pt", env_id="not_there:Task-v0")
    save("nan_task.pt", **of_module(fault="nan"))
    for key in ("env_id", "args", "activation", "layers", "log_std", "obs_std", "action_high"):
        save(f"no_{key}.pt", without=key)
    trusted = ("module.pt", "nan_task.pt", "kwargs.pt")
    for path in [tmp_path / "nowhere", *tmp_path.glob("*.pt")]:
        if path.name != "policy.pt":
            options = ("--trust-module",) if path.name in trusted else ()
            assert refused(monkeypatch, capsys, "enjoy", path, *options)
    assert not (tmp_path / "payload-was-here").exists()
    for flag, *value in ("--seed", -1), ("--episodes", 0), ("--render",):
        assert flag in refused(monkeypatch, capsys, "enjoy", save(), flag, *value)


def test_bad_video_is_one_line_and_leaves_no_file(save, tmp_path, monkeypatch, capsys):
    (tmp_path / "folder.mp4").mkdir()
    (tmp_path / "full.mp4").symlink_to("/dev/full")
    (tmp_path / "unwritable.mp4").symlink_to("/proc/version")
    path = save()
    before = sorted(tmp_path.iterdir())
    for name in ("out.txt", "out", ".", "no/where.mp4", "folder.mp4", "unwritable.mp4"):
        assert "--video" in refused(monkeypatch, capsys, "enjoy", path, "--episodes", 1, "--video", name), name
    with pytest.raises(SystemExit) as stop:
        enjoy.enjoy(enjoy.Args(path, episodes=1, video=Path("full.mp4")))  # a disk is full after some frames
    error = capsys.readouterr().err
    assert stop.value.code == 2 and error.startswith("error: --video") and error.count("\n") == 1
    save(**of_module())  # a task that does not render
    refused(monkeypatch, capsys, "enjoy", path, "--trust-module", "--video", "out.mp4")
    assert sorted(x for x in tmp_path.iterdir() if x.name != "__pycache__") == before


def test_closed_output(save, tmp_path):
    """The reader of a pipe may leave, and there may be no stdout: the video is still complete."""
    for shell in (">&-", "| head -n 1"):
        video = tmp_path / "out.mp4"
        done = play(save(), "--episodes", 3, "--video", video, shell=shell)
        assert done.stderr == "" and done.stdout.count("\n") == (shell != ">&-")
        assert video.stat().st_size > 3000
        video.unlink()


def test_broken_package_is_one_line(tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('torch is broken')")
    done = play("nowhere", PYTHONPATH=str(tmp_path))
    assert done.returncode != 0 and done.stderr.startswith("error: torch is broken") and done.stderr.count("\n") == 1


def test_missing_torch_and_gymnax_are_one_line(save, save_gymnax, monkeypatch, capsys):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name not in ("torch", "gymnax") and find(name))
    assert "pip install -r requirements.txt" in refused(monkeypatch, capsys, "enjoy", save())
    assert "pip install -r requirements-gymnax.txt" in refused(monkeypatch, capsys, "enjoy", save_gymnax())


@pytest.mark.parametrize("columns", ["30", "200"])
def test_help_opens_with_what_it_does(columns):
    printed = " ".join(play("--help", COLUMNS=columns).stdout.split())
    first = " ".join(enjoy.__doc__.partition("\n\n")[0].split())
    assert first in printed[:300] and "--trust-module" in printed


# --------------------------------------------------------------------------------------------- the JAX scripts
@pytest.fixture
def save_gymnax(tmp_path):
    """Writes an untrained policy of a JAX script, for CartPole-v1, with changes."""

    def save_gymnax(name="policy.npz", inputs=4, outputs=2, without=None, args=None, **changes):
        rng, sizes = np.random.default_rng(0), (inputs, 8, 8, outputs)
        settings = dict(env_id="CartPole-v1", activation="tanh", dropout_rate=0.0, norm_obs=False) | (args or {})
        content = dict(meta=json.dumps(dict(script="vsop_gymnax", args=settings)))
        for i in range(3):
            content[f"layers/{i}/0"], content[f"layers/{i}/1"] = (
                rng.normal(size=sizes[i : i + 2]),
                np.zeros(sizes[i + 1]),
            )
        content |= changes
        np.savez(tmp_path / name, **{key: content[key] for key in content if key != without})
        return tmp_path / name

    return save_gymnax


@pytest.mark.parametrize("env_id", ["CartPole-v1", "Pendulum-v1"])
def test_plays_what_a_gymnax_script_saved(env_id, tmp_path):
    pytest.importorskip("gymnax")
    script = load("vsop_gymnax")
    jax, jnp = script.jax, script.jnp
    settings = dict(width=16, num_envs=2, dropout_rate=0.2, norm_obs=True, spectral_norm=True)
    args, env = script.RunArgs(env_id=env_id, **settings), script.make_env(env_id)
    state = jax.jit(partial(script.init, env=env, args=args))(1)
    params = state["params"] = jax.tree.map(lambda x: x + 0.3, state["params"])
    size = len(state["envs"]["obs"][0])
    stats = state["envs"]["obs_stats"] = (10.0, jnp.linspace(-1.0, 1.0, size), jnp.linspace(0.5, 2.0, size))
    writer = script.event_file_writer.EventFileWriter(str(tmp_path / "seed_1"))
    script.save_checkpoint(tmp_path, jax.tree.map(lambda x: jnp.asarray(x)[None], state), [writer], args)

    done = play(tmp_path / "seed_1", "--episodes", 2)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    returns = [float(x) for x in re.findall(r"episode \d: return (-?[\d.]+), \d+ steps", done.stdout)]
    assert len(returns) == 2 and f"{env_id}, vsop_gymnax, mean weights: mean {np.mean(returns):.1f}" in done.stdout
    again = enjoy.enjoy(enjoy.Args(tmp_path / "seed_1" / "policy.npz", episodes=2))
    assert again == pytest.approx(returns, abs=0.01)
    assert enjoy.enjoy(enjoy.Args(tmp_path / "seed_1", episodes=2, thompson=True)) != again

    # The same action for the same raw observation as the script's own network.
    policy, layers = enjoy.load_policy(tmp_path / "seed_1"), script.normalized(script.converge(params), "actor")
    outputs = []
    for raw in 3 * np.random.default_rng(0).normal(size=(20, size)):
        obs = script.normalize(raw[None], *stats[1:])
        outputs.append(np.asarray(script.forward(layers, obs, jnp.ones((2, 1)), args))[0])
        expected = outputs[-1].argmax() if policy.discrete else outputs[-1]
        np.testing.assert_allclose(policy.act(raw, None, False), expected, atol=1e-4)

    # --thompson samples weights and actions.
    rng = np.random.default_rng(0)
    assert np.ptp([policy.forward(raw, rng, True) for _ in range(100)], axis=0).max() > 0
    policy.thompson = False
    samples = np.array([policy.act(raw, rng, True) for _ in range(4000)])
    if policy.discrete:
        np.testing.assert_allclose(samples.mean(), 1 / (1 + np.exp(outputs[-1][0] - outputs[-1][1])), atol=0.05)
    else:
        np.testing.assert_allclose(samples.mean(0), outputs[-1], atol=0.1)
        np.testing.assert_allclose(samples.std(0), np.exp(params["log_std"]), rtol=0.1)


@pytest.mark.parametrize("env_id, inputs, outputs", [("CartPole-v1", 4, 2), ("Breakout-MinAtar", 400, 3)])
def test_films_gymnax_without_a_display(env_id, inputs, outputs, save_gymnax, tmp_path):
    pytest.importorskip("gymnax")
    path = save_gymnax(inputs=inputs, outputs=outputs, args=dict(env_id=env_id))
    done = play(path, "--episodes", 2, "--video", tmp_path / "out.mp4", DISPLAY="")
    assert done.returncode == 0 and done.stderr == "", done.stderr
    assert (tmp_path / "out.mp4").stat().st_size > 3000


def test_bad_gymnax_file_is_one_line(save_gymnax, tmp_path, monkeypatch, capsys):
    (tmp_path / "text.npz").write_text("hello")
    (tmp_path / "cut.npz").write_bytes(save_gymnax().read_bytes()[:1000])
    damaged = bytearray(save_gymnax().read_bytes())
    damaged[len(damaged) // 2] ^= 1
    (tmp_path / "damaged.npz").write_bytes(damaged)
    np.savez(tmp_path / "pickle.npz", meta=np.array(Payload()))
    save_gymnax("json.npz", meta="{")
    save_gymnax("infinite.npz", **{"layers/1/0": np.full((8, 8), np.inf)})
    save_gymnax("shape.npz", **{"layers/1/0": np.zeros((8, 7))})
    save_gymnax("bias.npz", **{"layers/2/1": np.zeros(3)})
    save_gymnax("log_std.npz", log_std=np.zeros(3))
    save_gymnax("nan.npz", log_std=np.full(2, np.nan))
    save_gymnax("text_weights.npz", **{"layers/0/0": np.full((4, 8), "x")})
    save_gymnax("no_scaling.npz", args=dict(norm_obs=True))
    save_gymnax("no_layer.npz", without="layers/1/1")
    monkeypatch.chdir(tmp_path)
    for path in tmp_path.glob("*.npz"):
        if path.name != "policy.npz":
            assert path.name in refused(monkeypatch, capsys, "enjoy", path)
    assert not (tmp_path / "payload-was-here").exists()
    (tmp_path / "runs" / "seed_1").mkdir(parents=True)
    save_gymnax("runs/seed_1/policy.npz")
    assert str(Path("runs", "seed_1", "policy.npz")) in refused(monkeypatch, capsys, "enjoy", "runs")
    monkeypatch.setenv("DISPLAY", ":0")
    assert "--video" in refused(monkeypatch, capsys, "enjoy", save_gymnax(), "--render")


def test_gymnax_task_that_does_not_fit_is_one_line(save_gymnax, tmp_path, monkeypatch, capsys):
    pytest.importorskip("gymnax")
    save_gymnax("unknown.npz", args=dict(env_id="CartPol-v1"))
    save_gymnax("inputs.npz", inputs=5)
    save_gymnax("outputs.npz", outputs=3)
    save_gymnax("continuous.npz", log_std=np.zeros(2))
    save_gymnax("discrete.npz", inputs=3, outputs=1, args=dict(env_id="Pendulum-v1"))
    for path in tmp_path.glob("*.npz"):
        refused(monkeypatch, capsys, "enjoy", path)
    path = save_gymnax(inputs=3, args=dict(env_id="MemoryChain-bsuite"))
    assert "cannot draw" in refused(monkeypatch, capsys, "enjoy", path, "--video", tmp_path / "out.mp4")
    path = save_gymnax(args=dict(env_id="brax/ant"))
    assert "cannot be drawn" in refused(monkeypatch, capsys, "enjoy", path, "--video", tmp_path / "out.mp4")
    assert not (tmp_path / "out.mp4").exists()


POLICIES = sorted((ROOT / "policies").glob("*.pt"))


def test_there_is_a_policy_for_each_of_the_papers_tasks():
    random = json.loads((ROOT / "benchmark" / "results" / "random.json").read_text())["scores"]
    assert {path.stem for path in POLICIES} == {task for task in random if task[-3:-1] == "-v"}


@pytest.mark.parametrize("path", POLICIES, ids=lambda path: path.stem)
def test_a_committed_policy_plays_better_than_random(path, capsys):
    random = json.loads((ROOT / "benchmark" / "results" / "random.json").read_text())["scores"][path.stem]
    (total,) = enjoy.enjoy(enjoy.Args(path, episodes=1))
    assert total > random["mean"]
    assert f"episode 1: return {total:.2f}" in capsys.readouterr().out


def test_the_camera_follows_the_robot():
    for task, follows in (("Hopper-v4", True), ("Reacher-v4", False)):
        path = ROOT / "policies" / f"{task}.pt"
        env = enjoy.load_policy(path).make_env(enjoy.Args(path, video=Path("out.mp4")))
        camera = env.unwrapped.mujoco_renderer.camera_id
        assert (camera >= 0 and env.unwrapped.model.camera(camera).name == "track") == follows
