"""Card: the README.md of a result, with the hub's front matter and only facts of its own run.

Owns the words; promises that every number comes from the run's summary or profile and that a licence is named only if
the base model's card names it. `train.run` writes it.
"""

from __future__ import annotations

import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml

from coop.profile import Profile
from train.plain_yaml import PlainLoader
from train.schema import Recipe

LIBRARIES = ("torch", "transformers", "peft", "trl", "accelerate", "safetensors")
MAX_CARD_BYTES = 2**20


def render_card(
    recipe: Recipe, summary: dict[str, Any], profile: Profile | None, is_adapter: bool, name: str
) -> str:
    """The card of an adapter, or of a whole model; `name` is what the folder or repository is called."""
    what = "LoRA adapter for" if is_adapter else "fine-tuned from"
    parts = [
        _front_matter(recipe, is_adapter),
        f"# {name}\n\nA mixture-of-experts model, {what} `{recipe.model.path}`, made with coop. `recipe.yaml` is "
        "the whole recipe.",
        "## Training\n\n" + "\n".join(f"- {fact}" for fact in _training_facts(recipe, summary)),
        "![loss and expert use](report.png)",
    ]
    if profile is not None:
        parts.append("## Experts\n\n" + "\n".join(f"- {fact}" for fact in _expert_facts(summary, profile)))
    parts += [_how_to_run(recipe, is_adapter, profile is not None), f"## Versions\n\n{_versions()}"]
    return "\n\n".join(parts) + "\n"


def _front_matter(recipe: Recipe, is_adapter: bool) -> str:
    keys = {
        "base_model": recipe.model.path,
        "library_name": "peft" if is_adapter else "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["coop", "mixture-of-experts", "sft", *(["lora"] if is_adapter else [])],
        **base_licence(recipe.model.path),
    }
    return "---\n" + yaml.safe_dump(keys, sort_keys=False) + "---"


def base_licence(path: str) -> dict[str, str]:
    """What the base model's own card says of its licence; nothing if it says nothing, or is not here."""
    card = Path(path) / "README.md"
    if not card.is_file() or card.stat().st_size > MAX_CARD_BYTES:
        return {}
    text = card.read_text("utf-8", errors="replace")
    if not text.startswith("---\n"):
        return {}
    try:
        keys = yaml.load(text[4:].partition("\n---")[0], PlainLoader)
    except (yaml.YAMLError, ValueError, RecursionError):
        return {}
    names = ("license", "license_name", "license_link")
    found = keys if isinstance(keys, dict) else {}
    return {name: found[name] for name in names if isinstance(found.get(name), str)}


def _training_facts(recipe: Recipe, summary: dict[str, Any]) -> list[str]:
    tune, train = recipe.tune, recipe.train
    method = f"LoRA (r {tune.lora.r}, alpha {tune.lora.alpha})" if tune.method == "lora" else "full tuning"
    router = "trained" if "router" in tune.groups else "frozen"
    coefficient = recipe.moe.aux_loss_coef
    aux = (
        "as the base model's config says"
        if coefficient is None
        else f"{coefficient:g}"
        if coefficient
        else "off"
    )
    but = f", but not {', '.join(tune.freeze)}" if tune.freeze else ""
    facts = [
        f"{method} of {', '.join(tune.groups)}{but}; router {router}; load-balancing loss: {aux}",
        *([summary["experts_trained"]] if "experts_trained" in summary else []),
        f"{summary['steps']} steps of {train.batch_size} x {train.grad_accumulation} rows on each device, "
        f"{train.schedule} from {train.learning_rate:g}, in {recipe.model.dtype}, seed {train.seed}",
        f"data: `{recipe.data.train_names}`, loss on {recipe.data.trained_part}",
        f"training loss {summary['train_loss_first']:.4f} at first, {summary['train_loss_last']:.4f} at last",
    ]
    if summary["eval_loss_before"] is not None:
        of = f" (the best, of step {summary['best_step']})" if "best_step" in summary else ""
        facts.append(
            f"loss on `{recipe.data.eval_names}`: {summary['eval_loss_before']:.4f} before, "
            f"{summary['eval_loss_after']:.4f} after{of}"
        )
    return facts


def _expert_facts(summary: dict[str, Any], profile: Profile) -> list[str]:
    final = summary["final"]
    source = "held-out rows through the final weights" if profile.is_refreshed else "the training itself"
    timings = (
        f"timings of experts on {platform.machine()}, torch {version('torch')} (machine {profile.fingerprint}), "
        f"{profile.warmup_seconds:.1f} s of warm-up; elsewhere coop measures anew"
        if profile.warmup_seconds
        else "no timings of experts"
    )
    balance = (
        f"the busiest expert of a layer takes {final['final/busiest_over_mean']:.2f} x the mean at most, "
        f"{final['final/dead']:.0f} are never used, and the hottest half takes "
        f"{100 * final['final/hottest_half_share']:.1f}% of the uses"
        if "final/dead" in final
        else "no token was counted"
    )
    return [
        balance,
        f"`coop_profile.safetensors`: counts of {profile.tokens_prompt:,} prompt and {profile.tokens_answer:,} answer "
        f"tokens from {source}, and of {profile.train_tokens_prompt + profile.train_tokens_answer:,} tokens of "
        f"training up to step {profile.step}",
        timings,
    ]


def _how_to_run(recipe: Recipe, is_adapter: bool, has_profile: bool) -> str:
    folder = "THIS_FOLDER"
    lines = [
        "## Use",
        "",
        "With half of the experts in memory:",
        "",
        "```bash",
        f'python -m infer.generate --ckpt {folder} --budget 50% --prompt "..."',
        "```",
        "",
        "Without coop:",
        "",
        "```python",
    ]
    if is_adapter:
        lines += ["from peft import AutoPeftModelForCausalLM as Model"]
    else:
        lines += ["from transformers import AutoModelForCausalLM as Model"]
    lines += [f'model = Model.from_pretrained("{folder}")', "```"]
    if has_profile:
        lines += ["", "The profile is a hint: without it coop starts cold and says the same."]
    return "\n".join(lines)


def _versions() -> str:
    return ", ".join(f"{name} {version(name)}" for name in LIBRARIES)
