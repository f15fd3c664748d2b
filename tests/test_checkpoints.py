"""Runs that survive: killed, terminated, out of disk, on damaged files, and resumed."""

import fcntl
import os
import random
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from conftest import ROOT, SCRIPTS, load, own_task, run, run_dir, scalars

SMALL = "--num-steps 128 --num-minibatches 4 --update-epochs 2 --width 16 --no-compile".split()
# What each script is killed on: the tasks whose simulator cannot be restored from its state alone come first.
KILLED = {
    "vsop_continuous": ("Humanoid-v4", *SMALL, "--total-timesteps", 128 * 70, "--checkpoint-every", 384),
    "a3c_continuous": ("Ant-v4", "--no-compile", "--total-timesteps", 5 * 1200, "--checkpoint-every", 250),
    "ppo_continuous": (
        "Reacher-v4",
        *SMALL,
        "--num-envs",
        2,
        "--total-timesteps",
        256 * 220,
        "--checkpoint-every",
        1024,
    ),
    "vsppo_continuous": ("Hopper-v4", *SMALL, "--total-timesteps", 128 * 120, "--checkpoint-every", 128),
    "rmpg_continuous": (
        "HalfCheetah-v4",
        *SMALL,
        "--mc-samples",
        10,
        "--total-timesteps",
        128 * 120,
        "--checkpoint-every",
        256,
    ),
}


def start(name, *options, cwd):
    command = [sys.executable, str(ROOT / f"{name}.py"), *map(str, options)]
    return subprocess.Popen(command, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for(condition, process=None):
    for _ in range(20_000):
        if condition():
            return
        assert process is None or process.poll() is None, process.communicate()
        time.sleep(0.01)
    raise AssertionError("waited for minutes")


def events(folder):
    return set(folder.glob("runs/*/events*"))


def result(folder):
    """All that must be the same: weights, optimizer, statistics, random numbers, and every logged point."""
    state = torch.load(run_dir(folder) / "checkpoint.pt", weights_only=True)
    logged, _ = scalars(folder)
    del logged["charts/SPS"]
    return state | dict(logged=logged, policy=torch.load(run_dir(folder) / "policy.pt", weights_only=True))


def assert_same(one, other, path=""):
    assert type(one) is type(other), path
    if isinstance(one, dict):
        assert one.keys() == other.keys(), path
        for key in one:
            assert_same(one[key], other[key], f"{path}/{key}")
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other), path
        for i, pair in enumerate(zip(one, other)):
            assert_same(*pair, f"{path}/{i}")
    elif isinstance(one, torch.Tensor):
        assert torch.equal(one, other), path
    else:
        assert one == other, path


@pytest.mark.parametrize("name, kills", [
    ("vsop_continuous", 3),
    *(pytest.param(name, 10, marks=pytest.mark.slow) for name in SCRIPTS),
])  # fmt: skip
def test_kills_change_nothing(name, kills, tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    whole.mkdir()
    killed.mkdir()
    options = ["--env-id", *KILLED[name]]
    options[options.index("--total-timesteps") + 1] //= 1 if kills == 10 else 2
    assert run(name, *options, cwd=whole).returncode == 0
    rng = random.Random(0)
    resumed = ()
    for k in range(kills):
        before = events(killed)
        process = start(name, *(resumed or options), cwd=killed)
        wait_for(lambda before=before: events(killed) - before, process)
        wait_for(lambda: list(killed.glob("runs/*/checkpoint.pt")), process)  # it trains from here on
        if k % 2:  # however slow the machine, half of the times it gets somewhere
            old = torch_step(killed)
            wait_for(lambda old=old: torch_step(killed) > old, process)
        time.sleep(rng.uniform(0.0, 0.1))  # short: a fast machine must not finish before the last kill
        process.kill()
        assert process.wait() == -signal.SIGKILL, "the run is too short to be killed so often"
        process.communicate()
        resumed = ("--resume", run_dir(killed).relative_to(killed))
    step = torch.load(run_dir(killed) / "checkpoint.pt", weights_only=True)["step"]
    assert 0 < step < load(name).Args().total_timesteps
    done = run(name, *resumed, cwd=killed)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    assert_same(result(killed), result(whole))


def test_a_compiled_run_resumes_bit_by_bit(tmp_path):
    options = ("--env-id", "Walker2d-v4", *SMALL[:-1], "--checkpoint-every", 640, "--total-timesteps", 128 * 40)
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    whole.mkdir()
    killed.mkdir()
    assert run("vsop_continuous", *options, cwd=whole).returncode == 0
    process = start("vsop_continuous", *options, cwd=killed)
    wait_for(lambda: list(killed.glob("runs/*/checkpoint.pt")) and torch_step(killed) >= 640, process)
    process.kill()
    process.communicate()
    done = run("vsop_continuous", "--resume", run_dir(killed), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert_same(result(killed), result(whole))


def torch_step(folder):
    return torch.load(run_dir(folder) / "checkpoint.pt", weights_only=True)["step"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_leaves_a_checkpoint(number, tmp_path):
    options = ("--env-id", "Hopper-v4", *SMALL, "--checkpoint-every", 128_000, "--total-timesteps", 100_000)
    process = start("vsop_continuous", *options, cwd=tmp_path)
    wait_for(lambda: events(tmp_path), process)
    time.sleep(1.0)
    process.send_signal(number)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 128 + number
    folder = run_dir(tmp_path)
    step = torch_step(tmp_path)
    assert 128 < step < 100_000 and f"--resume runs/{folder.name}" in errors and errors.count("\n") == 1
    args = load("vsop_continuous").RunArgs
    assert args(**torch.load(folder / "checkpoint.pt", weights_only=True)["args"]).total_timesteps == 100_000


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A short run of VSOP that came to its end."""
    folder = tmp_path_factory.mktemp("finished")
    done = run("vsop_continuous", "--env-id", "Hopper-v4", *SMALL, "--total-timesteps", 128 * 12, cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture
def copied(finished, tmp_path):
    shutil.copytree(finished / "runs", tmp_path / "runs")
    return run_dir(tmp_path)


def test_a_finished_run_can_be_extended(copied, tmp_path):
    done = run("vsop_continuous", "--resume", copied, "--total-timesteps", 128 * 24, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    logged, _ = scalars(tmp_path)
    steps = [step for step, _ in logged["charts/learning_rate"]]
    assert steps == sorted(set(steps)) and steps[-1] == 128 * 24
    episodes = [step for step, _ in logged["charts/episodic_return"]]
    assert episodes == sorted(set(episodes)) and sum(length for _, length in logged["charts/episodic_length"]) > 2900
    assert torch_step(tmp_path) == 128 * 24


def test_resuming_a_finished_run_is_harmless(copied, tmp_path):
    before = result(tmp_path)
    done = run("vsop_continuous", "--resume", copied, cwd=tmp_path)
    assert done.returncode == 0 and "nothing to do" in done.stdout
    assert_same(result(tmp_path), before)


def refusal(name, *options, cwd):
    done = run(name, *options, cwd=cwd)
    assert done.returncode == 2, done.stdout
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1, done.stderr
    return done.stderr


def test_arguments_that_contradict_the_run(copied, tmp_path):
    before = (copied / "checkpoint.pt").read_bytes()
    # 64 is not the default, 256 is: both were given, and both are not what the run has
    for flag, value, has in (("width", 64, 16), ("width", 256, 16), ("seed", 2, 1), ("env-id", "Ant-v4", "Hopper-v4")):
        message = refusal("vsop_continuous", "--resume", copied, f"--{flag}", value, cwd=tmp_path)
        assert f"--{flag} {value}" in message and str(has) in message
    done = run("vsop_continuous", "--resume", copied, "--total-timesteps", 256, cwd=tmp_path)
    assert done.returncode == 0 and "1536" in done.stdout
    assert (copied / "checkpoint.pt").read_bytes() == before


def test_a_second_process_is_refused(copied, tmp_path):
    with open(copied / ".lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        message = refusal("vsop_continuous", "--resume", copied, "--total-timesteps", 9999, cwd=tmp_path)
    assert str(copied) in message


def rewrite(path, **changes):
    state = torch.load(path, weights_only=True)
    torch.save(state | changes, path)


def flip_a_bit(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


class Payload:
    def __reduce__(self):
        return os.mkdir, ("payload-was-here",)


DAMAGE = {
    "missing": lambda path: path.unlink(),
    "truncated": lambda path: os.truncate(path, path.stat().st_size // 2),
    "empty": lambda path: path.write_bytes(b""),
    "another file": lambda path: path.write_text("hello"),
    "another archive": lambda path: torch.save([1, 2], path),
    "a pickled payload": lambda path: torch.save(Payload(), path),
    "one bit": flip_a_bit,
    "another script": lambda path: rewrite(path, script="ppo_continuous"),
    "other arguments": lambda path: rewrite(path, args=dict(seed=1)),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damaged_checkpoints_are_one_line(kind, copied, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    DAMAGE[kind](copied / "checkpoint.pt")
    with pytest.raises(SystemExit, match="2"):
        load("vsop_continuous").load_checkpoint(copied)
    message = capsys.readouterr().err
    assert message.startswith("error: --resume") and message.count("\n") == 1 and str(copied) in message
    assert not (tmp_path / "payload-was-here").exists()


@pytest.mark.parametrize("changes", [
    dict(agent={}),
    dict(random=torch.zeros(3, dtype=torch.uint8)),
    dict(envs=[{}]),
])  # fmt: skip
def test_a_checkpoint_that_does_not_fit_is_one_line(changes, copied, tmp_path):
    rewrite(copied / "checkpoint.pt", **changes)
    message = refusal("vsop_continuous", "--resume", copied, "--total-timesteps", 9999, cwd=tmp_path)
    assert "--resume" in message and "checkpoint.pt" in message
    assert scalars(tmp_path)[0]["charts/episodic_return"]  # the log is untouched


def test_a_full_disk_loses_nothing(tmp_path):
    """What is written through a link to /dev/full fails as on a full disk."""
    whole, full = tmp_path / "whole", tmp_path / "full"
    whole.mkdir()
    full.mkdir()
    options = ("--env-id", "Hopper-v4", *SMALL, "--checkpoint-every", 640, "--total-timesteps", 128 * 60)
    assert run("vsop_continuous", *options, cwd=whole).returncode == 0
    process = start("vsop_continuous", *options, cwd=full)
    wait_for(lambda: list(full.glob("runs/*/checkpoint.pt")), process)
    folder = run_dir(full)
    os.symlink("/dev/full", folder / "checkpoint.link")
    os.replace(folder / "checkpoint.link", folder / "checkpoint.part")
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1 and errors.count("\n") == 1, errors
    assert "No space left on device" in errors and folder.name in errors
    (folder / "checkpoint.part").unlink()
    done = run("vsop_continuous", "--resume", folder, cwd=full)
    assert done.returncode == 0, done.stderr
    assert_same(result(full), result(whole))


def test_a_log_that_cannot_be_written_stops_the_run(tmp_path, monkeypatch, capsys):
    script = load("vsop_continuous")
    monkeypatch.chdir(tmp_path)

    def full(writer):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(script.SummaryWriter, "flush", full)
    args = script.RunArgs(
        env_id="Pendulum-v1", width=8, num_steps=64, total_timesteps=640, num_minibatches=1, compile=False
    )
    with pytest.raises(SystemExit, match="1"):
        script.train(args)
    error = capsys.readouterr().err
    assert "No space left on device" in error and error.count("\n") == 1


@pytest.mark.parametrize("obs, reward", [("np.nan", "1.0"), ("np.inf", "1.0"), ("0.0", "np.nan")])
def test_what_is_not_finite_stops_the_run(obs, reward, tmp_path):
    step = f"""Task.total = getattr(Task, "total", 0) + 1
        if Task.total == 300: return np.full(2, {obs}), {reward}, False, False, {{}}"""
    options = (*own_task(tmp_path, step), *SMALL, "--total-timesteps", 1280, "--checkpoint-every", 128)
    done = run("vsop_continuous", *options, cwd=tmp_path)
    assert done.returncode == 1
    assert "not finite at step 384" in done.stderr and done.stderr.count("\n") == 1
    assert torch_step(tmp_path) == 256


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_loss_that_explodes_stops_the_run(name, tmp_path):
    options = ("--env-id", "Hopper-v4", *SMALL, "--learning-rate", 1e35, "--total-timesteps", 1280)
    done = run(name, *options, cwd=tmp_path)
    assert done.returncode == 1, done.stdout
    assert "not finite" in done.stderr and done.stderr.count("\n") == 1, done.stderr
    policy = torch.load(run_dir(tmp_path) / "policy.pt", weights_only=True)
    assert all(x.isfinite().all() for layer in policy["layers"] for x in layer)


def test_an_episode_that_cannot_be_replayed_is_restarted(tmp_path):
    task = own_task(tmp_path, "return np.random.normal(size=2), 1.0, self.t == 50, False, {}")
    assert run("vsop_continuous", *task, *SMALL, "--total-timesteps", 1280, cwd=tmp_path).returncode == 0
    done = run("vsop_continuous", "--resume", run_dir(tmp_path), "--total-timesteps", 2560, cwd=tmp_path)
    assert done.returncode == 0
    assert "not deterministic" in done.stderr and done.stderr.count("\n") == 1
    lengths = [length for _, length in scalars(tmp_path)[0]["charts/episodic_length"]]
    assert set(lengths) == {50} and len(lengths) == 25 + 25  # 30 steps of the 26th episode are lost


@pytest.mark.parametrize("task", ["Humanoid-v4", "Ant-v4", "Reacher-v4", "Pusher-v5", "Swimmer-v4", "Pendulum-v1"])
def test_an_episode_in_progress_is_replayed_exactly(task, tmp_path):
    script = load("vsop_continuous")
    rng = np.random.default_rng(0)
    env, twin = (script.Replayable(script.make_env(script.Args(env_id=task))) for _ in range(2))
    env.reset(seed=1)
    actions = rng.normal(size=(300, *env.action_space.shape)).clip(-0.4, 0.4).astype(np.float32)
    for action in actions[:137]:
        _, _, terminated, truncated, _ = env.step(action)
        if terminated or truncated:
            env.reset()
    torch.save(env.state_dict(), tmp_path / "env.pt")
    assert twin.load_state_dict(torch.load(tmp_path / "env.pt", weights_only=True))
    for action in actions[137:]:
        one, other = env.step(action), twin.step(action)
        np.testing.assert_array_equal(one[0], other[0])
        assert one[1:4] == other[1:4]


def test_a_tracked_run_resumes_the_same_wandb_run(copied, tmp_path):
    options = ("--resume", copied, "--track", "--total-timesteps", 128 * 14)
    done = run("vsop_continuous", *options, cwd=tmp_path, WANDB_MODE="offline")
    assert done.returncode == 0, done.stderr
    (folder,) = (tmp_path / "wandb").glob("offline-run-*")
    assert folder.name.endswith(f"-{copied.name}")


def test_a_task_with_an_older_random_generator_trains_and_resumes(tmp_path):
    """As dm_control's, whose generator has no state to remember: its episode in progress is restarted."""
    task = own_task(tmp_path, body="np_random = np.random.RandomState(0)")
    assert run("vsop_continuous", *task, *SMALL, "--total-timesteps", 640, cwd=tmp_path).returncode == 0
    done = run("vsop_continuous", "--resume", run_dir(tmp_path), "--total-timesteps", 1280, cwd=tmp_path)
    assert done.returncode == 0 and "not deterministic" in done.stderr, done.stderr
