"""Recipe: what is accepted, and that every fault is said at once with its place and the nearest name."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from coop.errors import RecipeError
from train.old_names import OLD_NAMES
from train.recipe import load_recipe, to_markdown, walk_keys

ROOT = Path(__file__).resolve().parents[2]
MINIMAL = """\
output: out
model: {path: models/tiny-moe}
data: {train: train.jsonl, eval: eval.jsonl}
train:
  steps: 10
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "recipe.yaml"
    path.write_text(text)
    return path


def test_minimal_recipe_gets_defaults(tmp_path: Path) -> None:
    recipe = load_recipe(write(tmp_path, MINIMAL))
    assert recipe.tune.groups == ["attention", "experts"] and recipe.logging.wandb.mode == "offline"


def test_resolved_recipe_is_read_back_as_the_same(tmp_path: Path) -> None:
    recipe = load_recipe(write(tmp_path, MINIMAL), ["train.learning_rate=1e-4", "tune.groups=[attention]"])
    assert load_recipe(write(tmp_path, recipe.to_yaml())) == recipe


@pytest.mark.parametrize("name", ["1e5", "-2E+3", "1.5e3", "yes", "null", "0x1", "a: b", "~", "é\n"])
def test_text_that_looks_like_something_else_stays_text(tmp_path: Path, name: str) -> None:
    recipe = load_recipe(write(tmp_path, MINIMAL))
    logging = recipe.logging.model_copy(
        update={"wandb": recipe.logging.wandb.model_copy(update={"run_name": name})}
    )
    named = recipe.model_copy(update={"logging": logging})
    assert load_recipe(write(tmp_path, named.to_yaml())) == named


@pytest.mark.parametrize("text", ["1e-4", "1.0e-4", "0.0001", "1E-4"])
def test_every_spelling_of_a_number_is_a_number(tmp_path: Path, text: str) -> None:
    assert load_recipe(write(tmp_path, MINIMAL), [f"train.learning_rate={text}"]).train.learning_rate == 1e-4


def test_all_errors_are_listed_with_file_line_and_nearest_name(tmp_path: Path) -> None:
    text = MINIMAL + "  learning_rat: 1\n  batch_size: two\ncoop:\n  warmups: {}\n"
    path = write(tmp_path, text)
    with pytest.raises(RecipeError) as caught:
        load_recipe(path)
    message = str(caught.value)
    assert "3 errors" in message
    assert f"{path}:6: unknown key `train.learning_rat`; did you mean `train.learning_rate`?" in message
    assert f"{path}:7: `train.batch_size` is 'two': input should be a valid integer" in message
    assert f"{path}:9: unknown key `coop.warmups`; did you mean `coop.warmup`?" in message


def test_error_of_an_override_names_the_command_line(tmp_path: Path) -> None:
    with pytest.raises(
        RecipeError, match=r"'train.step=3' on the command line: unknown key .* `train.steps`"
    ):
        load_recipe(write(tmp_path, MINIMAL), ["train.step=3"])


def test_key_of_another_section_is_suggested_where_it_belongs(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"did you mean `train\.learning_rate`"):
        load_recipe(write(tmp_path, MINIMAL), ["learning_rate=3"])


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("train.epochs=1", "exactly one of train.steps and train.epochs"),
        ("train.steps=null", "exactly one of train.steps and train.epochs"),
        ("tune.lora.dropout=0.1", "must be 0 when experts are in tune.groups"),
        ("tune.groups=[other]", "needs tune.method=full"),
        ("tune.groups=[experts,gate]", "`tune.groups.1` is 'gate': input should be 'attention'"),
        ("coop.warmup.row_counts=[8,1]", "must rise"),
        ("data.eval=null", "coop.profile.refresh_rows: needs data.eval or data.eval_fraction"),
        ("train.seed=true", "valid integer"),
        ("train.seed=99999999999", "less than or equal to 4294967295"),
        ("train.learning_rate=.inf", "finite number"),
        ("train.weight_decay=.nan", "finite number"),
        ("coop.warmup.row_counts=[1,3000000000]", "less than or equal to 65536"),
        ("train.steps=2024-13-45", "not valid YAML"),
        ("logging.wandb.mode=maybe", "'offline', 'online' or 'disabled'"),
        ("model=3", "`model` is 3"),
        ("model.path=null", "`model.path` is None"),
        ("tune.experts.select=list", "goes with tune.experts.select=list"),
        ("tune.experts.list=['0:1']", "goes with tune.experts.select=list"),
        ("tune.experts.list=['0;1']", "should match pattern"),
        ("tune.experts.profile=x", "needs tune.experts.select=hot"),
        ("tune.experts.share=0", "greater than 0"),
        ("tune.freeze=[{rows: 3}]", "valid string"),
        ("tune.lora={r: 4, expert_r: 0}", "greater than or equal to 1"),
        ("eval.patience=2", "eval.patience: needs eval.every_steps"),
        ("train.betas=[0.9]", "at least 2 items"),
        ("train.betas=[0.9, 1.0]", "less than 1"),
        ("launch.processes=0", "greater than or equal to 1"),
    ],
)
def test_coupled_rules_and_wrong_values_are_refused(tmp_path: Path, override: str, reason: str) -> None:
    with pytest.raises(RecipeError, match=reason):
        load_recipe(write(tmp_path, MINIMAL), [override])


def test_dropout_is_accepted_where_peft_can_drop(tmp_path: Path) -> None:
    overrides = ["tune.lora.dropout=0.1", "tune.groups=[attention]"]
    assert load_recipe(write(tmp_path, MINIMAL), overrides).tune.lora.dropout == 0.1


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("a: [1", "not valid YAML"),
        ("- a\n- b\n", "not a recipe"),
        ("output: a\noutput: b\n", r":2: not valid YAML: key 'output' appears twice"),
        ("", "not a recipe"),
        ("train: &a {steps: *a}\n", "recipe.yaml"),
        ("a: " + "[" * 5000 + "]" * 5000, "nested too deeply"),
        (
            "a0: &a0 {x: 1}\n"
            + "".join(f"a{i}: &a{i} {{x: *a{i - 1}, y: *a{i - 1}}}\n" for i in range(1, 40)),
            "unknown key `a0`",
        ),
    ],
)
def test_file_that_is_no_recipe_is_named(tmp_path: Path, text: str, reason: str) -> None:
    with pytest.raises(RecipeError, match=reason):
        load_recipe(write(tmp_path, text))


@pytest.mark.parametrize("override", ["train.steps", "=3", "train..steps=3"])
def test_malformed_override_is_explained(tmp_path: Path, override: str) -> None:
    with pytest.raises(RecipeError, match=r"write key.sub=value"):
        load_recipe(write(tmp_path, MINIMAL), [override])


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"nothing\.yaml: No such file"):
        load_recipe(tmp_path / "nothing.yaml")


@pytest.mark.parametrize("name", ["demo.yaml", "tiny.yaml"])
def test_recipes_of_the_project_are_valid(name: str) -> None:
    load_recipe(ROOT / "recipes" / name)


def test_demo_recipe_spells_out_every_key() -> None:
    text = (ROOT / "recipes" / "demo.yaml").read_text()
    one_of_two = {"train.epochs"}
    missing = [
        key for key, _, _ in walk_keys() if key not in one_of_two and f"{key.split('.')[-1]}:" not in text
    ]
    assert missing == []


def test_documentation_is_generated_from_the_schema() -> None:
    assert (ROOT / "docs" / "recipes.md").read_text() == to_markdown(), (
        "run: python -m train.recipe --markdown > docs/recipes.md"
    )


def test_digest_ignores_what_does_not_decide_the_weights(tmp_path: Path) -> None:
    path = write(tmp_path, MINIMAL)
    base = load_recipe(path).digest
    assert load_recipe(path, ["logging.every_steps=9", "output=b"]).digest == base
    assert load_recipe(path, ["train.learning_rate=0.5"]).digest != base


@pytest.mark.parametrize("old", OLD_NAMES)
def test_name_of_another_trainer_is_refused_with_ours(tmp_path: Path, old: str) -> None:
    assert OLD_NAMES[old] in {key for key, _, _ in walk_keys()}
    with pytest.raises(RecipeError, match=rf"unknown key `train\.{old}`; here it is `{OLD_NAMES[old]}`"):
        load_recipe(write(tmp_path, MINIMAL), [f"train.{old}=1"])


def test_warm_up_may_be_a_share_of_the_steps(tmp_path: Path) -> None:
    path = write(tmp_path, MINIMAL)
    assert load_recipe(path, ["train.warmup_steps=0.1"]).train.warmup_steps == 0.1
    with pytest.raises(RecipeError, match=r"train\.warmup_steps.*less than 1"):
        load_recipe(path, ["train.warmup_steps=1.5"])
    with pytest.raises(RecipeError, match=r"a number below 1 is a share of the steps"):
        load_recipe(path, ["train.warmup_ratio=0.1"])


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (["tune.method=full", "tune.lora.r=64"], "tune.lora.r: needs tune.method=lora"),
        (["tune.method=full", "tune.lora.rslora=true"], "tune.lora.rslora: needs tune.method=lora"),
        (["tune.experts.share=0.1"], "tune.experts.share: needs tune.experts.select=hot"),
        (["tune.experts.profile_rows=1"], "tune.experts.profile_rows: needs tune.experts.select=hot"),
        (
            ["tune.experts={select: hot, profile: x, profile_rows: 3}"],
            "tune.experts.profile_rows: has no use with tune.experts.profile",
        ),
        (["model.experts_budget=6GiB"], "model.experts_budget: needs model.experts_offload=true"),
        (["hub.repo_id=x/y"], "hub.repo_id: needs hub.push=true"),
        (["hub.private=false"], "hub.private: needs hub.push=true"),
        (
            ["data.eval=null", "coop.profile.refresh_rows=0", "eval.batch_size=7"],
            "eval.batch_size: needs data.eval or data.eval_fraction",
        ),
        (
            ["data.eval=null", "coop.profile.refresh_rows=0", "data.max_eval_rows=7"],
            "data.max_eval_rows: needs data.eval or data.eval_fraction",
        ),
        (
            ["data.train={path: a.jsonl, columns: {systm: persona}}"],
            "columns.systm: not a name of ours, which are",
        ),
    ],
)
def test_key_that_cannot_be_in_force_is_refused_by_name_unless_it_has_its_default(
    tmp_path: Path, overrides: list[str], reason: str
) -> None:
    path = write(tmp_path, MINIMAL)
    with pytest.raises(RecipeError, match=re.escape(reason)):
        load_recipe(path, overrides)
    spelled = load_recipe(path, ["tune.method=full"]).to_yaml()
    assert load_recipe(write(tmp_path, spelled)).to_yaml() == spelled, "every key spelled out is no fault"
