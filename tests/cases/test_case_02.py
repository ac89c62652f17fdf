"""Case 02: no example can rot. Every recipe on disk, and every Python block of the README, is run."""

import contextlib
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "recipes").rglob("*.yaml"))


def run(command, **settings):
    """Runs a command in a session of its own, so that no process that it started outlives a time-out."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "start_new_session": True}
    process = subprocess.Popen(command, **pipes, **settings)
    try:
        out, err = process.communicate(timeout=240)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def test_there_are_recipes():
    assert RECIPES


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_recipe_runs_by_the_command_in_its_header(recipe, tmp_path):
    header = "\n".join(line.lstrip("# ") for line in recipe.read_text().splitlines() if line.startswith("#"))
    match = re.search(r"lightning-dp fit --config \S+", header)
    assert match, "the header must hold the command that runs the recipe"
    program, *arguments = shlex.split(match.group())
    assert (ROOT / arguments[-1]).samefile(recipe)

    limits = ["--trainer.max_steps=2", f"--trainer.default_root_dir={tmp_path}"]
    done = run([Path(sys.executable).parent / program, *arguments, *limits], cwd=ROOT)

    assert done.returncode == 0, done.stdout + done.stderr
    closing = done.stdout[done.stdout.rindex("Private training ended") :]
    assert re.search(r"updates\W+2\b", closing)
    target = float(re.search(r"epsilon: ([\d.]+)", recipe.read_text()).group(1))
    spent = float(re.search(r"epsilon = ([\d.]+)", closing).group(1))
    assert 0.99 * target < spent <= target


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_recipe_says_what_accuracy_to_expect(recipe):
    header = [line for line in recipe.read_text().splitlines() if line.startswith("#")]
    assert re.search(r"Expected: .*acc\w* 0\.\d+ to 0\.\d+", "\n".join(header))


def test_module_can_be_run_instead_of_the_command():
    done = run([sys.executable, "-m", "lightning_dp", "--help"], cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "fit" in done.stdout
    assert "epsilon" in done.stdout


def test_python_blocks_of_the_readme_run_one_after_another(tmp_path):
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.DOTALL | re.MULTILINE)
    assert blocks
    script = tmp_path / "readme.py"
    script.write_text("\n".join(blocks))
    done = run([sys.executable, script], cwd=tmp_path, env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"})
    assert done.returncode == 0, done.stderr
