import importlib
import os
import runpy
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

os.environ["OMP_NUM_THREADS"] = "1"  # tests run side by side, and threads of theirs would fight over the cores

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
SCRIPTS = ("vsop_continuous", "a3c_continuous", "ppo_continuous", "vsppo_continuous", "rmpg_continuous")
GAME_SCRIPTS = ("vsop_procgen", "ppo_procgen")
BAYESIAN = ("vsop_continuous", "vsppo_continuous", "rmpg_continuous")  # with masks and spectral norm


def load(name):
    return importlib.import_module(name)


def small_agent(script, obs_dim=5, action_dim=3, bound=2.0, **settings):
    """Settings and an agent of a script, for a task that need not exist."""
    torch.manual_seed(0)
    args = script.Args(**(dict(width=8, num_steps=16, num_minibatches=1, total_timesteps=1000) | settings))
    high = np.full(action_dim, bound, dtype=np.float32)
    return args, script.Agent(SimpleNamespace(obs_dim=obs_dim, action_dim=action_dim, low=-high, high=high), args)


def random_minibatch(script, args, rows=16, obs_dim=5, action_dim=3, **columns):
    """Normal numbers for every column that is not given; no dropout."""
    generator = torch.Generator().manual_seed(0)
    shapes = dict(obs=(obs_dim,), actions=(action_dim,), uniform=(7, action_dim), h_plus=(7,))
    numbers = {
        name: torch.randn(rows, *shapes.get(name, ()), generator=generator)
        for name in script.Batch._fields
        if name != "masks"
    }
    if "masks" in script.Batch._fields:
        numbers["masks"] = torch.ones(4, args.width)
    return script.Batch(**(numbers | columns))


def run(name, *options, cwd, **env):
    """A script through its command line."""
    command = [sys.executable, str(ROOT / f"{name}.py"), *map(str, options)]
    return subprocess.run(command, cwd=cwd, env=os.environ | env, capture_output=True, text=True, timeout=1200)


def refused(monkeypatch, capsys, name, *options) -> str:
    """The one line on stderr with which a script ends on these arguments; in this process, which is quicker."""
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *map(str, options)])
    with pytest.raises(SystemExit) as stop:
        runpy.run_path(str(ROOT / f"{name}.py"), run_name="__main__")
    out, error = capsys.readouterr()
    assert stop.value.code == 2 and out == "", out
    assert error.startswith("error: ") and error.count("\n") == 1, error
    return error.removeprefix("error: ")


def cli_args(name):
    """The dataclass of all flags of a script."""
    return load(name).RunArgs


def alive(folder) -> list:
    """Ids of the processes of tests/fake_script.py that were started below a folder."""
    pids = [Path("/proc", path.read_text(), "cmdline") for path in folder.glob("**/pid")]
    return [pid.parent.name for pid in pids if pid.exists() and b"fake_script" in pid.read_bytes()]


def wait_for(condition):
    for _ in range(3000):
        if condition():
            return
        time.sleep(0.1)
    raise AssertionError("waited for five minutes")


def run_dir(folder) -> Path:
    (found,) = (folder / "runs").iterdir()
    return found


def scalars(folder):
    events = EventAccumulator(str(run_dir(folder)), size_guidance=dict(scalars=0))
    events.Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}, events.Tags()


@pytest.fixture(params=SCRIPTS)
def script(request):
    return load(request.param)


@pytest.fixture(params=BAYESIAN)
def bayesian(request):
    return load(request.param)


OWN_TASK = """
import gymnasium as gym, numpy as np
class Task(gym.Env):
    BODY
    action_space = gym.spaces.Box(-1, 1, (2,), ACTIONS)
    observation_space = gym.spaces.Box(-1, 1, (2,), np.float64)
    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self.np_random.normal(size=2), {}
    def step(self, action):
        self.t += 1
        STEP
        return self.np_random.normal(size=2), 1.0, self.t == 50, False, {}
gym.register("Task-v0", Task)
"""


def own_task(folder, step="pass", actions="np.float32", body="pass"):
    """The flag for a task of two random numbers that is written to `folder`. `step` runs in its every step."""
    (folder / "own.py").write_text(OWN_TASK.replace("STEP", step).replace("ACTIONS", actions).replace("BODY", body))
    return "--env-id", "own:Task-v0"
