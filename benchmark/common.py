"""What the programs in benchmark/ and sweeps/ share. The training scripts do not use it.

Import it before any other package: from then on a missing package or an unusable file ends the program with one line.
"""

import argparse
import ctypes
import fcntl
import json
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmark" / "results"
LAST = 100  # a return is the mean over this many episodes, as in the paper
ATTEMPTS = 3  # per run, if it dies of something that resuming may survive
TASKS = {
    # Pusher-v5 replaces the paper's Pusher-v4, which needs a MuJoCo older than 3.
    "mujoco": [
        "Ant-v4", "HalfCheetah-v4", "Hopper-v4", "Humanoid-v4", "HumanoidStandup-v4",
        "InvertedDoublePendulum-v4", "Pusher-v5", "Reacher-v4", "Swimmer-v4", "Walker2d-v4",
    ],
    "procgen": [
        "bigfish", "bossfight", "caveflyer", "chaser", "climber", "coinrun", "dodgeball", "fruitbot",
        "heist", "jumper", "leaper", "maze", "miner", "ninja", "plunder", "starpilot",
    ],
}  # fmt: skip


# ---------------------------------------------------------------------------------------------------- command line


def fail(message):
    print(f"error: {message}", file=sys.stderr)
    sys.exit(2)


def one_line(kind, error, trace):
    """Reports what the user can fix in one line. Anything else is a bug and keeps its traceback."""
    if isinstance(error, ModuleNotFoundError):
        fail(f"{error}; install it with: pip install -r requirements-dev.txt (for JAX, see benchmark/README.md)")
    if isinstance(error, OSError) and error.filename:
        fail(f"{error.filename}: {error.strerror}")
    if isinstance(error, KeyboardInterrupt):
        sys.exit(130)
    sys.__excepthook__(kind, error, trace)


sys.excepthook = one_line


class Parser(argparse.ArgumentParser):
    """Prints the program's docstring as its help, and errors in one line."""

    def __init__(self, doc: str):
        super().__init__(description=doc, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter)

    def error(self, message):
        fail(message)


def positive(text: str) -> int:
    if not 1 <= float(text) == float(text) // 1:  # 1e6 is fine, nan and inf are not
        raise argparse.ArgumentTypeError(f"must be a positive integer, got {text}")
    return int(float(text))


def plain_name(text: str) -> str:
    if Path(text).name != text:
        raise argparse.ArgumentTypeError(f"must be a name without slashes, got {text!r}")
    return text


def catch_signals(action) -> list:
    """Calls `action` on SIGINT and SIGTERM. Returns the signals received so far."""
    received = []

    def handle(number, frame):
        received.append(number)
        action()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, handle)
    return received


def interrupt():
    raise KeyboardInterrupt


def stopped(received: list):
    print("stopped; run the same command again to resume", file=sys.stderr)
    sys.exit(128 + received[0])


# ------------------------------------------------------------------------------------------------------------ runs


def newest(paths) -> Path | None:
    return max(paths, key=lambda path: path.stat().st_mtime, default=None)


def latest_run(folder: Path) -> Path | None:
    """The run with the newest checkpoint in a folder that a script was started in."""
    found = newest([*folder.glob("runs/*/checkpoint.pt"), *folder.glob("runs/*/checkpoint.npz")])
    return found and found.parent


def end_with_parent():
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG: no orphans if the parent is killed


def execute(command: list, folder: Path, stop=None) -> str:
    """Runs a training command to its end, resuming it if it dies. Returns "finished", "stopped" or the failure. An
    interrupt stops it, and so does the event `stop`."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock, open(folder / "log.txt", "a") as log:
        # Waits for another process that trains this run. The script inherits the lock, and keeps it if we are killed.
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (folder / "finished").exists():
            return "finished"
        for _ in range(ATTEMPTS):
            line = [sys.executable, *command]
            if run := latest_run(folder):
                line = [sys.executable, command[0], "--resume", str(run.relative_to(folder))]
            print("$", shlex.join(line), file=log, flush=True)
            process = subprocess.Popen(
                line, cwd=folder, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
                preexec_fn=end_with_parent, pass_fds=[lock.fileno()],
            )  # fmt: skip
            try:
                while (code := process.poll()) is None:
                    time.sleep(0.2)  # not wait(), which Ray cannot interrupt
                    if stop and stop.is_set():
                        raise KeyboardInterrupt
            except KeyboardInterrupt:
                process.terminate()
                process.wait()
                return "stopped"
            if code == 0:
                (folder / "finished").touch()
                return "finished"
            if code in (1, 2):  # a non-finite loss or a bad argument would fail again
                break
    return f"failed with exit code {code}: {last_line(folder / 'log.txt')}"


def last_line(path: Path) -> str:
    """The error message in a log: its last line, or the first line in the box that tyro draws."""
    lines = [line for line in path.read_text(errors="replace").splitlines() if line.strip()] or ["no output"]
    boxes = [i for i, line in enumerate(lines[:-1]) if line.startswith("╭")]
    return lines[boxes[-1] + 1 if boxes else -1].strip("│ ").removeprefix("error: ")


def read_log(folder: Path, part: str = ""):
    """The newest TensorBoard log in a folder that a script was started in, or in this part of its run."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = newest(folder.glob(f"runs/*/{part}/events.*" if part else "runs/*/events.*"))
    path = events.parent if events else folder
    log = EventAccumulator(str(path), size_guidance=dict(scalars=0, histograms=0, tensors=1))
    log.Reload()
    return log


def read_returns(log) -> dict:
    """Steps and returns of the finished episodes by tag. The last tag counts: on ProcGen that of the test levels."""
    tags = [tag for tag in ("charts/episodic_return", "test/episodic_return") if tag in log.Tags()["scalars"]]
    return {tag: ([e.step for e in log.Scalars(tag)], [e.value for e in log.Scalars(tag)]) for tag in tags}


# ---------------------------------------------------------------------------------------------------------- scores


def references(steps: int):
    """What normalized scores are relative to, a row per task: the return of a random policy (0), and PPO's final return
    and area under the curve at this number of steps (1). PPO's are those of the committed runs, of the shortest that
    are long enough. A task has no row without such runs, or while PPO is not better than random."""
    import pandas as pd

    table = pd.concat(pd.read_csv(path) for path in sorted(RESULTS.glob("*/curves.csv.gz")))
    ppo = table[(table["method"] == "PPO") & (table["total"] >= steps)]
    ppo = ppo.drop_duplicates(["task", "seed", "total", "step"])  # experiments share runs
    ppo = ppo[ppo["total"] == ppo.groupby("task")["total"].transform("min")]
    ppo = ppo[ppo["step"] <= ppo.groupby("task")["step"].transform("min").clip(lower=steps)]
    runs = ppo.groupby(["task", "seed"])["value"].agg(["last", "mean"]).groupby("task").mean()
    random = json.loads((RESULTS / "random.json").read_text())["scores"]
    rows = pd.DataFrame(dict(final=runs["last"], area=runs["mean"], length=ppo.groupby("task")["total"].first()))
    rows.insert(0, "random", [random[task]["mean"] if task in random else None for task in rows.index])
    return rows[(rows["final"] > rows["random"]) & (rows["area"] > rows["random"])]


def published(steps: int | None = None) -> dict:
    """The authors' returns by method and task, at the end of training or at this number of steps: of all seeds, or only
    the mean where no more is known."""
    data = json.loads((RESULTS / "published.json").read_text())
    if steps:
        families = [data["mujoco"].get(f"returns_at_{steps}", {})]
    else:
        families = [data[family]["returns"] for family in ("mujoco", "procgen", "gymnax")]
        families.append(dict(RMPG=data["mujoco"]["returns"]["all-actions"]))  # two names of one method
    rows = ((method, *row) for family in families for method, by_task in family.items() for row in by_task.items())
    return {(method, task.replace("Pusher-v4", "Pusher-v5")): values for method, task, values in rows}


# ---------------------------------------------------------------------------------------------------------- tables


def number(x) -> str:
    return f"{x:,.0f}" if abs(x) >= 100 else f"{x:.1f}" if abs(x) >= 10 else f"{x:z.2f}"


def markdown(head, lines) -> str:
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, ["---"] * len(head), *lines))
