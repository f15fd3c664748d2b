"""What the scripts share is identical to the byte, and what is written about them is true."""

import ast
import itertools
import re
import subprocess
import sys
import tomllib

import pytest
from conftest import ROOT, SCRIPTS

VSOP, A3C, PPO, VSPPO, RMPG = SCRIPTS
MASKS = "dropout, spectral norm and Thompson sampling are VSOP's, VSPPO's and RMPG's"
OWN = [{script} for script in SCRIPTS]
BAYESIAN_OR_PLAIN = [{VSOP, VSPPO, RMPG}, {A3C, PPO}]
# Which scripts may have a version of their own of what has the same name in others, and why.
DIFFERENT = {
    "Args": (OWN, "flags and defaults are the algorithm's"),
    "loss_function": (OWN, "the objective is the algorithm"),
    "MLP": (BAYESIAN_OR_PLAIN, MASKS),
    "forward": (BAYESIAN_OR_PLAIN, MASKS),
    "collect": (BAYESIAN_OR_PLAIN, MASKS),
    "gradients": (BAYESIAN_OR_PLAIN, MASKS),
    "update": (BAYESIAN_OR_PLAIN, MASKS),
    "mechanisms": (BAYESIAN_OR_PLAIN, MASKS),
    "Agent": ([{VSOP, VSPPO}, {A3C, PPO}, {RMPG}], MASKS + "; RMPG's critic is q(s, a)"),
    "estimate": (OWN, MASKS + "; PPO's clipping needs the old values, RMPG the values of all actions"),
    "gradient_step": (BAYESIAN_OR_PLAIN, MASKS),
    "Optimizer": ([{VSOP, VSPPO, RMPG}, {A3C}, {PPO}], "AdamW, RMSProp and Adam, as in the paper's table"),
}


def blocks(name):
    """Source of every top-level function and class, in order."""
    source = (ROOT / f"{name}.py").read_text()
    nodes = [node for node in ast.parse(source).body if isinstance(node, (ast.FunctionDef, ast.ClassDef))]
    lines = source.splitlines()
    return {
        node.name: "\n".join(lines[min([node.lineno, *(d.lineno for d in node.decorator_list)]) - 1 : node.end_lineno])
        for node in nodes
    }


@pytest.mark.parametrize("one, other", list(itertools.combinations(SCRIPTS, 2)))
def test_shared_blocks_are_identical_and_in_the_same_order(one, other):
    ours, theirs = blocks(one), blocks(other)
    shared = [name for name in ours if name in theirs]
    assert shared == [name for name in theirs if name in ours]
    assert len(shared) > 15
    for name in shared:
        groups, _ = DIFFERENT.get(name, ([set(SCRIPTS)], ""))
        if any({one, other} <= group for group in groups):
            assert ours[name] == theirs[name], f"{name} differs between {one} and {other}"


def test_exceptions_are_real():
    everything = {name: blocks(name) for name in SCRIPTS}
    for name, (groups, _) in DIFFERENT.items():
        sources = [{everything[script][name] for script in group} for group in groups]
        assert all(len(versions) == 1 for versions in sources)
        assert len(set.union(*sources)) == len(groups), f"{name} is not different where it is listed to be"


@pytest.mark.parametrize("name", SCRIPTS)
def test_no_script_imports_another(name):
    for node in ast.walk(ast.parse((ROOT / f"{name}.py").read_text())):
        modules = [a.name for a in node.names] if isinstance(node, ast.Import) else [getattr(node, "module", "")]
        assert not any(module in SCRIPTS for module in modules)


def requirements(text):
    return {line.strip() for line in text.splitlines() if line.strip() and not line.startswith(("#", "-r"))}


@pytest.mark.parametrize("name", [*SCRIPTS, "enjoy"])
def test_inline_metadata_agrees_with_requirements(name):
    source = (ROOT / f"{name}.py").read_text()
    (block,) = re.findall(
        r"(?m)^# /// script$\s((?:^#(?:| .*)$\s)+)^# ///$", source
    )  # the regular expression of PEP 723
    metadata = tomllib.loads("".join(line[2:] for line in block.splitlines(keepends=True)))
    assert metadata["requires-python"] == ">=3.11"
    assert set(metadata["dependencies"]) == requirements((ROOT / "requirements.txt").read_text())


@pytest.mark.parametrize("file", ["requirements.txt", "requirements-dev.txt"])
def test_requirements_are_pinned(file):
    assert all(re.fullmatch(r"[\w\-\[\]]+==[\w.]+", line) for line in requirements((ROOT / file).read_text()))


@pytest.mark.parametrize("one, other", [(A3C, VSOP), (PPO, VSPPO)])
def test_readme_quotes_the_diffs(one, other):
    command = ["diff", f"{one}.py", f"{other}.py"]
    diff = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout
    assert f"```diff\n{diff}```" in (ROOT / "README.md").read_text(), f"the README does not quote {' '.join(command)}"


@pytest.mark.parametrize("name", SCRIPTS)
def test_readme_explains_every_flag(name):
    """A flag that the README does not name is a flag nobody finds."""
    readme = (ROOT / "README.md").read_text()
    (args,) = [
        node for node in ast.parse((ROOT / f"{name}.py").read_text()).body if getattr(node, "name", "") == "Args"
    ]
    fields = [node for node in args.body if isinstance(node, ast.AnnAssign)]
    assert len(fields) > 20
    for field in fields:
        flag = field.target.id.replace("_", "-")
        assert re.search(rf"--(no-)?{flag}\b", readme), f"--{flag}"


def test_code_is_clean():
    for command in (["check", "."], ["format", "--check", "."]):
        done = subprocess.run([sys.executable, "-m", "ruff", *command], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout
