# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "gymnasium[mujoco]==1.4.0",
#     "moviepy==2.2.1",
#     "mujoco==4.0.0",
#     "numpy==2.4.6",
#     "tensorboard==2.21.0",
#     "torch==2.13.0",
#     "tqdm==4.70.1",
#     "tyro==1.0.16",
#     "wandb==0.31.0",
# ]
# ///
"""Watch, evaluate or film a policy that one of the training scripts has saved.

    python enjoy.py runs/<run>                       # ten episodes of the posterior mean, without noise
    python enjoy.py runs/<run> --thompson            # as it acted in training
    python enjoy.py runs/<run>/policy.pt --video out.mp4 --episodes 1

A policy file is data: it is loaded so that one from a stranger cannot run code.
"""

import ctypes
import difflib
import os
import sys
import warnings
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
import torch.nn.functional as F
import tyro


def fail(message: str):
    print(f"error: {message}", file=sys.stderr)
    sys.exit(2)


@dataclass
class Args:
    path: tyro.conf.Positional[Path]
    """folder of a run, or a policy file"""
    episodes: int = 10
    """episodes to play"""
    thompson: bool = False
    """act as in training: a new draw of the weights at every step, and noise on the actions (a game's are always drawn
    from their probabilities, as in its test)"""
    seed: int = 1
    """seed of the task and of all sampling"""
    video: Path | None = None
    """film the episodes into this file"""
    render: bool = False
    """open a window and watch"""

    def __post_init__(self):
        if self.episodes < 1:
            fail(f"--episodes must be at least 1, got {self.episodes}")
        if self.seed < 0:
            fail(f"--seed must be at least 0, got {self.seed}")
        if self.render and self.video:
            fail("--render and --video exclude each other")
        if (
            self.render
            and sys.platform == "linux"
            and not (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))
        ):
            fail("--render needs a display; --video films without one")
        if self.video and not self.video.parent.is_dir():
            fail(f"there is no folder {self.video.parent} for the video")


def load_policy(path: Path):
    if path.is_dir():
        path = path / "policy.pt"
    if not path.is_file():
        fail(f"there is no policy file {path}")
    try:
        policy = torch.load(path, weights_only=True, map_location="cpu")
        return (GamePolicy if "weights" in policy else Policy)(policy)
    except Exception as error:  # a file that is none of ours may raise anything
        fail(f"{path} is no policy file of this project, or is damaged ({type(error).__name__})")


class Policy:
    """The actor of a policy file, in numpy."""

    def __init__(self, policy: dict):
        self.script, self.env_id, args = policy["script"], policy["env_id"], policy["args"]
        self.activation = dict(relu=lambda x: np.maximum(x, 0.0), tanh=np.tanh)[policy["activation"]]
        self.layers = [(weight.T.numpy().copy(), bias.numpy()) for weight, bias in policy["layers"]]
        arrays = (policy[key].numpy() for key in ("log_std", "obs_mean", "obs_std", "action_low", "action_high"))
        log_std, self.mean, self.std, self.low, self.high = arrays
        self.noise_scale = np.exp(log_std)
        self.norm_obs, self.thompson = args["norm_obs"], args.get("thompson", False)
        self.dropout_rate = args.get("dropout_rate", 0.0)

    def act(self, obs, rng, thompson):
        """The mean action of the posterior mean, or a draw of both."""
        x = np.clip((obs - self.mean) / self.std, -10.0, 10.0) if self.norm_obs else obs
        x = x.astype(np.float32)
        *hidden, (weight_out, bias_out) = self.layers
        for weight, bias in hidden:
            x = self.activation(x @ weight + bias)
            if thompson and self.thompson:
                x = x * (rng.random(x.shape) >= self.dropout_rate) / (1 - self.dropout_rate)
        action = x @ weight_out + bias_out
        if thompson:
            action = action + self.noise_scale * rng.standard_normal(action.shape)
        return np.clip(action, self.low, self.high).astype(np.float32)

    def make_env(self, args: Args):
        if args.video and sys.platform == "linux" and not os.environ.get("DISPLAY"):
            os.environ.setdefault("MUJOCO_GL", "egl")  # read when MuJoCo is imported
        env = make_env(self.env_id, "rgb_array" if args.video else "human" if args.render else None)
        if env.observation_space.shape != self.mean.shape:
            fail(f"{self.env_id} has {env.observation_space.shape[0]} observations here, the policy {len(self.mean)}")
        return env


class GamePolicy:
    """The actor of a policy file of ProcGen. Its actions are drawn from their probabilities, as in the test."""

    def __init__(self, policy: dict):
        self.script, self.env_id, args = policy["script"], policy["env_id"], policy["args"]
        self.weights = policy["weights"]
        self.thompson, self.dropout_rate = args.get("thompson", False), args.get("dropout_rate", 0.0)
        self.mode = args["distribution_mode"]
        self.act(np.zeros((64, 64, 3), dtype=np.uint8), np.random.default_rng(0), False)  # are all weights there?

    def convolve(self, x, name):
        return F.conv2d(x, self.weights[f"{name}.weight"], self.weights[f"{name}.bias"], padding=1)

    def drop(self, x, rng, thompson):
        if thompson and self.thompson:
            x = x * torch.as_tensor(rng.random(x.shape) >= self.dropout_rate) / (1 - self.dropout_rate)
        return x

    def act(self, frame, rng, thompson):
        x = torch.as_tensor(frame).permute(2, 0, 1).unsqueeze(0).float() / 255.0
        for i in (0, 4, 8):  # a convolution, a pool and two residual blocks each
            x = F.max_pool2d(self.convolve(x, f"convs.{i}"), 3, stride=2, padding=1)
            for block in (f"convs.{i + 2}.convs", f"convs.{i + 3}.convs"):
                x = x + self.convolve(torch.relu(self.convolve(torch.relu(x), f"{block}.0")), f"{block}.1")
        x = self.drop(torch.relu(x).flatten(1), rng, thompson)
        x = torch.relu(F.linear(x, self.weights["hidden.weight"], self.weights["hidden.bias"]))
        x = self.drop(x, rng, thompson)
        probabilities = F.linear(x, self.weights["actor.weight"], self.weights["actor.bias"]).softmax(-1)
        return np.searchsorted(probabilities[0].cumsum(0)[:-1].numpy(), rng.random())

    def make_env(self, args: Args):
        if args.render:
            fail("a game of ProcGen has no window to open; --video films it")
        return Game(self.env_id, self.mode, args.seed)


def make_envs(args, num_levels, seed):
    """EnvPool's ProcGen. It needs libraries of Qt 5, which the package PyQt5-Qt5 brings along, in this order."""
    try:
        files = {file.name: str(file.locate()) for file in metadata.files("PyQt5-Qt5") or ()}
        for name in ("libicudata", "libicuuc", "libicui18n", "libQt5Core", "libQt5Gui"):
            (path,) = [files[file] for file in files if file.startswith(f"{name}.so")]
            ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
        import envpool
    except (metadata.PackageNotFoundError, ImportError, OSError, ValueError) as error:
        reason = str(error).partition(chr(10))[0]
        fail(f"ProcGen cannot be loaded ({reason}): pip install -r requirements-procgen.txt")
    name = f"{args.env_id.capitalize()}{args.distribution_mode.capitalize()}-v0"
    options = dict(num_envs=args.num_envs, num_threads=torch.get_num_threads(), seed=seed, channel_first=False)
    return envpool.make(name, env_type="gymnasium", num_levels=num_levels, start_level=0, **options)


class Game:
    """One environment of EnvPool with the interface of Gymnasium: any level of the game, seen or not."""

    metadata = dict(render_fps=15)

    def __init__(self, env_id: str, distribution_mode: str, seed: int):
        one = SimpleNamespace(env_id=env_id, distribution_mode=distribution_mode, num_envs=1)
        try:
            self.pool = make_envs(one, num_levels=0, seed=seed)
        except Exception as error:  # of a name that EnvPool does not know
            fail(f"cannot make {env_id}: {type(error).__name__}: {str(error).partition(chr(10))[0]}")
        self.action_space = self.pool.action_space

    def reset(self, seed=None):
        (self.frame,), info = self.pool.reset()
        return self.frame, info

    def step(self, action):
        (self.frame,), (reward,), (terminated,), (truncated,), info = self.pool.step(np.array([action]))
        return self.frame, reward, terminated, truncated, info

    def render(self):
        return self.frame.repeat(8, axis=0).repeat(8, axis=1)

    def close(self):
        self.pool.close()


def make_env(env_id: str, render_mode: str | None):
    import gymnasium as gym
    import mujoco

    warnings.filterwarnings("ignore", message=".*is out of date.*", category=DeprecationWarning)  # the -v4 tasks
    mujoco.set_mju_user_warning(lambda message: "settotalmass" in str(message) or print(message, file=sys.stderr))
    if env_id.startswith("dm_control/"):
        try:
            import shimmy

            gym.register_envs(shimmy)
        except ImportError:
            fail(f"{env_id} needs dm_control: pip install 'shimmy[dm-control]'")
    try:
        env = gym.make(env_id, disable_env_checker=True, render_mode=render_mode)
    except gym.error.UnregisteredEnv:
        near = difflib.get_close_matches(env_id, gym.registry, n=3, cutoff=0.4)
        fail(f"unknown task {env_id!r}" + (f"; the nearest names are {', '.join(near)}" if near else ""))
    except Exception as error:  # whatever a task of a third party may raise
        fail(f"cannot make {env_id}: {type(error).__name__}: {str(error).partition(chr(10))[0]}")
    if not isinstance(env.observation_space, gym.spaces.Box) or len(env.observation_space.shape) != 1:
        env = gym.wrappers.FlattenObservation(env)
    return env


class Video:
    """An mp4 file, written frame by frame: a few episodes would not fit into memory."""

    def __init__(self, path: Path, env):
        self.path, self.env, self.writer = path, env, None

    def add_frame(self):
        from moviepy.video.io.ffmpeg_writer import FFMPEG_VideoWriter

        frame = self.env.render()
        if self.writer is None:
            fps = self.env.metadata.get("render_fps", 30)
            try:
                self.writer = FFMPEG_VideoWriter(str(self.path), (frame.shape[1], frame.shape[0]), fps, codec="libx264")
            except OSError as error:
                fail(f"cannot write {self.path}: {error}")
        self.writer.write_frame(frame)

    def close(self):
        self.writer.close()


def enjoy(args: Args) -> list:
    policy = load_policy(args.path)
    env = policy.make_env(args)
    video = Video(args.video, env) if args.video else None
    rng = np.random.default_rng(args.seed)
    returns = []
    for episode in range(args.episodes):
        obs, _ = env.reset(seed=args.seed if episode == 0 else None)
        total, length, ended = 0.0, 0, False
        while not ended:
            if video:
                video.add_frame()
            action = policy.act(obs, rng, args.thompson).reshape(env.action_space.shape)
            obs, reward, terminated, truncated, _ = env.step(action)
            total, length, ended = total + float(reward), length + 1, terminated or truncated
        returns.append(total)
        print(f"episode {episode + 1}: return {total:.2f}, {length} steps", flush=True)
    env.close()
    if video:
        video.close()
        print(f"filmed into {args.video}")
    kind = "as in training" if args.thompson else "posterior mean"
    score = f"mean {np.mean(returns):.2f}, standard deviation {np.std(returns):.2f}"
    print(f"{policy.env_id}, {policy.script}, {kind}: {score}")
    return returns


if __name__ == "__main__":
    enjoy(tyro.cli(Args))
