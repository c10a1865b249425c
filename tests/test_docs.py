"""The documents, held to the code: every option, key, strategy, message, file and link is really there.

Owns the reading of the README's tables; promises that each failure names what is missing. Run with all tests.
"""

from __future__ import annotations

import ast
import dataclasses
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from coop.__main__ import COMMANDS
from coop.strategy import STRATEGIES
from infer.generate import Report, build_parser
from tests.families import FAMILIES

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
MAPPED_ROOMS = ("coop", "train", "infer", "recipes", "scripts", "tests", "docs")
NOT_MAPPED = {"README.md", "LICENSE", ".gitignore", "py.typed", "__init__.py"}


def section(title: str) -> str:
    """The README from the heading `title` to the next of its level."""
    return README.split(f"\n## {title}\n")[1].split("\n## ")[0]


def first_block(text: str) -> str:
    """The first fenced block of `text`."""
    return text.split("```")[1].partition("\n")[2]


def files_in_tree() -> set[str]:
    """Files of the project that the map must list."""
    found = set()
    for room in MAPPED_ROOMS:
        for folder, folders, names in os.walk(ROOT / room):
            folders[:] = [name for name in folders if not name.startswith((".", "__"))]
            place = Path(folder).relative_to(ROOT)
            kept = (
                n for n in names if n not in NOT_MAPPED and not n.startswith(".") and not n.endswith(".so")
            )
            found |= {(place / name).as_posix() for name in kept}
    return found | {"pyproject.toml", "constraints-ci.txt", ".ci/run"}


def files_in_map() -> list[str]:
    """Files that the README's tree lists; a name with a slash at its end opens a folder for what is indented."""
    folders: list[tuple[int, str]] = []
    listed = []
    for line in first_block(section("The tree")).splitlines():
        name = line.split()[0]
        indent = len(line) - len(line.lstrip())
        while folders and folders[-1][0] >= indent:
            folders.pop()
        path = (folders[-1][1] if folders else "") + name
        if name.endswith("/"):
            folders.append((indent, path))
        else:
            assert len(line.split()) > 1, f"{path} is listed without a word of what it is"
            listed.append(path)
    return listed


def test_the_tree_in_the_readme_lists_exactly_the_files_that_exist() -> None:
    listed = files_in_map()
    assert len(listed) == len(set(listed))
    assert sorted(set(listed) - files_in_tree()) == [], "listed but not there"
    assert sorted(files_in_tree() - set(listed)) == [], "there but not listed"


def test_every_option_of_generate_is_in_the_readme_and_none_that_does_not_exist() -> None:
    table = section("Options of `python -m infer.generate`")
    documented = set(re.findall(r"^\| `(--[a-z-]+)", table, re.MULTILINE))
    options = {option for action in build_parser()._actions for option in action.option_strings}
    assert documented == options - {"-h", "--help"}


def test_every_key_of_the_json_is_in_the_readme() -> None:
    for field in dataclasses.fields(Report):
        assert f"`{field.name}`" in README, field.name


def test_every_strategy_is_in_the_readme_and_in_how_it_works() -> None:
    explained = (ROOT / "docs" / "how-it-works.md").read_text(encoding="utf-8")
    for name in STRATEGIES:
        assert f"| `{name}` |" in README
        assert f"`{name}`" in explained


def test_every_family_that_is_tested_is_in_the_readme_and_no_other() -> None:
    rows = re.findall(r"^\| (`[^|]+) \|", section("Which models"), re.MULTILINE)
    assert sorted(re.findall(r"`(\w+)`", " ".join(rows))) == sorted(FAMILIES)


def test_every_coop_command_is_in_the_readme() -> None:
    for name in COMMANDS:
        assert f"`coop {name}`" in README


def test_every_recipe_key_is_in_its_document() -> None:
    from pydantic import BaseModel

    from train.schema import Recipe

    def keys(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
        for name, field in model.model_fields.items():
            inner = field.annotation
            if isinstance(inner, type) and issubclass(inner, BaseModel):
                yield from keys(inner, f"{prefix}{name}.")
            else:
                yield prefix + name

    document = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
    assert [key for key in keys(Recipe) if f"`{key}`" not in document] == []


def test_the_two_commands_of_the_readme_are_scripts_that_exist() -> None:
    commands = re.findall(r"^bash (\S+)", first_block(section("Two commands")), re.MULTILINE)
    assert commands == ["scripts/demo.sh", "scripts/check.sh"]
    assert all((ROOT / command).is_file() for command in commands)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_and_named_paths_of_a_document_exist(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (document.parent / target).exists(), f"{document.name} links to {target}"
    for path in re.findall(
        r"\b((?:coop|train|infer|tests|scripts|recipes|docs)/[\w./-]*\.(?:py|sh|yaml|md))", text
    ):
        assert (ROOT / path).exists(), f"{document.name} names {path}"


def strings_of_the_source() -> str:
    """Every string of the shipped code, with `{...}` where a value goes, and the shell scripts."""
    texts = [path.read_text(encoding="utf-8") for path in (ROOT / "scripts").glob("*.sh")]
    for room in ("coop", "train", "infer"):
        for path in (ROOT / room).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.JoinedStr):
                    parts = [p.value if isinstance(p, ast.Constant) else "{...}" for p in node.values]
                    texts.append("".join(str(part) for part in parts))
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    texts.append(node.value)
    return "\n".join(texts)


def test_every_message_of_the_troubleshooting_table_is_one_that_the_code_prints() -> None:
    source = strings_of_the_source()
    cells = re.findall(r"^\| ([^|]*`.+?`) \|", section("When something is refused"), re.MULTILINE)
    assert len(cells) > 8
    for cell in cells:
        for message in re.findall(r"`([^`]+)`", cell):
            for fragment in re.split(r"\.\.\.|\bN\b", message):
                assert fragment.strip() in source, f"no code prints {fragment.strip()!r}"
