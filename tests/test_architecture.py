"""The cut: who may import whom, who may print, how long a function may get, what must be explained."""

from __future__ import annotations

import ast
import statistics
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "specdec_cli"
NAME = PACKAGE.name

# A module imports from its own layer (without a cycle) and from the ones above. A new module needs a line here.
LAYERS = (
    ("errors", "distribution", "limits", "types"),
    (
        "repetition", "sampling", "verify", "cost", "acceptance", "draft_length", "prediction", "stats", "interval",
        "text", "interrupt", "compatibility",
    ),
    ("context", "translation", "engine", "drafters", "testing"),
    ("llama",),
    (
        "child", "tiny", "selfcheck", "requantize", "constraint", "settings", "paths", "files", "registry", "split",
        "wording", "hub_cache", "hub_files", "stored", "download", "hub", "wheels", "sources", "template",
        "template_worker", "config", "gguf", "memory", "ngram_store", "estimates", "local_files", "own_registry",
    ),
    (
        "choice", "conversation", "prompts", "measuring", "provenance", "calibration", "tuned", "tuning", "session",
        "check", "bench", "trial", "removal", "matching", "doctor", "chat",
        "transcript",
    ),
    ("render",),
    ("cli", "__main__"),
)  # fmt: skip
LAYER_OF = {name: index for index, names in enumerate(LAYERS) for name in names}
NUMPY_ONLY = {name for names in LAYERS[:3] for name in names}
ONLY_IN = {
    "llama_cpp": {"llama"},
    "rich": {"render", "cli"},
    "typer": {"render", "cli"},
    "matplotlib": {"render"},
    "tomlkit": {"config", "own_registry"},
    "jinja2": {"template_worker"},
    "prompt_toolkit": {"cli.line_editor"},
}

Import = tuple[str, bool]


def modules() -> dict[str, Path]:
    """Dotted name inside the package -> file; the package itself is ''."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = list(path.relative_to(PACKAGE).with_suffix("").parts)
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()
TREES = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in MODULES.items()}


def top(module: str) -> str:
    """The name that has a layer."""
    return module.partition(".")[0]


def imports(module: str) -> list[Import]:
    """(absolute dotted name, whether it runs when the module is loaded) of every import, also inside functions."""
    found: list[Import] = []
    _visit(TREES[module], module, True, found)
    return found


def _visit(node: ast.AST, module: str, eager: bool, found: list[Import]) -> None:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            found += [(alias.name, eager) for alias in child.names]
        elif isinstance(child, ast.ImportFrom):
            found += [(name, eager) for name in _targets(child, module)]
        runs = eager and not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            runs = False
        _visit(child, module, runs, found)


def _targets(node: ast.ImportFrom, module: str) -> list[str]:
    base = node.module or ""
    if node.level:
        package = (
            [NAME, *module.split(".")] if MODULES[module].name == "__init__.py" else [NAME, *module.split(".")[:-1]]
        )
        kept = [part for part in package if part][: len(package) - node.level + 1]
        base = ".".join([*kept, *([node.module] if node.module else [])])
    # `from specdec_cli import conversation` names modules, `from specdec_cli.types import Draft` a member.
    return [f"{base}.{alias.name}" if base == NAME else base for alias in node.names]


def inner(name: str) -> str | None:
    """Name inside the package of an imported module; None for others."""
    if name != NAME and not name.startswith(f"{NAME}."):
        return None
    return name.removeprefix(NAME).removeprefix(".")


# ------------------------------------------------------------------ layers


def test_every_module_has_a_layer() -> None:
    unknown = {top(module) for module in MODULES if module} - set(LAYER_OF)
    assert not unknown, f"give these a place in LAYERS: {sorted(unknown)}"


@pytest.mark.parametrize("module", [module for module in MODULES if module])
def test_imports_follow_the_layers(module: str) -> None:
    own = LAYER_OF.get(top(module), -1)
    for name, _ in imports(module):
        used = inner(name)
        if used is None or (used and top(used) not in LAYER_OF and used.startswith("__")):
            continue
        assert not used or LAYER_OF.get(top(used), 99) <= own, f"{module} imports {used} from a later layer"


def test_no_cycles() -> None:
    """What runs at import time, file by file."""
    graph = {
        module: {used for name, eager in imports(module) if eager and (used := inner(name)) in MODULES and used}
        for module in MODULES
    }
    list(TopologicalSorter(graph).static_order())


def test_the_package_itself_loads_nothing() -> None:
    """`import specdec_cli.errors` must not pull llama.cpp in: names of the public interface are looked up when used."""
    if "" not in MODULES:
        pytest.skip("no __init__.py")
    eager = {name for name, runs in imports("") if runs}
    assert {name.partition(".")[0] for name in eager} <= set(sys.stdlib_module_names)


@pytest.mark.parametrize("module", [module for module in MODULES if top(module) in NUMPY_ONLY])
def test_the_lower_layers_need_numpy_only(module: str) -> None:
    roots = {name.partition(".")[0] for name, _ in imports(module)}
    assert roots - set(sys.stdlib_module_names) <= {"numpy", NAME}


@pytest.mark.parametrize("module", MODULES)
def test_libraries_stay_behind_their_door(module: str) -> None:
    for name, _ in imports(module):
        root = name.partition(".")[0]
        assert {top(module), module} & ONLY_IN.get(root, {module}), f"{module} imports {root}"
        assert root != "click", "Typer brings its own Click"


@pytest.mark.parametrize("module", [module for module in MODULES if top(module) not in {"render", "cli", "__main__"}])
def test_only_the_surface_prints(module: str) -> None:
    for node in ast.walk(TREES[module]):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id != "print", f"{module}:{node.lineno} prints"


# ------------------------------------------------------------------ shape


def functions() -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for module, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                yield f"{module}:{node.name}", node


def length(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines from `def` to the end, docstring left out."""
    first = node.body[0]
    doc = first.end_lineno - first.lineno + 1 if ast.get_docstring(node) and first.end_lineno else 0
    return (node.end_lineno or node.lineno) - node.lineno + 1 - doc


def test_no_function_is_long() -> None:
    long = {name: length(node) for name, node in functions() if length(node) > 60}
    assert not long


def test_the_median_function_is_short() -> None:
    assert statistics.median(length(node) for _, node in functions()) <= 10


# ------------------------------------------------------------------ docstrings


def undocumented(node: ast.AST, name: str) -> Iterator[str]:
    """Public modules, classes, functions and methods without a docstring; not what is inside functions."""
    if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
        overload = not isinstance(node, ast.Module) and any(
            "overload" in ast.unparse(item) for item in node.decorator_list
        )
        if not ast.get_docstring(node) and not overload:
            yield name
    if isinstance(node, (ast.Module, ast.ClassDef)):
        for child in node.body:
            if isinstance(child, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and not child.name.startswith(
                "_"
            ):
                yield from undocumented(child, f"{name}.{child.name}")


@pytest.mark.parametrize("module", MODULES)
def test_everything_public_is_explained(module: str) -> None:
    assert not list(undocumented(TREES[module], module or NAME))
