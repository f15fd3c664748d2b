"""Stands in for a training script in the tests of benchmark/ and sweeps/. A step is an episode and takes 10 ms. The
return is 1000 times the learning rate plus a thousandth of the seed. It fails if the file $FAKE_BROKEN exists, and does
not wait if $FAKE_FAST exists. With --num-seeds it is like a JAX script: a log for each seed, steps of all seeds."""

import argparse
import json
import os
import signal
import sys
import time
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("--env-id")
parser.add_argument("--seed", type=int)
parser.add_argument("--total-timesteps", type=int)
parser.add_argument("--learning-rate", type=float, default=0.0005)
parser.add_argument("--num-seeds", type=int)
parser.add_argument("--cuda", action=argparse.BooleanOptionalAction)
parser.add_argument("--resume")
args = vars(parser.parse_args()) | dict(step=0)
if args["num_seeds"] and args["cuda"] is not None:
    parser.error("--cuda is for torch")
broken, fast = (os.path.exists(os.environ.get(name, "")) for name in ("FAKE_BROKEN", "FAKE_FAST"))
if broken:
    print("error: it is broken", file=sys.stderr)
    sys.exit(2)
folder = Path(args["resume"] or f"runs/{time.time_ns()}")
if args["resume"]:
    (checkpoint,) = folder.glob("checkpoint.*")
    args = json.loads(checkpoint.read_text())
folder.mkdir(parents=True, exist_ok=True)
(folder / "pid").write_text(str(os.getpid()))


def stop(number, frame):
    print(f"stopped at step {args['step']}")
    sys.exit(128 + number)


signal.signal(signal.SIGTERM, stop)
seeds = args["num_seeds"] or 1
for step in range(args["step"] + 1, args["total_timesteps"] + 1):
    time.sleep(0.0 if fast else 0.01)
    args["step"] = step
    (folder / "part").write_text(json.dumps(args))
    (folder / "part").replace(folder / ("checkpoint.npz" if args["num_seeds"] else "checkpoint.pt"))
    print(f"step {step * seeds}/{args['total_timesteps'] * seeds}", flush=True)

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

for seed in range(args["seed"], args["seed"] + seeds):
    writer = EventFileWriter(str(folder / f"seed_{seed}" if args["num_seeds"] else folder))
    for step in range(1, args["total_timesteps"] + 1):
        values = {"charts/episodic_return": args["learning_rate"] * 1000 + seed / 1000, "charts/SPS": 100.0}
        summary = Summary(value=[Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()])
        writer.add_event(Event(step=step, summary=summary))
    writer.close()
