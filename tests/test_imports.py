"""Imports run one way, stay quick, and private interfaces of torch stay in one file."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# A layer imports from the layers before it and from itself.
LAYERS = (
    ("errors", "arguments"),
    ("recording",),
    ("engine",),
    ("memory",),
    (
        "session",
        "backward",
        "foresight",
        "gathering",
        "pending",
        "recovery",
        "slices",
        "verification",
        "wrapping",
    ),
    ("buffers", "integrations"),
    ("spaces", "returns", "checkpoint"),
    (
        "making",
        "envs",
        "evaluation",
        "metrics",
        "normalization",
        "readings",
        "video",
        "workers",
    ),
    ("agents",),
    ("account", "progress", "run_folder", "training", "callbacks", "cards"),
    ("cli", "__main__"),
)
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}

# Public modules that agents may use beside the names of koila_rl itself.
PUBLIC_TO_AGENTS = {
    "agents",
    "arguments",
    "checkpoint",
    "envs",
    "errors",
    "normalization",
    "returns",
    "spaces",
}

TORCH_ALONE = {"recording", "engine", "memory"}


def source_files() -> Iterator[tuple[str, Path]]:
    """(layer's name, file) of every module; agents under the name they are installed by."""
    for path in sorted((ROOT / "koila_rl").rglob("*.py")):
        parts = path.relative_to(ROOT / "koila_rl").parts
        if parts[0] not in ("agents", "__init__.py"):
            yield parts[0].removesuffix(".py"), path
    for path in sorted((ROOT / "agents").rglob("*.py")):
        yield "agents", path


def imported(path: Path, at_import_only: bool = False) -> Iterator[str]:
    """Dotted names of the modules a file imports; what only type checkers see is left out."""
    tree = ast.parse(path.read_text())
    unseen = {
        id(inner)
        for node in ast.walk(tree)
        if (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test))
        or (at_import_only and isinstance(node, ast.FunctionDef))
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in unseen:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide the layer"
            assert node.module is not None
            if node.module == "koila_rl":
                yield from (f"koila_rl.{alias.name}" for alias in node.names)
            else:
                yield node.module


FILES = list(source_files())


@pytest.mark.parametrize(
    ("layer", "path"), FILES, ids=[str(path.relative_to(ROOT)) for _, path in FILES]
)
def test_imports_run_one_way(layer: str, path: Path) -> None:
    assert layer in RANK, f"{path} belongs to no layer; add it to LAYERS"
    for name in imported(path):
        parts = name.split(".")
        if parts[0] != "koila_rl" or len(parts) == 1:
            continue
        assert parts[1] in RANK, f"{path} imports {name}, which belongs to no layer"
        assert RANK[parts[1]] <= RANK[layer], f"{path} ({layer}) imports {name}, which is above it"
        if layer == "agents":
            assert parts[1] in PUBLIC_TO_AGENTS, f"{path} imports {name}, which is not public"


@pytest.mark.parametrize(
    "path", [p for layer, p in FILES if layer in TORCH_ALONE], ids=lambda p: str(p.name)
)
def test_the_engine_needs_torch_alone(path: Path) -> None:
    foreign = {
        name.split(".")[0]
        for name in imported(path, at_import_only=True)
        if name.split(".")[0] not in (*sys.stdlib_module_names, "torch", "koila_rl")
    }
    assert not foreign


@pytest.mark.parametrize("layer", ["agents", "envs", "training", "cli"])
def test_no_layer_above_the_engine_uses_its_private_modules(layer: str) -> None:
    for _, path in (entry for entry in FILES if entry[0] == layer):
        for name in imported(path):
            assert not name.startswith(("koila_rl.recording", "koila_rl.engine")), f"{path}: {name}"


HEAVY = ("tensorboard", "matplotlib", "tyro", "torchrl", "stable_baselines3", "torch._dynamo")


def test_importing_the_package_imports_nothing_heavy() -> None:
    program = f"import sys, koila_rl; print([m for m in {HEAVY!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


def test_agents_folder_is_the_package() -> None:
    import koila_rl.agents.ppo

    assert Path(koila_rl.agents.ppo.__file__).resolve() == (ROOT / "agents" / "ppo.py").resolve()
