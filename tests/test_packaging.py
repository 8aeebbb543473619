"""What the wheel holds, and that nothing called `agents` lands beside the package."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import zipfile
from importlib.metadata import entry_points, metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what the package is built from, so that a build leaves nothing in the tree."""
    copy = tmp_path_factory.mktemp("sources")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    for name in ("koila_rl", "agents"):
        shutil.copytree(
            ROOT / name, copy / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__")
        )
    return copy


def build(sources: Path, kind: str) -> Path:
    """The wheel or source distribution of ``sources``, built with what is installed here."""
    out = sources / "dist"
    subprocess.run(
        [sys.executable, "-m", "build", f"--{kind}", "--no-isolation", "-o", str(out), "."],
        cwd=sources,
        check=True,
        capture_output=True,
    )
    return next(out.glob("*.whl" if kind == "wheel" else "*.tar.gz"))


def contents(wheel: Path) -> set[str]:
    return set(zipfile.ZipFile(wheel).namelist())


def modules() -> set[str]:
    """Every module of the repository under the name it is installed by."""
    ours = {path for path in (ROOT / "koila_rl").rglob("*.py") if "agents" not in path.parts}
    names = {path.relative_to(ROOT).as_posix() for path in ours}
    return names | {f"koila_rl/agents/{path.name}" for path in (ROOT / "agents").glob("*.py")}


def test_wheel_holds_every_module_and_no_agents_at_the_top(sources: Path) -> None:
    names = contents(build(sources, "wheel"))
    assert {name for name in names if name.endswith(".py")} == modules()
    assert "koila_rl/py.typed" in names
    top = {name.split("/")[0] for name in names}
    assert {name for name in top if not name.endswith(".dist-info")} == {"koila_rl"}
    assert any(name.endswith("LICENSE") for name in names)


def test_wheel_is_the_same_where_links_cannot_be_made(sources: Path, tmp_path: Path) -> None:
    copy = tmp_path / "sources"
    shutil.copytree(sources, copy, symlinks=True, ignore=shutil.ignore_patterns("dist", "build"))
    # Git checks a link out as a small file that names its target on such systems.
    (copy / "koila_rl" / "agents").unlink()
    (copy / "koila_rl" / "agents").write_text("../agents")
    names = contents(build(copy, "wheel"))
    assert {name for name in names if name.endswith(".py")} == modules()


def test_source_distribution_can_be_built_from(sources: Path, tmp_path: Path) -> None:
    with tarfile.open(build(sources, "sdist")) as archive:
        archive.extractall(tmp_path, filter="data")
    (unpacked,) = tmp_path.iterdir()
    assert {n for n in contents(build(unpacked, "wheel")) if n.endswith(".py")} == modules()


def test_installed_command_and_metadata() -> None:
    (command,) = entry_points(group="console_scripts", name="koila-rl")
    assert command.value == "koila_rl.cli:main"
    assert metadata("koila-rl")["Requires-Python"] == ">=3.10"
