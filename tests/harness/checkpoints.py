"""Tiny random checkpoints of every architecture, and what transformers generates from them.

Weights are drawn with a standard deviation of 0.15: with transformers' default of 0.02 greedy output hardly depends on
the KV, and a test on it proves nothing. (Of 78 blocks zeroed one by one, all changed the next 64 tokens at 0.15, 76 at
0.1.) Prompts are chosen so that the two best logits are well apart at every step: then the order in which floats are
added cannot decide a token.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers
from tokenizers import decoders, models, pre_tokenizers
from torch import Tensor

from wire.kv_policy import Sinks, parse_kv_policy

VOCAB_SIZE = 256
MIN_VARIETY = 6

SHAPE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "initializer_range": 0.15,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def _rope(**parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_theta": 10_000.0, **parameters}}


ARCHITECTURES: dict[str, tuple[type[transformers.PreTrainedConfig], dict[str, Any]]] = {
    "llama-mha": (transformers.LlamaConfig, {"num_key_value_heads": 4, "attention_bias": True, "mlp_bias": True}),
    "llama-gqa": (transformers.LlamaConfig, {}),
    "llama-mqa": (transformers.LlamaConfig, {"num_key_value_heads": 1, "head_dim": 32}),
    "llama-tied": (transformers.LlamaConfig, {"tie_word_embeddings": True}),
    "llama-linear": (transformers.LlamaConfig, _rope(rope_type="linear", factor=4.0)),
    "llama-llama3": (
        transformers.LlamaConfig,
        _rope(
            rope_type="llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=128,
        ),
    ),
    "llama-yarn": (
        transformers.LlamaConfig,
        _rope(rope_type="yarn", factor=4.0, original_max_position_embeddings=256),
    ),
    "mistral-window": (transformers.MistralConfig, {"sliding_window": 64}),
    "qwen2": (
        transformers.Qwen2Config,
        {"use_sliding_window": True, "sliding_window": 48, "max_window_layers": 1},
    ),
    "qwen3": (transformers.Qwen3Config, {"head_dim": 32}),
    "granite": (
        transformers.GraniteConfig,
        {
            "embedding_multiplier": 2.5,
            "attention_multiplier": 0.3,
            "residual_multiplier": 0.7,
            "logits_scaling": 1.5,
        },
    ),
    "smollm3": (transformers.SmolLM3Config, {"num_hidden_layers": 4, "no_rope_layer_interval": 2}),
    "olmo2": (transformers.Olmo2Config, {}),
    "olmo3": (
        transformers.Olmo3Config,
        {
            "num_hidden_layers": 4,
            "sliding_window": 48,
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "yarn",
                    "rope_theta": 10_000.0,
                    "factor": 4.0,
                    "original_max_position_embeddings": 256,
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            },
        },
    ),
    "glm4": (transformers.Glm4Config, {"head_dim": 32, "partial_rotary_factor": 0.5}),
    "gemma2": (
        transformers.Gemma2Config,
        {
            "head_dim": 32,
            "sliding_window": 48,
            "query_pre_attn_scalar": 24,
            "attn_logit_softcapping": 5.0,
            "tie_word_embeddings": False,
        },
    ),
    "gemma3": (
        transformers.Gemma3TextConfig,
        {
            "head_dim": 32,
            "sliding_window": 48,
            "sliding_window_pattern": 2,
            "query_pre_attn_scalar": 24,
            "tie_word_embeddings": False,
        },
    ),
    "phi3": (transformers.Phi3Config, {"sliding_window": 64}),
    "phi3-part": (
        transformers.Phi3Config,
        {
            "max_position_embeddings": 2048,
            "original_max_position_embeddings": 1024,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10_000.0,
                "partial_rotary_factor": 0.75,
                "short_factor": [1.0, 1.25, 1.5, 2.0, 2.5, 3.0],
                "long_factor": [4.0] * 6,
            },
        },
    ),
    "mixtral": (transformers.MixtralConfig, {"num_local_experts": 6, "num_experts_per_tok": 2}),
    "qwen3-moe": (
        transformers.Qwen3MoeConfig,
        {
            "head_dim": 32,
            "num_hidden_layers": 3,
            "mlp_only_layers": [1],
            "num_experts": 9,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 64,
            "norm_topk_prob": False,
        },
    ),
    "qwen3-moe-step": (
        transformers.Qwen3MoeConfig,
        {
            "decoder_sparse_step": 2,
            "num_experts": 8,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 32,
            "norm_topk_prob": True,
        },
    ),
    "gpt-oss": (
        transformers.GptOssConfig,
        {
            "head_dim": 32,
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
            "sliding_window": 48,
            **_rope(rope_type="yarn", factor=4.0, original_max_position_embeddings=256, truncate=False),
        },
    ),
}


_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
MODULES: dict[str, tuple[type[transformers.PreTrainedConfig], dict[str, Any]]] = {
    "cohere": (transformers.CohereConfig, {}),
    "cohere2": (transformers.Cohere2Config, {"num_hidden_layers": 4, "sliding_window": 48}),
    "gpt2": (transformers.GPT2Config, {}),
    "gpt-bigcode": (transformers.GPTBigCodeConfig, {}),
    "gpt-neox": (transformers.GPTNeoXConfig, {}),
    "nemotron": (transformers.NemotronConfig, {}),
    "olmo": (transformers.OlmoConfig, {}),
    "olmoe": (transformers.OlmoeConfig, _EXPERTS),
    "opt": (transformers.OPTConfig, {"ffn_dim": 128}),
    "persimmon": (transformers.PersimmonConfig, {}),
    "phi": (transformers.PhiConfig, {}),
    "stablelm": (transformers.StableLmConfig, {}),
    "starcoder2": (transformers.Starcoder2Config, {"sliding_window": 48}),
}
"""Architectures that the modules of transformers run."""


SINKS = (("llama-gqa", "sinks=4+60"), ("llama-yarn", "sinks=1+16"), ("qwen3", "sinks=20+44"))
"""Architectures, and KV policies to serve them with."""


@dataclass(frozen=True)
class Continuation:
    """A prompt, what transformers generates greedily after it, and the least gap of the two best logits."""

    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    min_gap: float

    @property
    def variety(self) -> int:
        """Different tokens of the continuation."""
        return len(set(self.token_ids))


def make_checkpoint(arch: str, folder: Path, seed: int = 0, **overrides: Any) -> Path:
    """Writes a float32 checkpoint with a byte-level tokenizer into `folder`, which it returns.

    overrides: keys of the architecture's configuration.
    """
    config_class, settings = (ARCHITECTURES | MODULES)[arch]
    fields = {**SHAPE, **settings, **overrides}
    config = config_class(**fields)
    config.eos_token_id = fields["eos_token_id"]  # some classes have a token of their own in place of none
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for name, parameter in model.named_parameters():
        if name.endswith((".bias", "_bias", "norm.weight")):
            # Zeros and ones, which they start as, would hide that they are used at all.
            torch.nn.init.normal_(parameter, mean=parameter.mean().item(), std=0.05)
    model.save_pretrained(folder)
    byte_level_tokenizer().save(str(folder / "tokenizer.json"))
    return folder


def shard(folder: Path, sharded: Path, max_shard_size: str = "100KB") -> Path:
    """A copy of a checkpoint in several weight files."""
    _model(folder).save_pretrained(sharded, max_shard_size=max_shard_size)
    (sharded / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    return sharded


def byte_level_tokenizer(vocab_size: int = VOCAB_SIZE) -> tokenizers.Tokenizer:
    """A token for each byte; the others, which have a text too, are in no prompt."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*alphabet, *(f"w{index}" for index in range(len(alphabet), vocab_size))]
    tokenizer = tokenizers.Tokenizer(models.BPE({word: index for index, word in enumerate(words)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def oracle_generate(
    folder: Path, prompts: Sequence[Sequence[int]], num_tokens: int, kv_policy: str = "full"
) -> list[Continuation]:
    """What transformers generates greedily from prompts of one length, whatever end-of-text tokens come up."""
    prompt_ids = torch.tensor(prompts)
    output = _model(folder, kv_policy).generate(
        prompt_ids,
        attention_mask=torch.ones_like(prompt_ids),
        max_new_tokens=num_tokens,
        min_new_tokens=num_tokens,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    best = torch.stack(output.logits).topk(2, dim=-1).values
    gaps = (best[..., 0] - best[..., 1]).amin(dim=0)
    generated = output.sequences[:, prompt_ids.shape[1] :].tolist()
    rows = zip(prompts, generated, gaps.tolist(), strict=True)
    return [Continuation(tuple(prompt), tuple(token_ids), gap) for prompt, token_ids, gap in rows]


def oracle_logits(folder: Path, token_ids: Sequence[int], kv_policy: str = "full") -> Tensor:
    """What transformers says to each token, [len(token_ids), VOCAB_SIZE]."""
    with torch.inference_mode():
        logits: Tensor = _model(folder, kv_policy)(torch.tensor([token_ids])).logits[0]
    return logits


@functools.cache
def choose_prompt(
    folder: Path, length: int, num_tokens: int = 64, min_gap: float = 1e-3, seed: int = 0, kv_policy: str = "full"
) -> Continuation:
    """A random prompt of that length whose continuation leaves nothing to rounding and is no mere repetition."""
    generator = torch.Generator().manual_seed(seed * 10_000 + length)
    for _ in range(20):
        candidates = torch.randint(VOCAB_SIZE, (4, length), generator=generator).tolist()
        generated = oracle_generate(folder, candidates, num_tokens, kv_policy)
        best = max(generated, key=lambda one: (one.min_gap >= min_gap, one.variety))
        if best.min_gap >= min_gap and best.variety >= min(MIN_VARIETY, num_tokens):
            return best
    raise AssertionError(f"no prompt of {length} tokens has a top-2 gap of {min_gap} at every step")


@functools.cache
def _model(folder: Path, kv_policy: str = "full") -> Any:
    # Any: `generate` is declared for a protocol that is not what any class of transformers' declares of itself.
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    sinks = parse_kv_policy(kv_policy)
    if isinstance(sinks, Sinks):
        name = f"{sinks} of {folder}"
        transformers.AttentionInterface.register(name, _attention_with(sinks, model.model.rotary_emb.inv_freq.double()))
        model.set_attn_implementation(name)
    return model


def _attention_with(sinks: Sinks, frequencies: torch.Tensor) -> Callable[..., Any]:
    """Dense attention with the rule of StreamingLLM (arXiv 2309.17453) for each row, over all keys.

    Keys are rotated by their positions; a query is turned back to where it stands in the cache before it meets sinks.
    """

    def attend(_: Any, query: Tensor, key: Tensor, value: Tensor, *__: Any, scaling: float, **___: Any) -> Any:
        num_keys, group_size = key.shape[2], query.shape[1] // key.shape[1]
        keys, values = (one.double().repeat_interleave(group_size, 1) for one in (key, value))
        rows, columns = torch.arange(num_keys - query.shape[2], num_keys)[:, None], torch.arange(num_keys)
        turns = (rows - rows.clamp(max=sinks.num_sinks + sinks.window - 1)) * frequencies
        first, second = query.double().chunk(2, dim=-1)
        turned = torch.cat([first * turns.cos() + second * turns.sin(), second * turns.cos() - first * turns.sin()], -1)
        is_sink, is_near = columns < sinks.num_sinks, columns > rows - sinks.window
        scores = torch.where(is_near, query.double() @ keys.mT, turned @ keys.mT) * scaling
        seen = (columns <= rows) & (is_sink | is_near)
        attended = scores.masked_fill(~seen, -torch.inf).softmax(-1) @ values
        return attended.transpose(1, 2).to(query.dtype), None

    return attend
