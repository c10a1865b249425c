"""Recipe: everything a fine-tuning run is told, as one strict schema.

Owns every key, its default and its meaning; promises that an accepted key is in force and that a refused recipe
lists all its errors at once, with file, line and the nearest name. `train.finetune` parses it;
`python -m train.recipe --markdown` writes docs/recipes.md.
"""

from __future__ import annotations

import difflib
import hashlib
import re
import reprlib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails, PydanticUndefined

from coop.errors import RecipeError

MAX_RECIPE_BYTES = 2**20
Group = Literal["attention", "experts", "shared_experts", "router", "other"]
Positive = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=0)]
_repr = reprlib.Repr()
_repr.maxstring = _repr.maxother = _repr.maxlong = 80


class Section(BaseModel):
    """A group of keys; unknown keys, wrong types, and numbers that are not finite are refused."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class ModelSection(Section):
    """The model that is tuned."""

    path: str = Field(description="folder of the model in Hub layout, or a model id of the hub")
    dtype: Literal["float32", "bfloat16"] = Field(
        default="bfloat16",
        description="type the weights are loaded and run in; LoRA weights are always float32",
    )
    experts: Literal["grouped_mm", "batched_mm", "eager"] = Field(
        default="grouped_mm", description="how transformers computes experts in training"
    )
    attention: Literal["sdpa", "eager", "flash_attention_2"] = Field(
        default="sdpa", description="how transformers computes attention"
    )


class DataSection(Section):
    """Chat data: one JSON object a line, `{"messages": [{"role": ..., "content": ...}, ...]}`."""

    train: str = Field(description="jsonl file to train on")
    eval: str | None = Field(
        default=None, description="jsonl file of held-out rows; null: no eval loss, no refreshed profile"
    )
    max_length: Annotated[int, Field(ge=8)] = Field(
        default=1024, description="tokens of a row; what is longer is cut at its end"
    )
    max_train_rows: Count = Field(default=0, description="use only the first so many rows; 0: all")
    max_eval_rows: Count = Field(default=0, description="use only the first so many held-out rows; 0: all")
    strict: bool = Field(
        default=True, description="true: a bad row stops the start; false: it is counted and left out"
    )


class LoraSection(Section):
    """Size of the adapters."""

    r: Positive = Field(default=8, description="rank")
    alpha: Positive = Field(default=16, description="scale; the update is multiplied by alpha / r")
    dropout: Annotated[float, Field(ge=0, lt=1)] = Field(
        default=0.0,
        description="dropout before LoRA; must be 0 unless attention alone is trained (PEFT cannot drop elsewhere)",
    )


class TuneSection(Section):
    """Which weights are trained, and how."""

    method: Literal["lora", "full"] = Field(
        default="lora", description="adapters on frozen weights, or the weights themselves"
    )
    groups: Annotated[list[Group], Field(min_length=1)] = Field(
        default=["attention", "experts"],
        description="what is trained: attention, experts, shared_experts, router and, with `full`, other "
        "(embeddings, norms, dense layers); a group that matches nothing is refused",
    )
    lora: LoraSection = LoraSection()

    @model_validator(mode="after")
    def _check(self) -> TuneSection:
        if self.method == "lora" and "other" in self.groups:
            raise ValueError("tune.groups: 'other' needs tune.method=full")
        stacked = [group for group in self.groups if group not in ("attention", "other")]
        if self.method == "lora" and self.lora.dropout and stacked:
            raise ValueError(f"tune.lora.dropout: must be 0 when {' and '.join(stacked)} are in tune.groups")
        return self


class MoeSection(Section):
    """Load balancing while training."""

    aux_loss_coef: Annotated[float, Field(ge=0)] | None = Field(
        default=None,
        description="weight of the load-balancing loss, in training and eval loss; null: as the model says; 0: off",
    )


class TrainSection(Section):
    """The optimisation."""

    steps: Positive | None = Field(default=None, description="optimiser steps; set this or `epochs`")
    epochs: Annotated[float, Field(gt=0)] | None = Field(
        default=None, description="passes over the data; set this or `steps`"
    )
    batch_size: Positive = Field(default=1, description="rows a device takes at once")
    grad_accumulation: Positive = Field(default=1, description="batches in one optimiser step")
    learning_rate: Annotated[float, Field(gt=0)] = Field(default=2e-4, description="highest learning rate")
    schedule: Literal["cosine", "linear", "constant_with_warmup"] = Field(
        default="cosine", description="how the learning rate falls after warm-up"
    )
    warmup_steps: Count = Field(default=0, description="steps in which the learning rate rises from 0")
    weight_decay: Annotated[float, Field(ge=0)] = Field(default=0.0, description="of AdamW")
    max_grad_norm: Annotated[float, Field(gt=0)] = Field(
        default=1.0, description="gradients are scaled down to this norm"
    )
    activation_checkpointing: bool = Field(
        default=False, description="compute activations again in backward to save memory"
    )
    seed: Annotated[int, Field(ge=0, le=2**32 - 1)] = Field(
        default=0, description="of shuffling, LoRA start values and dropout"
    )

    @model_validator(mode="after")
    def _check(self) -> TrainSection:
        if (self.steps is None) == (self.epochs is None):
            raise ValueError("train: set exactly one of train.steps and train.epochs")
        return self


class WarmupSection(Section):
    """The expert warm-up: one virtual task for every expert, timed, without touching the training."""

    every_steps: Count = Field(default=100, description="run it every so many optimiser steps; 0: never")
    row_counts: Annotated[list[Annotated[int, Field(ge=1, le=65536)]], Field(min_length=1, max_length=16)] = (
        Field(default=[1, 8, 64], description="token rows of the virtual tasks, rising, at most 16")
    )
    repeats: Annotated[int, Field(ge=1, le=100)] = Field(
        default=3, description="runs of each task; the fastest of all warm-ups counts"
    )
    max_seconds: Annotated[float, Field(gt=0)] = Field(
        default=5.0, description="a warm-up stops after this long"
    )

    @model_validator(mode="after")
    def _check(self) -> WarmupSection:
        if sorted(set(self.row_counts)) != self.row_counts:
            raise ValueError("coop.warmup.row_counts: must rise, such as [1, 8, 64]")
        return self


class ProfileSection(Section):
    """The expert profile that is written into every checkpoint."""

    enabled: bool = Field(
        default=True, description="count how experts are used; false: no warm-up and no profile either"
    )
    refresh_rows: Count = Field(
        default=64,
        description="held-out rows routed through the final weights for the final profile; 0: keep training counts",
    )


class CoopSection(Section):
    """What coop adds to training."""

    warmup: WarmupSection = WarmupSection()
    profile: ProfileSection = ProfileSection()


class EvalSection(Section):
    """Loss on held-out rows; measured before and after training in any case when `data.eval` is set."""

    every_steps: Count = Field(
        default=0, description="also measure every so many steps; 0: only before and after"
    )
    batch_size: Positive = Field(default=1, description="rows a device takes at once")


class CheckpointSection(Section):
    """Checkpoints to resume from."""

    every_steps: Count = Field(
        default=100, description="write one every so many steps; 0: only the final result"
    )
    keep: Positive = Field(default=2, description="newest checkpoints that are kept")


class WandbSection(Section):
    """Tracking with W&B; a failure of it never stops a run."""

    mode: Literal["offline", "online", "disabled"] = Field(
        default="offline", description="where the run is tracked"
    )
    project: str = Field(default="coop", description="W&B project")
    run_name: str | None = Field(
        default=None, description="name of the run; null: the name of the output folder"
    )


class LoggingSection(Section):
    """What is shown while training."""

    every_steps: Positive = Field(default=1, description="show and record the loss every so many steps")
    wandb: WandbSection = WandbSection()


class Recipe(Section):
    """A whole fine-tuning run."""

    output: str = Field(description="folder of the result; checkpoints go inside it")
    model: ModelSection
    data: DataSection
    tune: TuneSection = TuneSection()
    moe: MoeSection = MoeSection()
    coop: CoopSection = CoopSection()
    train: TrainSection
    eval: EvalSection = EvalSection()
    checkpoint: CheckpointSection = CheckpointSection()
    logging: LoggingSection = LoggingSection()

    @model_validator(mode="after")
    def _check(self) -> Recipe:
        if self.data.eval is None:
            if self.coop.profile.enabled and self.coop.profile.refresh_rows:
                raise ValueError(
                    "coop.profile.refresh_rows: needs data.eval; set one of them (0 keeps training counts)"
                )
            if self.eval.every_steps:
                raise ValueError("eval.every_steps: needs data.eval")
        return self

    @property
    def digest(self) -> str:
        """SHA-256 of what decides the weights: a resumed run must agree with it."""
        deciding = self.model_dump(include={"model", "data", "tune", "moe", "train"})
        return hashlib.sha256(yaml.safe_dump(deciding, sort_keys=True).encode()).hexdigest()

    def to_yaml(self) -> str:
        """The resolved recipe, every key spelled out; `load_recipe` reads it back as the same."""
        return yaml.dump(self.model_dump(), Dumper=_Dumper, sort_keys=False)


class _Loader(yaml.SafeLoader):
    """YAML 1.1 as PyYAML reads it, except that `1e-4` is a number and a key may not come twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    raise yaml.MarkedYAMLError(None, None, f"key {key.value!r} appears twice", key.start_mark)
                seen.add(key.value)
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """Quotes every string that `_Loader` would read as something else."""


for _yaml in (_Loader, _Dumper):
    _yaml.add_implicit_resolver(
        "tag:yaml.org,2002:float",
        re.compile(r"^[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"),
        list("-+0123456789"),
    )


def load_recipe(path: Path, overrides: Sequence[str] = ()) -> Recipe:
    """The recipe in `path` with `key.sub=value` overrides applied. Raises RecipeError listing every fault."""
    try:
        return _load(path, _read(path), overrides)
    except RecursionError as exc:
        raise RecipeError(f"{path}: not a recipe: nested too deeply, or an alias inside itself") from exc


def _load(path: Path, text: str, overrides: Sequence[str]) -> Recipe:
    try:
        keys = yaml.load(text, _Loader)
        lines = _lines(yaml.compose(text, _Loader))
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
    if isinstance(node, yaml.MappingNode) and id(node) not in seen:
        seen.add(id(node))
        for key, value in node.value:
            path = (*prefix, str(key.value))
            lines[".".join(path)] = key.start_mark.line + 1
            lines |= _lines(value, path, seen)
    return lines


def _parse_override(override: str) -> tuple[list[str], Any]:
    key, equals, value = override.partition("=")
    if not equals or not all(key.split(".")):
        raise RecipeError(f"{override!r} is not an override: write key.sub=value, such as train.steps=20")
    try:
        return key.split("."), yaml.load(value, _Loader)
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
    """The nearest key: among its siblings by name, else anywhere, else what the section has."""
    known = [name for name, _, _ in walk_keys()]
    parent, _, name = key.rpartition(".")
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
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, Section):
            yield from walk_keys(inner, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", field, section


def to_markdown() -> str:
    """docs/recipes.md: a table of keys for each section."""
    lines = [
        "# Recipes",
        "",
        "A recipe is a YAML file with the keys below; `key.sub=value` on the command line overrides it. Unknown keys "
        "and wrong types are refused. Generated by `python -m train.recipe --markdown > docs/recipes.md`.",
    ]
    current: type[Section] | None = None
    for key, field, section in walk_keys():
        if section is not current:
            current = section
            title = key.rpartition(".")[0] or "top level"
            lines += [
                "",
                f"## {title}",
                "",
                section.__doc__ or "",
                "",
                "| key | type | default | meaning |",
                "|---|---|---|---|",
            ]
        lines.append(
            f"| `{key}` | {_type_name(section, field, key)} | {_default(field)} | {field.description} |"
        )
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
