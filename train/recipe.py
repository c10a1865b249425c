"""Recipe files: a YAML file and overrides, checked against the schema.

Owns reading, overriding and the words of a refusal; promises that a refused recipe lists all its errors at once,
with file, line and the nearest name. `train.finetune` parses with it; `python -m train.recipe --markdown` writes
docs/recipes.md.
"""

from __future__ import annotations

import difflib
import reprlib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails, PydanticUndefined

from coop.errors import RecipeError
from train.old_names import NOTES, OLD_NAMES
from train.plain_yaml import PlainLoader
from train.schema import Recipe, Section

MAX_RECIPE_BYTES = 2**20
_repr = reprlib.Repr()
_repr.maxstring = _repr.maxother = _repr.maxlong = 80


def load_recipe(path: Path, overrides: Sequence[str] = ()) -> Recipe:
    """The recipe in `path` with `key.sub=value` overrides applied. Raises RecipeError listing every fault."""
    try:
        return _load(path, _read(path), overrides)
    except RecursionError as exc:
        raise RecipeError(f"{path}: not a recipe: nested too deeply, or an alias inside itself") from exc


def _load(path: Path, text: str, overrides: Sequence[str]) -> Recipe:
    try:
        keys = yaml.load(text, PlainLoader)
        lines = _lines(yaml.compose(text, PlainLoader))
    except yaml.YAMLError as exc:
        mark = getattr(exc, "problem_mark", None)
        place = f"{path}:{mark.line + 1}" if mark else str(path)
        raise RecipeError(f"{place}: not valid YAML: {getattr(exc, 'problem', None) or exc}") from exc
    except ValueError as exc:  # a date or a number that PyYAML recognises and Python does not
        raise RecipeError(f"{path}: not valid YAML: {str(exc)[:200]}") from exc
    if not isinstance(keys, dict):
        raise RecipeError(f"{path}: not a recipe: expected keys such as `model:` and `data:`")
    places = {key: f"{path}:{line}" for key, line in lines.items()}
    for override in overrides:
        key, value = _parse_override(override)
        _set(keys, key, value, override)
        places[".".join(key)] = f"{override!r} on the command line"
    try:
        return Recipe.model_validate(keys)
    except ValidationError as exc:
        faults = [_describe(error, places, str(path)) for error in exc.errors()]
        count = f"{len(faults)} errors" if len(faults) > 1 else "1 error"
        raise RecipeError("\n  ".join([f"{path}: {count} in the recipe", *faults])) from exc


def _read(path: Path) -> str:
    try:
        if path.stat().st_size > MAX_RECIPE_BYTES:
            raise RecipeError(f"{path}: more than {MAX_RECIPE_BYTES} bytes; this is not a recipe")
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        reason = exc.strerror if isinstance(exc, OSError) else "not UTF-8 text"
        raise RecipeError(f"{path}: {reason}") from exc


def _lines(
    node: yaml.Node | None, prefix: tuple[str, ...] = (), seen: set[int] | None = None
) -> dict[str, int]:
    """Line number, from 1, of every key path; what aliases repeat is walked once."""
    lines: dict[str, int] = {}
    seen = set() if seen is None else seen
    children: list[tuple[str, yaml.Node, yaml.Node]] = []  # name, where it stands, what it holds
    if isinstance(node, yaml.MappingNode):
        children = [(str(key.value), key, value) for key, value in node.value]
    elif isinstance(node, yaml.SequenceNode):
        children = [(str(index), value, value) for index, value in enumerate(node.value)]
    if node is not None and id(node) not in seen:
        seen.add(id(node))
        for name, place, value in children:
            path = (*prefix, name)
            lines[".".join(path)] = place.start_mark.line + 1
            lines |= _lines(value, path, seen)
    return lines


def _parse_override(override: str) -> tuple[list[str], Any]:
    key, equals, value = override.partition("=")
    if not equals or not all(key.split(".")):
        raise RecipeError(f"{override!r} is not an override: write key.sub=value, such as train.steps=20")
    try:
        return key.split("."), yaml.load(value, PlainLoader)
    except (yaml.YAMLError, ValueError) as exc:
        raise RecipeError(f"{override!r}: the value is not valid YAML") from exc


def _set(keys: dict[str, Any], path: list[str], value: Any, override: str) -> None:
    for name in path[:-1]:
        if keys.get(name) is None:
            keys[name] = {}
        keys = keys[name]
        if not isinstance(keys, dict):
            raise RecipeError(f"{override!r}: {name!r} holds a value, not keys")
    keys[path[-1]] = value


def _describe(error: ErrorDetails, places: dict[str, str], path: str) -> str:
    """One fault as a sentence: where, what, and what to write instead."""
    key = ".".join(str(part) for part in error["loc"])
    place = next((places[k] for k in _ancestors(key) if k in places), path)
    kind, message = error["type"], error["msg"]
    if kind == "extra_forbidden":
        return f"{place}: unknown key `{key}`{_suggestion(key)}"
    if kind == "missing":
        return f"{place}: `{key}` is missing"
    if kind == "value_error":
        return f"{place}: {message.removeprefix('Value error, ')}"
    return f"{place}: `{key}` is {_repr.repr(error['input'])}: {message[0].lower()}{message[1:]}"


def _ancestors(key: str) -> Iterator[str]:
    parts = key.split(".")
    for end in range(len(parts), 0, -1):
        yield ".".join(parts[:end])


def _suggestion(key: str) -> str:
    """What another trainer's name is here; else the nearest key: among its siblings, else anywhere; else all."""
    key = ".".join(
        part for part in key.split(".") if not part.isdigit()
    )  # an item of a list has its list's keys
    known = [name for name, _, _ in walk_keys()]
    parent, _, name = key.rpartition(".")
    if name in OLD_NAMES:
        note = f" ({NOTES[name]})" if name in NOTES else ""
        return f"; here it is `{OLD_NAMES[name]}`{note}"
    siblings = {k.rpartition(".")[2]: k for k in known if k.rpartition(".")[0] == parent}
    siblings |= {
        k[len(parent) + 1 :].split(".")[0]: k for k in known if parent and k.startswith(parent + ".")
    }
    near = difflib.get_close_matches(name, siblings, n=1)
    if near:
        return f"; did you mean `{parent + '.' if parent else ''}{near[0]}`?"
    elsewhere = [k for k in known if k.rpartition(".")[2] == name] or difflib.get_close_matches(
        key, known, n=1
    )
    if elsewhere:
        return f"; did you mean `{elsewhere[0]}`?"
    tops = sorted(siblings) or sorted({k.split(".")[0] for k in known})
    return f"; {parent or 'a recipe'} has {', '.join(tops)}"


def walk_keys(section: type[Section] = Recipe, prefix: str = "") -> Iterator[tuple[str, Any, type[Section]]]:
    """Every key of the schema: its path, its field, and the section that it is in."""
    for name, field in section.model_fields.items():
        inner = _section_in(field.annotation)
        if inner is not field.annotation:
            yield f"{prefix}{name}", field, section
        if inner is not None:
            yield from walk_keys(inner, f"{prefix}{name}.")


def _section_in(annotation: Any) -> type[Section] | None:
    """The Section that an annotation is, or is a list of."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation
    found = (_section_in(argument) for argument in get_args(annotation))
    return next((inner for inner in found if inner is not None), None)


def to_markdown() -> str:
    """docs/recipes.md: a table of keys for each section."""
    lines = [
        "# Recipes",
        "",
        "A recipe is a YAML file with the keys below; `key.sub=value` on the command line overrides it. Unknown keys "
        "and wrong types are refused. Generated by `python -m train.recipe --markdown > docs/recipes.md`.",
    ]
    titles: dict[type[Section], str] = {}
    tables: dict[type[Section], list[str]] = {}
    for key, field, section in walk_keys():
        title = titles.setdefault(section, key.rpartition(".")[0])
        if key.rpartition(".")[0] == title:  # a section that is used twice is explained where it is first
            row = f"| `{key}` | {_type_name(section, field, key)} | {_default(field)} | {field.description} |"
            tables.setdefault(section, []).append(row)
    for section, rows in tables.items():
        head = ["", f"## {titles[section] or 'top level'}", "", section.__doc__ or "", ""]
        lines += [*head, "| key | type | default | meaning |", "|---|---|---|---|", *rows]
    return "\n".join(lines) + "\n"


def _type_name(section: type[Section], field: Any, key: str) -> str:
    schema = section.model_json_schema()["properties"][key.rpartition(".")[2]]
    kinds = schema.get("anyOf", [schema])
    return " or ".join(_kind_name(kind) for kind in kinds).replace("|", "\\|")


def _kind_name(kind: dict[str, Any]) -> str:
    if "enum" in kind:
        return ", ".join(f"`{value}`" for value in kind["enum"])
    if "const" in kind:
        return f"`{kind['const']}`"
    if kind["type"] == "array" and "$ref" in kind["items"]:
        return "path, source or list of sources"
    if kind["type"] == "array":
        return f"list of {_kind_name(kind['items'])}"
    bounds = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
    limits = [f"{sign} {kind[name]}" for name, sign in bounds.items() if name in kind]
    return " ".join([kind["type"], " and ".join(limits)]).strip()


def _default(field: Any) -> str:
    if field.default is PydanticUndefined:
        return "required"
    return f"`{yaml.safe_dump(field.default, default_flow_style=True).removesuffix('...' + chr(10)).strip()}`"


if __name__ == "__main__":
    if sys.argv[1:] != ["--markdown"]:
        sys.exit("usage: python -m train.recipe --markdown")
    print(to_markdown(), end="")
