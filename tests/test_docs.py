"""Links of the documentation lead somewhere and its programs run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
PROGRAMS = [
    pytest.param(block, id=f"{page.name}-{i}")
    for page in PAGES
    for i, block in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL))
]


def run(*arguments: str, cwd: Path) -> str:
    """The output of a Python program on a clean exit; warnings are errors there too."""
    environment = {**os.environ, "PYTHONWARNINGS": "error", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=cwd, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_are_named_exist(page: Path) -> None:
    for name in re.findall(
        r"`((?:koila_rl|agents|tests|examples|docs)/[\w/.*]+)`", page.read_text()
    ):
        assert list(ROOT.glob(name.rstrip("/"))), f"{page.name} names {name}"


@pytest.mark.parametrize("program", PROGRAMS)
def test_programs_run(program: str, tmp_path: Path) -> None:
    run("-c", program, cwd=tmp_path)


def test_example_own_loop(tmp_path: Path) -> None:
    assert "mean length" in run(str(ROOT / "examples" / "own_loop.py"), "2", cwd=tmp_path)


def test_example_ppo_cartpole(tmp_path: Path) -> None:
    output = run(str(ROOT / "examples" / "ppo_cartpole.py"), "300", cwd=tmp_path)
    assert "20 episodes: mean return" in output


@pytest.mark.slow
def test_example_recurrent(tmp_path: Path) -> None:
    output = run(str(ROOT / "examples" / "recurrent.py"), "256", cwd=tmp_path)
    assert "minibatch 8 = 2 × 4" in output


@pytest.mark.slow
def test_example_interleaved(tmp_path: Path) -> None:
    output = run(str(ROOT / "examples" / "interleaved.py"), "512", cwd=tmp_path)
    assert "interleaved: " in output
    assert "minibatch 256 = 4 × 64" in output


def test_example_huge_minibatch(tmp_path: Path) -> None:
    output = run(str(ROOT / "examples" / "huge_minibatch.py"), "256", cwd=tmp_path)
    assert "256 = 2 × 128" in output
    assert float(output.split("difference ")[1].split(",")[0]) < 1e-5
