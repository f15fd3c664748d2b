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
"""Watch, evaluate or film a policy saved by one of the training scripts.

    python enjoy.py runs/<run>                       # ten episodes with the mean weights, without noise
    python enjoy.py runs/<run> --thompson            # act as in training
    python enjoy.py runs/<run>/policy.pt --video out.mp4 --episodes 1
    python enjoy.py runs/<run>/seed_1                # a seed of a JAX script, where Gymnax is installed

Loading an untrusted policy file cannot execute code: it holds only tensors and simple values. Making its task can: an
id like `module:Task-v0` imports that module, also from the current folder. Such an id needs --trust-module.
"""

import ctypes
import json
import os
import sys
import traceback
import warnings
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from importlib import metadata, util
from itertools import count
from pathlib import Path
from types import SimpleNamespace

try:
    import numpy as np
    import tyro

    if util.find_spec("torch"):  # policies of the JAX scripts do not need it
        import torch
        import torch.nn.functional as F
except ImportError as error:
    sys.exit(f"error: {error}: pip install -r requirements.txt")


def fail(message: str, code: int = 2):
    print(f"error: {message}", file=sys.stderr)
    sys.exit(code)


@contextmanager
def one_line(what: str, show_traceback: bool = False):
    """Turns whatever a task, a file or the system raises into one line. A task's sys.exit(0) is an error too."""
    try:
        yield
    except (Exception, SystemExit) as error:
        if isinstance(error, SystemExit) and error.code:
            raise
        if show_traceback:
            traceback.print_exc()
        fail(f"{what}: {type(error).__name__}: {str(error).partition(chr(10))[0]}", code=1 if show_traceback else 2)


def say(line: str):
    """Prints a line. When the reader of a pipe has gone (`| head -1`), the program continues without output."""
    try:
        print(line, flush=True)
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):
            fail(f"cannot print: {error.strerror}")


@dataclass
class Args:
    path: tyro.conf.Positional[Path]  # folder of a run (of a JAX script: of a seed), or a policy file
    episodes: int = 10  # episodes to play
    thompson: bool = False  # act as in training: sample weights and actions (ProcGen actions are always sampled)
    seed: int = 1  # seed of the task and of all sampling
    video: Path | None = None  # film the episodes to this .mp4 file
    render: bool = False  # open a window and watch
    trust_module: bool = False  # allow a task id like module:Task-v0, which imports that Python module

    def __post_init__(self):
        for name, least in dict(episodes=1, seed=0).items():
            if getattr(self, name) < least:
                fail(f"--{name} must be at least {least}, got {getattr(self, name)}")
        if self.video and self.video.suffix.lower() != ".mp4":
            fail(f"--video must end in .mp4, got {self.video}")
        if self.render and self.video:
            fail("--render and --video exclude each other")
        if self.render and sys.platform == "linux" and not any(map(os.environ.get, ("DISPLAY", "WAYLAND_DISPLAY"))):
            fail("--render needs a display; --video films without one")


def load_policy(path: Path):
    if path.is_dir():
        path = path / ("policy.npz" if (path / "policy.npz").is_file() else "policy.pt")
    if not path.is_file():
        seeds = sorted(path.parent.glob("seed_*/policy.npz"))
        fail(f"there is no policy file {path}" + (f", but there is {seeds[0]}" if seeds else ""))
    npz = path.suffix == ".npz"
    if not npz and not util.find_spec("torch"):
        fail(f"{path} needs PyTorch: pip install -r requirements.txt")
    try:
        policy = dict(np.load(path, allow_pickle=False)) if npz else torch.load(path, "cpu", weights_only=True)
    except Exception as error:  # torch's message recommends weights_only=False
        fail(f"{path} is not a policy file, or is corrupt ({type(error).__name__})")
    with one_line(f"{path} is not a valid policy"):
        return (GymnaxPolicy if "meta" in policy else GamePolicy if "weights" in policy else Policy)(policy)


def check(valid: bool, meaning: str):
    if not valid:
        raise ValueError(meaning)


class Policy:
    """The actor of a policy file, in numpy. Other kinds of policies have the same `act` and `make_env`."""

    def __init__(self, policy: dict):
        self.script, self.env_id, args = policy["script"], str(policy["env_id"]), policy["args"]
        self.env_kwargs = dict(args.get("env_kwargs") or {})
        self.activation = dict(relu=lambda x: np.maximum(x, 0.0), tanh=np.tanh)[policy["activation"]]
        self.layers = [(np.asarray(weight).T.copy(), np.asarray(bias)) for weight, bias in policy["layers"]]
        arrays = (np.asarray(policy[key]) for key in ("log_std", "obs_mean", "obs_std", "action_low", "action_high"))
        log_std, self.mean, self.std, self.low, self.high = arrays
        self.noise_scale = np.exp(log_std)
        self.norm_obs, self.thompson = args["norm_obs"], args.get("thompson", False)
        self.dropout_rate = args.get("dropout_rate", 0.0)
        numbers = (*sum(self.layers, ()), log_std, self.mean, self.std)
        check(all(np.isfinite(x).all() for x in numbers) and (self.std > 0).all(), "some numbers are not finite")
        outputs = self.forward(self.mean, np.random.default_rng(0), True)
        shapes = {x.shape for x in (outputs, self.layers[-1][1], self.noise_scale, self.low, self.high)}
        check(len(shapes) == 1 and self.mean.shape == self.std.shape, "the shapes do not fit")

    def forward(self, obs, rng, thompson):
        """The outputs of the network with the posterior mean of the weights, or with a sample."""
        x = np.clip((obs - self.mean) / self.std, -10.0, 10.0) if self.norm_obs else obs
        x = x.astype(np.float32)
        *hidden, (weight_out, bias_out) = self.layers
        for weight, bias in hidden:
            x = self.activation(x @ weight + bias)
            if thompson and self.thompson:
                x = x * (rng.random(x.shape) >= self.dropout_rate) / (1 - self.dropout_rate)
        return x @ weight_out + bias_out

    def act(self, obs, rng, thompson):
        """The mean action of the posterior mean, or a sample of both."""
        action = self.forward(obs, rng, thompson)
        if thompson:
            action = action + self.noise_scale * rng.standard_normal(action.shape)
        return np.clip(action, self.low, self.high).astype(np.float32)

    def make_env(self, args: Args):
        if args.video and sys.platform == "linux" and not os.environ.get("DISPLAY"):
            os.environ.setdefault("MUJOCO_GL", "egl")  # read when MuJoCo is imported
        import gymnasium as gym
        import mujoco

        warnings.filterwarnings("ignore", message=".*is out of date.*", category=DeprecationWarning)  # the -v4 tasks
        mujoco.set_mju_user_warning(lambda message: "settotalmass" in str(message) or print(message, file=sys.stderr))
        if any(":" in str(value) for value in (self.env_id, *self.env_kwargs.values())):
            if not args.trust_module:
                fail(f"{self.env_id} may import a Python module: --trust-module allows it")
            sys.path.append(os.getcwd())
        if self.env_id.startswith("dm_control/"):
            import shimmy

            gym.register_envs(shimmy)
        mode = "rgb_array" if args.video else "human" if args.render else None
        render = dict(render_mode=mode) if mode else {}  # not every task has this argument
        env = gym.make(self.env_id, disable_env_checker=True, **self.env_kwargs | render)
        if renderer := getattr(env.unwrapped, "mujoco_renderer", None):
            # The camera that follows the robot, if the model has one. Gymnasium's default lets it walk out of view.
            renderer.camera_id = mujoco.mj_name2id(renderer.model, mujoco.mjtObj.mjOBJ_CAMERA, "track")
        if not isinstance(env.observation_space, gym.spaces.Box) or len(env.observation_space.shape) != 1:
            env = gym.wrappers.FlattenObservation(env)
        sizes = env.observation_space.shape[0], gym.spaces.flatdim(env.action_space)
        expected = len(self.mean), len(self.low)
        check(sizes == expected, f"(observations, actions) are {sizes}, the policy has {expected}")
        return env


class GamePolicy:
    """The actor of a policy file of ProcGen. Actions are always sampled, as in the test while training."""

    def __init__(self, policy: dict):
        self.script, self.env_id, args = policy["script"], str(policy["env_id"]), policy["args"]
        self.weights = policy["weights"]
        self.thompson, self.dropout_rate = args.get("thompson", False), args.get("dropout_rate", 0.0)
        self.mode = args["distribution_mode"]
        check(all(x.isfinite().all() for x in self.weights.values()), "some numbers are not finite")
        check(len(self.weights["actor.bias"]) == 15, "ProcGen has 15 actions")
        self.act(np.zeros((64, 64, 3), dtype=np.uint8), np.random.default_rng(0), True)  # do the shapes fit?

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
        return Game(self.env_id, self.mode, args.seed)


def make_envs(args, num_levels: int, seed: int):
    """Parallel copies of a game on its first `num_levels` levels, or on all levels if that is 0."""
    name = f"{args.env_id.capitalize()}{args.distribution_mode.capitalize()}-v0"
    options = dict(num_envs=args.num_envs, num_threads=torch.get_num_threads(), seed=seed, channel_first=False)
    return load_envpool().make(name, env_type="gymnasium", num_levels=num_levels, start_level=0, **options)


def load_envpool():
    """EnvPool. Its games need libraries of Qt 5, which the package PyQt5-Qt5 brings along, in this order."""
    try:
        files = {file.name: str(file.locate()) for file in metadata.files("PyQt5-Qt5") or ()}
        for name in ("libicudata", "libicuuc", "libicui18n", "libQt5Core", "libQt5Gui"):
            (path,) = [files[file] for file in files if file.startswith(f"{name}.so")]
            ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
        import envpool
    except (metadata.PackageNotFoundError, ImportError, OSError, ValueError) as error:
        reason = str(error).partition(chr(10))[0]
        fail(f"ProcGen cannot be loaded ({reason}): pip install -r requirements-procgen.txt")
    return envpool


class Game:
    """One environment of EnvPool with the interface of Gymnasium, on any level of the game."""

    metadata = dict(render_fps=15)

    def __init__(self, env_id: str, distribution_mode: str, seed: int):
        one = SimpleNamespace(env_id=env_id, distribution_mode=distribution_mode, num_envs=1)
        self.pool = make_envs(one, num_levels=0, seed=seed)
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


class GymnaxPolicy(Policy):
    """The actor of a policy file of the JAX scripts. Without log_std its actions are discrete."""

    def __init__(self, policy: dict):
        meta, self.discrete = json.loads(str(policy["meta"])), "log_std" not in policy
        args = meta["args"] = meta["args"] | dict(thompson=True)
        layers = [(policy[f"layers/{i}/0"].T, policy[f"layers/{i}/1"]) for i in range(3)]
        inputs, outputs = np.zeros(layers[0][0].shape[1]), np.zeros(layers[2][0].shape[0])
        scaling = {} if args["norm_obs"] else dict(obs_mean=inputs, obs_std=inputs + 1)
        bounds = dict(action_low=outputs - np.inf, action_high=outputs + np.inf)  # as in training, not clipped here
        super().__init__(args | meta | dict(log_std=outputs) | policy | scaling | bounds | dict(layers=layers))

    def act(self, obs, rng, thompson):
        """The mean or the most probable action of the posterior mean, or a sample of both."""
        if not self.discrete:
            return super().act(obs, rng, thompson)
        logits = self.forward(obs, rng, thompson)
        return np.argmax(logits + rng.gumbel(size=logits.shape) if thompson else logits)

    def make_env(self, args: Args):
        if not util.find_spec("gymnax"):
            fail(f"{self.env_id} needs Gymnax: pip install -r requirements-gymnax.txt, in an environment of its own")
        env = GymnaxTask(self.env_id, args)
        sizes = len(env.reset()[0]), getattr(env.action_space, "n", env.action_space.shape)
        expected = len(self.mean), len(self.low) if self.discrete else self.low.shape
        check(sizes == expected, f"(observations, actions) are {sizes}, the policy has {expected}")
        return env


class GymnaxTask:
    """A task of Gymnax or Brax with the interface of Gymnasium. Gymnax draws most of its own."""

    def __init__(self, env_id: str, args: Args):
        from vsop_gymnax import jax, make_env  # sets what JAX reads when it is imported

        check(not (args.video and env_id.startswith("brax/")), "a task of Brax cannot be drawn")
        self.env, self.states, self.drawing = make_env(env_id), [], None
        self.action_space, self.jit_step = self.env.action_space(), jax.jit(self.env.step)
        self.keys = (jax.random.fold_in(jax.random.PRNGKey(args.seed), i) for i in count())
        if args.video:
            os.environ.update(MPLBACKEND="agg", SDL_VIDEODRIVER="dummy", SDL_AUDIODRIVER="dummy")  # without a display
            from gymnax.visualize import Visualizer

            self.drawing = Visualizer(self.env, self.env.default_params, self.states)
            self.metadata = dict(render_fps=1000 // self.drawing.interval)

    def reset(self, seed=None):
        obs, state = self.env.reset(next(self.keys))
        self.states[:] = [state]
        if self.drawing:
            self.drawing.ax.clear()
            self.drawing.init()
            check(hasattr(self.drawing, "im"), "Gymnax cannot draw it")
        return np.ravel(obs), {}

    def step(self, action):
        obs, state, *rest = self.jit_step(next(self.keys), self.states[-1], action)
        self.states.append(state)
        return np.ravel(obs), *rest

    def render(self):
        self.drawing.update(len(self.states) - 1)
        self.drawing.fig.canvas.draw()
        return np.asarray(self.drawing.fig.canvas.buffer_rgba())[..., :3]

    def close(self):
        pass


class Video(AbstractContextManager):
    """An mp4 file, written frame by frame: a few episodes would not fit into memory. An incomplete one is removed."""

    def __init__(self, path: Path, env):
        from moviepy.video.io.ffmpeg_writer import FFMPEG_VideoWriter

        self.path, self.env = path, env
        height, width, _ = env.render().shape
        fps = env.metadata.get("render_fps", 30)
        path.open("ab").close()  # raises if the file cannot be written: ffmpeg reports that late, as a broken pipe
        self.ffmpeg = FFMPEG_VideoWriter(str(path), (width, height), fps).proc

    def add_frame(self):
        self.ffmpeg.stdin.write(self.env.render().tobytes())

    def __exit__(self, raised, *_):
        errors = self.ffmpeg.communicate()[1].decode()
        if (raised or self.ffmpeg.returncode) and self.path.is_file():
            self.path.unlink()
        if self.ffmpeg.returncode and raised in (None, BrokenPipeError):
            fail(f"--video {self.path}: ffmpeg failed: {errors.partition(chr(10))[0] or self.ffmpeg.returncode}")


def enjoy(args: Args) -> list:
    policy = load_policy(args.path)
    if args.render and type(policy) is not Policy:
        fail(f"{policy.env_id} has no window to open; --video films it")
    with one_line(f"cannot start {policy.env_id}"):
        env = policy.make_env(args)
        obs, _ = env.reset(seed=args.seed)
    with one_line(f"--video {args.video}"):
        film = Video(args.video, env) if args.video else nullcontext()
    rng = np.random.default_rng(args.seed)
    returns = []
    with one_line(f"{policy.env_id} failed", show_traceback=True), film as video:
        for episode in range(1, args.episodes + 1):
            if episode > 1:
                obs, _ = env.reset()
            total, length, ended = 0.0, 0, False
            while not ended:
                if video:
                    video.add_frame()
                action = policy.act(obs, rng, args.thompson).reshape(env.action_space.shape)
                if np.isnan(action).any():
                    fail(f"the action is not a number in step {length + 1} of episode {episode}")
                obs, reward, terminated, truncated, _ = env.step(action)
                total, length, ended = total + float(reward), length + 1, terminated or truncated
            returns.append(total)
            say(f"episode {episode}: return {total:.2f}, {length} steps")
        env.close()
    if args.video:
        say(f"filmed to {args.video}")
    kind = "as in training" if args.thompson else "mean weights"
    score = f"mean {np.mean(returns):.2f}, standard deviation {np.std(returns):.2f}"
    say(f"{policy.env_id}, {policy.script}, {kind}: {score}")
    return returns


if __name__ == "__main__":
    sys.stdout = sys.stdout or open(os.devnull, "w")  # None after `>&-`
    try:
        enjoy(tyro.cli(Args, description=__doc__.partition("\n\n")[0]))
    except KeyboardInterrupt:
        sys.exit(130)
