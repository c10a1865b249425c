"""The shape of the tree, held by its syntax trees: who may import whom, what is never called, how files open.

Owns the rules; promises that each names the file and line that breaks it. Run with all tests.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("coop", "train", "infer")
SHIPPED = sorted(path for room in (*PACKAGES, "scripts") for path in (ROOT / room).rglob("*.py"))
ALL_FILES = sorted({*SHIPPED, *(ROOT / "tests").rglob("*.py")})
HEAVY = frozenset(
    [
        "torch",
        "transformers",
        "accelerate",
        "peft",
        "trl",
        "datasets",
        "wandb",
        "matplotlib",
        "safetensors",
        "gguf",
    ]
)
LIGHT_COMMANDS = (
    "coop/__main__.py",
    "coop/pack.py",
    "coop/profile.py",
    "infer/bench.py",
    "infer/generate.py",
    "train/finetune.py",
)
UNSAFE_MODULES = frozenset(["pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"])


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def imported(node: ast.AST, path: Path) -> Iterator[str]:
    """Absolute module names that an import statement may load; `from a import b` yields `a` and `a.b`."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        package = path.relative_to(ROOT).parts[: -node.level] if node.level else ()
        base = ".".join((*package, *(node.module or "").split("."))).strip(".")
        yield base
        yield from (f"{base}.{alias.name}" for alias in node.names)


def rooms_imported(path: Path) -> set[str]:
    """First parts of everything that a file imports, anywhere in it."""
    return {module.partition(".")[0] for node in ast.walk(tree_of(path)) for module in imported(node, path)}


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def loaded_at_once(node: ast.AST, path: Path) -> Iterator[str]:
    """Modules that importing a file loads: not what stands in functions or under TYPE_CHECKING."""
    for child in ast.iter_child_nodes(node):
        yield from imported(child, path)
        if not isinstance(
            child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
        ) and not is_type_checking(child):
            yield from loaded_at_once(child, path)


def file_of(module: str) -> Path | None:
    """The file of one of our own modules."""
    place = ROOT.joinpath(*module.split("."))
    candidates = (place.with_suffix(".py"), place / "__init__.py")
    return next((path for path in candidates if path.is_file()), None)


def load_chain(start: Path) -> Iterator[tuple[str, str]]:
    """(module, through which file) for everything loaded by importing `start`, over our own modules."""
    seen, waiting = {start}, [start]
    while waiting:
        path = waiting.pop()
        parents = [
            parent / "__init__.py" for parent in path.parents if parent != ROOT and ROOT in parent.parents
        ]
        for module in loaded_at_once(tree_of(path), path):
            yield module, name_of(path)
            inner = file_of(module) if module.partition(".")[0] in PACKAGES else None
            parents += [inner] if inner else []
        fresh = {inner for inner in parents if inner.is_file()} - seen
        seen |= fresh
        waiting += fresh


@pytest.mark.parametrize("path", sorted((ROOT / "coop").rglob("*.py")), ids=name_of)
def test_coop_imports_neither_train_nor_infer(path: Path) -> None:
    assert rooms_imported(path).isdisjoint({"train", "infer", "scripts", "tests"})


def test_only_the_dispatcher_of_coop_names_train_and_infer() -> None:
    def names(path: Path) -> bool:
        return any(
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and re.fullmatch(r"(train|infer)\.\w+", node.value)
            for node in ast.walk(tree_of(path))
        )

    assert [name_of(path) for path in (ROOT / "coop").rglob("*.py") if names(path)] == ["coop/__main__.py"]


def test_train_and_infer_do_not_know_each_other() -> None:
    for room, other in (("train", "infer"), ("infer", "train")):
        for path in (ROOT / room).rglob("*.py"):
            assert other not in rooms_imported(path), name_of(path)


@pytest.mark.parametrize("command", LIGHT_COMMANDS)
def test_a_command_loads_nothing_heavy_before_it_has_read_its_options(command: str) -> None:
    heavy = [(m, through) for m, through in load_chain(ROOT / command) if m.partition(".")[0] in HEAVY]
    assert heavy == []


@pytest.mark.parametrize("path", ALL_FILES, ids=name_of)
def test_a_module_opens_by_saying_what_it_is(path: Path) -> None:
    tree = tree_of(path)
    assert not tree.body or ast.get_docstring(tree)


@pytest.mark.parametrize("path", SHIPPED, ids=name_of)
def test_no_file_can_run_code_that_came_as_data(path: Path) -> None:
    assert rooms_imported(path).isdisjoint(UNSAFE_MODULES)
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Call):
            place = f"{name_of(path)}:{node.lineno}"
            called = ast.unparse(node.func)
            assert called not in ("torch.load", "eval", "exec", "__import__"), f"{place} calls {called}"
            for argument in node.keywords:
                if argument.arg in ("trust_remote_code", "allow_pickle"):
                    assert ast.unparse(argument.value) == "False", f"{place} sets {argument.arg}"


def outer_functions(node: ast.AST) -> Iterator[ast.FunctionDef]:
    """Functions of a module and of its classes, not those inside functions."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef):
            yield child
        elif isinstance(child, ast.ClassDef):
            yield from outer_functions(child)


@pytest.mark.parametrize("path", SHIPPED, ids=name_of)
def test_public_functions_are_typed_and_no_function_is_longer_than_a_screen(path: Path) -> None:
    for function in outer_functions(tree_of(path)):
        place = f"{name_of(path)}:{function.lineno} {function.name}"
        assert function.returns is not None or function.name.startswith("_"), f"{place} has no return type"
        lines = (
            (function.end_lineno or 0)
            - function.lineno
            - len((ast.get_docstring(function) or "").splitlines())
        )
        assert lines < 60, f"{place} has {lines} lines"
