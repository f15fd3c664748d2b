"""What the scripts share is identical to the byte, and what is written about them is true."""

import ast
import itertools
import re
import subprocess
import sys
import tomllib

import pytest
from conftest import GAME_SCRIPTS, ROOT, SCRIPTS

ALL = (*SCRIPTS, *GAME_SCRIPTS)
VSOP, A3C, PPO, VSPPO, RMPG, GAME_VSOP, GAME_PPO = ALL
MASKS = "dropout, spectral norm and Thompson sampling are VSOP's, VSPPO's and RMPG's"
FRAMES = "frames of a game, levels to test on, and one network for actor and critic"
OWN = [{script} for script in ALL]
BAYESIAN, PLAIN, GAMES = {VSOP, VSPPO, RMPG}, {A3C, PPO}, {GAME_VSOP, GAME_PPO}
# Which scripts may have a version of their own of what has the same name in others, and why.
BY_MASKS, BY_TASK = [BAYESIAN, PLAIN, {GAME_VSOP}, {GAME_PPO}], [set(SCRIPTS), GAMES]
BY_CRITIC = [{VSOP, VSPPO}, PLAIN, {RMPG}, {GAME_VSOP}, {GAME_PPO}]
DIFFERENT = {
    "Args": (OWN, "flags and defaults are the algorithm's"),
    "check": (BY_MASKS, MASKS + "; " + FRAMES),
    "loss_function": (OWN, "the objective is the algorithm"),
    "MLP": ([BAYESIAN, PLAIN], MASKS),
    "numpy_forward": ([BAYESIAN, PLAIN], MASKS),
    "infer": ([{GAME_VSOP}, {GAME_PPO}], MASKS),
    "collect_rollout": (BY_MASKS, MASKS + "; " + FRAMES),
    "minibatches": (BY_MASKS, MASKS + "; " + FRAMES),
    "gradients": (BY_MASKS, MASKS + "; " + FRAMES),
    "log": (BY_MASKS, MASKS + "; " + FRAMES),
    "Agent": (BY_CRITIC, MASKS + "; RMPG's critic is q(s, a)"),
    "compute_advantages": (BY_CRITIC, MASKS + "; RMPG has the values of all actions"),
    "make_optimizer": ([BAYESIAN, {A3C}, {PPO, GAME_PPO}, {GAME_VSOP}], "AdamW, RMSProp and Adam, as in the paper"),
    "learn": ([{VSOP}, set(SCRIPTS) - {VSOP}, GAMES], "VSOP has --target-kl; " + FRAMES),
    "parse_args": ([{VSOP}, set(ALL) - {VSOP}], "VSOP has presets"),
    "save": ([set(SCRIPTS), {GAME_VSOP}, {GAME_PPO}], FRAMES),
    **{
        name: (BY_TASK, FRAMES)
        for name in (
            "Envs", "RunFlags", "restore", "Progress", "train", "run",
        )
    },
}  # fmt: skip


def blocks(name):
    """Source of every top-level function and class, in order."""
    source = (ROOT / f"{name}.py").read_text()
    nodes = [node for node in ast.parse(source).body if isinstance(node, (ast.FunctionDef, ast.ClassDef))]
    lines = source.splitlines()
    return {
        node.name: "\n".join(lines[min([node.lineno, *(d.lineno for d in node.decorator_list)]) - 1 : node.end_lineno])
        for node in nodes
    }


@pytest.mark.parametrize("one, other", list(itertools.combinations(ALL, 2)))
def test_shared_blocks_are_identical_and_in_the_same_order(one, other):
    ours, theirs = blocks(one), blocks(other)
    shared = [name for name in ours if name in theirs]
    assert shared == [name for name in theirs if name in ours]
    assert len(shared) > 15
    for name in shared:
        groups, _ = DIFFERENT.get(name, ([set(ALL)], ""))
        if any({one, other} <= group for group in groups):
            assert ours[name] == theirs[name], f"{name} differs between {one} and {other}"


def test_exceptions_are_real():
    everything = {name: blocks(name) for name in ALL}
    for name, (groups, _) in DIFFERENT.items():
        sources = [{everything[script][name] for script in group} for group in groups]
        assert all(len(versions) == 1 for versions in sources)
        assert len(set.union(*sources)) == len(groups), f"{name} is not different where it is listed to be"


@pytest.mark.parametrize("name", ALL)
def test_no_script_imports_another(name):
    for node in ast.walk(ast.parse((ROOT / f"{name}.py").read_text())):
        modules = [a.name for a in node.names] if isinstance(node, ast.Import) else [getattr(node, "module", "")]
        assert not any(module in ALL for module in modules)


def requirements(text):
    return {line.strip() for line in text.splitlines() if line.strip() and not line.startswith(("#", "-r"))}


@pytest.mark.parametrize("name", [*ALL, "enjoy"])
def test_inline_metadata_agrees_with_requirements(name):
    source = (ROOT / f"{name}.py").read_text()
    (block,) = re.findall(
        r"(?m)^# /// script$\s((?:^#(?:| .*)$\s)+)^# ///$", source
    )  # the regular expression of PEP 723
    metadata = tomllib.loads("".join(line[2:] for line in block.splitlines(keepends=True)))
    assert metadata["requires-python"] == ">=3.11"
    files = ["requirements.txt", "requirements-procgen.txt"] if name in GAME_SCRIPTS else ["requirements.txt"]
    expected = set.union(*(requirements((ROOT / file).read_text()) for file in files))
    assert set(metadata["dependencies"]) == expected


@pytest.mark.parametrize("file", ["requirements.txt", "requirements-procgen.txt", "requirements-dev.txt"])
def test_requirements_are_pinned(file):
    assert all(re.fullmatch(r"[\w\-\[\]]+==[\w.]+", line) for line in requirements((ROOT / file).read_text()))


@pytest.mark.parametrize("name", ["make_envs", "load_envpool"])
def test_enjoy_makes_games_as_the_scripts_do(name):
    assert blocks("enjoy")[name] == blocks(GAME_VSOP)[name]


def test_code_is_clean():
    for command in (["check", "."], ["format", "--check", "."]):
        done = subprocess.run([sys.executable, "-m", "ruff", *command], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout
