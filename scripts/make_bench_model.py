"""Build the random mixture of experts that `infer.bench` is run on where no trained model is at hand.

Owns its sizes; promises a Hub-layout folder written layer by layer, so that it never needs the model's memory,
the same for the same torch and options. Called by hand, `python scripts/make_bench_model.py`, and by tests.
It has learned nothing, but its routing depends on the token: speed and bytes can be read from it, quality cannot.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from demo_assets import built_whole, is_built

from coop.errors import CoopError, DataError

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig

DEFAULT_OUT = Path("models/bench-moe")
MAX_TOKENS = 8192
EMBEDDING_DEVIATION = 1.0  # beside it what layers add is small, so a router sees which token it is
DEFAULT_SKEW = 0.2  # random tokens then hit an LRU of 25/50/75 % of the experts in 37/66/87 % of requests
WEIGHT_DEVIATION = 0.02
DTYPES = ("bfloat16", "float16", "float32")


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """The shape of the model. The defaults are 1.7 billion weights, 3.4 GB in bfloat16."""

    layers: int = 16
    experts: int = 64
    top_k: int = 8
    hidden: int = 1024
    expert_width: int = 512
    heads: int = 16
    kv_heads: int = 8
    head_dim: int = 64
    vocabulary: int = 32000

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if value < 1:
                raise DataError(f"--{name.replace('_', '-')} {value}: pass a number above 0")
        if self.top_k > self.experts:
            raise DataError(f"--top-k {self.top_k}: there are only {self.experts} experts in a layer")
        if self.heads % self.kv_heads:
            raise DataError(f"--kv-heads {self.kv_heads} does not divide --heads {self.heads}")


def build(
    out: Path,
    sizes: Sizes | None = None,
    *,
    seed: int = 0,
    dtype: str = "bfloat16",
    skew: float = DEFAULT_SKEW,
) -> None:
    """Write model and tokenizer to `out`, replacing what an earlier call wrote there.

    skew: share of an embedding's deviation that all tokens have in common; it makes some experts busier.
    Raises DataError when `out` holds something else, for a skew outside 0 to 1, or for a vocabulary smaller
    than the tokenizer's.
    """
    import torch
    from make_tiny_model import train_tokenizer
    from safetensors.torch import save_file
    from transformers import GenerationConfig

    sizes = sizes or Sizes()
    if not 0 <= skew < 1:
        raise DataError(f"--skew {skew}: pass a number from 0 to below 1")
    tokenizer = train_tokenizer()
    if sizes.vocabulary < len(tokenizer):
        raise DataError(f"--vocabulary {sizes.vocabulary}: the tokenizer has {len(tokenizer)} tokens")
    tokenizer.model_max_length = MAX_TOKENS
    special = {
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    generator = torch.Generator().manual_seed(seed)
    total, places = 0, {}
    with built_whole(out, options(sizes, seed, dtype, skew)) as folder:
        for number, shapes in enumerate(_shards(sizes), start=1):
            name = f"model-{number:05d}-of-{sizes.layers + 1:05d}.safetensors"
            tensors = {
                key: _weight(key, shape, generator, skew).to(getattr(torch, dtype))
                for key, shape in shapes.items()
            }
            save_file(tensors, folder / name, metadata={"format": "pt"})
            total += sum(tensor.nbytes for tensor in tensors.values())
            places |= dict.fromkeys(tensors, name)
        index = {"metadata": {"total_size": total}, "weight_map": places}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
        _config(sizes, dtype, special).save_pretrained(folder)
        GenerationConfig(**special).save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def _shards(sizes: Sizes) -> Iterator[dict[str, tuple[int, ...]]]:
    """Names and shapes of the tensors, one dictionary for each shard: what is outside the layers, then each layer."""
    yield {
        "model.embed_tokens.weight": (sizes.vocabulary, sizes.hidden),
        "model.norm.weight": (sizes.hidden,),
        "lm_head.weight": (sizes.vocabulary, sizes.hidden),
    }
    for layer in range(sizes.layers):
        yield {f"model.layers.{layer}.{name}": shape for name, shape in _layer(sizes).items()}


def _layer(sizes: Sizes) -> dict[str, tuple[int, ...]]:
    queries, keys = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (sizes.hidden,),
        "self_attn.q_proj.weight": (queries, sizes.hidden),
        "self_attn.k_proj.weight": (keys, sizes.hidden),
        "self_attn.v_proj.weight": (keys, sizes.hidden),
        "self_attn.o_proj.weight": (sizes.hidden, queries),
        "self_attn.q_norm.weight": (sizes.head_dim,),
        "self_attn.k_norm.weight": (sizes.head_dim,),
        "post_attention_layernorm.weight": (sizes.hidden,),
        "mlp.gate.weight": (sizes.experts, sizes.hidden),
    }
    for expert in range(sizes.experts):
        shapes[f"mlp.experts.{expert}.gate_proj.weight"] = (sizes.expert_width, sizes.hidden)
        shapes[f"mlp.experts.{expert}.up_proj.weight"] = (sizes.expert_width, sizes.hidden)
        shapes[f"mlp.experts.{expert}.down_proj.weight"] = (sizes.hidden, sizes.expert_width)
    return shapes


def _weight(key: str, shape: tuple[int, ...], generator: torch.Generator, skew: float) -> torch.Tensor:
    import torch

    if len(shape) == 1:
        return torch.ones(shape)
    if "embed_tokens" not in key:
        return torch.empty(shape).normal_(0.0, WEIGHT_DEVIATION, generator=generator)
    own = torch.empty(shape).normal_(0.0, EMBEDDING_DEVIATION, generator=generator)
    common = torch.empty(shape[1]).normal_(0.0, EMBEDDING_DEVIATION, generator=generator)
    return own * (1 - skew**2) ** 0.5 + common * skew


def _config(sizes: Sizes, dtype: str, special: dict[str, int | None]) -> PretrainedConfig:
    from transformers import AutoConfig

    return AutoConfig.for_model(
        "qwen3_moe",
        architectures=["Qwen3MoeForCausalLM"],
        dtype=dtype,
        vocab_size=sizes.vocabulary,
        hidden_size=sizes.hidden,
        intermediate_size=sizes.hidden * 3,  # of a dense layer, of which there are none
        moe_intermediate_size=sizes.expert_width,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.kv_heads,
        head_dim=sizes.head_dim,
        num_experts=sizes.experts,
        num_experts_per_tok=sizes.top_k,
        norm_topk_prob=True,
        max_position_embeddings=MAX_TOKENS,
        tie_word_embeddings=False,
        **special,
    )


def options(sizes: Sizes, seed: int, dtype: str, skew: float) -> dict[str, object]:
    """What the folder's contents depend on, as the marker records it."""
    return {
        "model": "bench qwen3_moe",
        "python": platform.python_version(),
        "seed": seed,
        "dtype": dtype,
        "skew": skew,
    } | asdict(sizes)


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        description="Build a random mixture-of-experts model to measure speed on (3.4 GB with the defaults)."
    )
    parser.add_argument(
        "--out", type=Path, default=DEFAULT_OUT, help="folder to build (default: %(default)s)"
    )
    for name, default in asdict(Sizes()).items():
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            type=int,
            default=default,
            metavar="N",
            help="(default: %(default)s)",
        )
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="(default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the weights (default: 0)")
    parser.add_argument(
        "--skew",
        type=float,
        default=DEFAULT_SKEW,
        help="how unevenly experts are used, from 0 (as evenly as chance) to below 1 (default: %(default)s)",
    )
    parser.add_argument("--force", action="store_true", help="build again even if the folder is complete")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Build, or say that the folder is already complete; 2 on an error that names its cause."""
    args = build_parser().parse_args(argv)
    try:
        sizes = Sizes(**{name: getattr(args, name) for name in asdict(Sizes())})
        if is_built(args.out, options(sizes, args.seed, args.dtype, args.skew)) and not args.force:
            print(f"{args.out} is complete; build it again with --force")
            return 0
        build(args.out, sizes, seed=args.seed, dtype=args.dtype, skew=args.skew)
    except CoopError as exc:
        print(f"error: {exc}", file=sys.stderr)
        return 2
    size = sum(path.stat().st_size for path in args.out.iterdir())
    print(f"{args.out} built: {sizes.layers} layers of {sizes.experts} experts, {size / 1e9:.2f} GB")
    print(f"measure it: python -m infer.bench decode --ckpt {args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
