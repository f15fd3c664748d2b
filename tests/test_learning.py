"""Learning: the one test that no wrong algorithm passes by accident."""

import re
import subprocess
import sys

import numpy as np
import pytest
from conftest import GAME_SCRIPTS, ROOT, SCRIPTS, run, run_dir, scalars

RETURN = re.compile(r"mean return of the last \d+ (?:training )?episodes (-?[\d.]+)")


def final_return(name, folder, *options):
    done = run(name, *options, cwd=folder)
    assert done.returncode == 0, done.stderr
    return float(RETURN.search(done.stdout)[1])


def test_vsop_learns_and_its_policy_travels(tmp_path):
    """An untrained policy balances the pole for 8 steps. On two kinds of CPU, with and without compilation, eleven runs
    of seeds 1 to 4 had 174 to 320, their last ten episodes 217 to 1000 of 1000 steps, like the saved policy."""
    options = ("--env-id", "InvertedPendulum-v4", "--total-timesteps", 40_960)
    assert final_return("vsop_continuous", tmp_path, *options) > 100
    last = np.mean([value for _, value in scalars(tmp_path)[0]["charts/episodic_return"][-10:]])
    assert last > 100
    policy = (run_dir(tmp_path) / "policy.pt").rename(tmp_path / "elsewhere.pt")  # the file alone is enough
    for way in ("--thompson", "--no-thompson"):
        command = [sys.executable, ROOT / "enjoy.py", policy, "--episodes", "10", way]
        done = subprocess.run(command, capture_output=True, text=True)
        found = float(re.search(r"mean ([\d.]+), standard", done.stdout)[1])
        assert found > 0.7 * last, way


# After 100,000 steps one seed of each had the return in the comment. RMPG learns slowly, 12 to 106 over three seeds,
# and has a larger learning rate here, with which four seeds had 69 to 639.
ENOUGH = {
    "vsop_continuous": (200,),  # 823
    "a3c_continuous": (200,),  # 969
    "ppo_continuous": (200,),  # 818
    "vsppo_continuous": (200,),  # 825
    "rmpg_continuous": (40, "--learning-rate", 1e-3),  # 398
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_every_script_learns(name, tmp_path):
    enough, *options = ENOUGH[name]
    options += ("--env-id", "InvertedPendulum-v4", "--total-timesteps", 100_000)
    assert final_return(name, tmp_path, *options) > enough


@pytest.mark.slow
@pytest.mark.parametrize("name", GAME_SCRIPTS)
def test_every_script_learns_a_level(name, tmp_path):
    """The first level of jumper takes ten steps, and random actions get 6.7 of its 10. After these steps VSOP had 9.9,
    PPO 9.1."""
    options = "--env-id jumper --num-levels 1 --num-envs 16 --num-steps 64 --num-minibatches 4 --total-timesteps 8192"
    assert final_return(name, tmp_path, *options.split()) > 8.3
