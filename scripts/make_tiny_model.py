"""Build a tiny random mixture of experts with a chat tokenizer, for smoke tests of every command.

Owns its sizes; promises a Hub-layout folder in seconds, without a download, the same for the same Python and
seed. Called by hand, `python scripts/make_tiny_model.py [--out models/tiny-moe]`, and by tests through `build`.
It has learned nothing: nothing about quality or locality can be read from it.
"""

from __future__ import annotations

import argparse
import platform
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from demo_assets import built_whole, is_built, library_modules

from coop.errors import CoopError, DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

DEFAULT_OUT = Path("models/tiny-moe")
VOCABULARY = 1024
MAX_TOKENS = 2048
TRAINING_MODULES = 60
WEIGHT_DEVIATION = (
    0.2  # ten times the usual: routing must depend on the token, and experts must differ visibly
)
END, PAD, START = "<|im_end|>", "<|pad|>", "<|im_start|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
COMMON: dict[str, object] = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "max_position_embeddings": MAX_TOKENS,
    "tie_word_embeddings": False,
}
FAMILIES: dict[str, dict[str, object]] = {
    "mixtral": {"num_local_experts": 8, "intermediate_size": 32, "head_dim": 16},
    "olmoe": {"num_experts": 8, "intermediate_size": 32},
    "qwen3_moe": {"num_experts": 8, "moe_intermediate_size": 32, "head_dim": 16, "norm_topk_prob": True},
}


def build(out: Path, family: str = "qwen3_moe", seed: int = 0) -> None:
    """Write model and tokenizer to `out`, replacing what an earlier call wrote there.

    Raises DataError for a family not in FAMILIES, or when `out` holds something else.
    """
    if family not in FAMILIES:
        raise DataError(f"family {family!r} is not one of {', '.join(FAMILIES)}")
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    tokenizer = train_tokenizer()
    special = {
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    config = AutoConfig.for_model(family, vocab_size=len(tokenizer), **special, **COMMON, **FAMILIES[family])
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):  # the caller's random state is not ours to move
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:  # norms keep their ones
                weight.normal_(0.0, WEIGHT_DEVIATION, generator=generator)
    model.generation_config = GenerationConfig(**special)
    with built_whole(out, options(family, seed)) as folder:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def train_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of VOCABULARY tokens, trained on sources of the standard library, for ChatML."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[PAD, START, END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(_training_texts(), trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        eos_token=END,
        additional_special_tokens=[START],
        model_max_length=MAX_TOKENS,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def _training_texts() -> Iterator[str]:
    for path in list(library_modules().values())[:TRAINING_MODULES]:
        yield path.read_text(encoding="utf-8", errors="replace")


def options(family: str, seed: int) -> dict[str, object]:
    """What the folder's contents depend on, as the marker records it."""
    return {"model": f"tiny {family}", "python": platform.python_version(), "seed": seed}


def main(argv: Sequence[str] | None = None) -> int:
    """Build, or say that the folder is already complete; 2 on an error that names its cause."""
    parser = argparse.ArgumentParser(
        description="Build a tiny random mixture-of-experts model for smoke tests."
    )
    parser.add_argument(
        "--out", type=Path, default=DEFAULT_OUT, help="folder to build (default: %(default)s)"
    )
    parser.add_argument(
        "--family", choices=sorted(FAMILIES), default="qwen3_moe", help="(default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the weights (default: 0)")
    parser.add_argument("--force", action="store_true", help="build again even if the folder is complete")
    args = parser.parse_args(argv)
    if is_built(args.out, options(args.family, args.seed)) and not args.force:
        print(f"{args.out} is complete; build it again with --force")
        return 0
    try:
        build(args.out, args.family, args.seed)
    except CoopError as exc:
        print(f"error: {exc}", file=sys.stderr)
        return 2
    size = sum(path.stat().st_size for path in args.out.iterdir())
    print(f"{args.out} built: {args.family}, {size / 2**20:.1f} MiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
