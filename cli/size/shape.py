"""The shape of any decoder: the numbers in its config.json that determine its weights and its KV.

Fields have transformers' names: Llama's, GPT-2's `n_embd`, experts of Mixtral, Qwen and DeepSeek, and DeepSeek's latent
attention. Unlike `engine.checkpoint.config`, this module also describes models that Baton cannot serve.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.checkpoint.json_fields import JsonFields, parse_object
from text.model_file import read_regular
from wire.errors import ModelError
from wire.layout import KVLayout

BITS = {"float32": 32, "bfloat16": 16, "float16": 16, "fp8": 8, "int8": 8, "int4": 4}
MAX_CONFIG_BYTES = 1 << 20
MAX_LAYERS = 1024
_METHOD_BITS = {"fp8": BITS["fp8"], "mxfp4": BITS["int4"]}
"""Bits of methods of quantization that have no field for them."""
_SPELLINGS = {
    "hidden_size": ("n_embd", "d_model"),
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers"),
    "num_attention_heads": ("n_head", "n_heads"),
    "num_key_value_heads": ("num_kv_heads", "n_head_kv"),
    "intermediate_size": ("n_inner", "ffn_dim", "ffn_hidden_size"),
    "max_position_embeddings": ("n_positions", "n_ctx", "max_seq_len", "seq_length"),
    "num_local_experts": ("num_experts", "n_routed_experts"),
    "dtype": ("torch_dtype",),
}
_PLAIN = ("gpt2", "gpt_bigcode", "gpt_neox", "gptj", "opt", "bloom", "phi", "falcon", "starcoder2")
"""Families with two matrices in an MLP, with biases; other families have a gate, too."""
_POSITIONS = ("gpt2", "gpt_bigcode", "opt")
"""Families with a learned vector for each position."""
_OWN_KV_HEADS = ("llama", *_PLAIN)
"""Families in which a config.json without `num_key_value_heads` means a KV head for each query head."""
_ATTENTION = ("full_attention", "sliding_attention", "chunked_attention")


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """A decoder in numbers. `num_matrix_parameters`: parameters that quantization makes smaller.

    cached_values: numbers that a layer keeps for a token, keys and values together. weight_bits: bits of a matrix's
    number. window: tokens that some layers see. kept_window: tokens kept if all layers have a window.
    """

    family: str
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_context_len: int
    window: int | None
    kept_window: int | None
    dtype: str
    num_parameters: int
    num_matrix_parameters: int
    weight_bits: int
    cached_values: int

    @property
    def is_latent(self) -> bool:
        """Whether a layer keeps a latent vector for a token in place of keys and values."""
        return self.cached_values != 2 * self.num_kv_heads * self.head_dim

    def weight_bytes(self, matrix_bits: int | None = None) -> int:
        """Bytes of all parameters; matrices count `weight_bits`."""
        others = (self.num_parameters - self.num_matrix_parameters) * BITS[self.dtype]
        return (others + self.num_matrix_parameters * (matrix_bits or self.weight_bits)) // 8

    def kv_layout(self, block_size: int) -> KVLayout:
        """Describes a block in the model's dtype; a latent vector counts as key and value of half its length."""
        if self.is_latent:
            return KVLayout(self.num_layers, 1, self.cached_values // 2, block_size, self.dtype)
        window = self.kept_window
        return KVLayout(self.num_layers, self.num_kv_heads, self.head_dim, block_size, self.dtype, window=window)

    @classmethod
    def read(cls, path: Path) -> "ModelShape":
        """Reads a config.json, given or in a folder. Raises ModelError, which names a wrong field."""
        file = path / "config.json" if path.is_dir() else path
        return cls.parse(parse_object(read_regular(file, MAX_CONFIG_BYTES), "config.json"))

    @classmethod
    def parse(cls, config: Mapping[str, Any]) -> "ModelShape":
        """Parses the object in config.json; for a multimodal model its part for text."""
        text = config.get("text_config")
        fields = _Fields({**config, **text} if isinstance(text, dict) else config)
        if fields.flag("is_encoder_decoder", False):
            raise fields.wrong("is_encoder_decoder", "false: Baton serves decoders only")
        family = fields.text("model_type", "llama")
        num_layers = fields.count("num_hidden_layers", most=MAX_LAYERS)
        _check_layer_types(fields, num_layers)
        attention = _Attention.parse(family, fields)
        dtype = fields.text("dtype", "float32").removeprefix("torch.")
        if dtype not in ("float32", "bfloat16", "float16"):
            raise fields.wrong("dtype", "float32 or bfloat16 or float16")
        matrices = num_layers * attention.num_parameters + _mlp_parameters(family, fields, num_layers)
        return cls(
            family=family,
            num_layers=num_layers,
            num_heads=attention.num_heads,
            num_kv_heads=attention.num_kv_heads,
            head_dim=attention.head_dim,
            max_context_len=fields.count("max_position_embeddings"),
            window=_window(fields),
            kept_window=_window(fields) if _all_slide(family, fields) else None,
            dtype=dtype,
            num_parameters=matrices + _other_parameters(family, fields, num_layers, attention),
            num_matrix_parameters=matrices,
            weight_bits=_weight_bits(fields, dtype),
            cached_values=attention.cached_values,
        )


class _Fields(JsonFields):
    """Fields under any of their spellings; errors name config.json's spelling."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        """Raises ModelError if two spellings of a field have different values."""
        self._given = JsonFields(values, "config.json")
        self._spelled: dict[str, str] = {}
        for name, others in _SPELLINGS.items():
            spellings = [one for one in (name, *others) if one in self._given]
            if any(values[one] != values[spellings[0]] for one in spellings):
                raise ModelError(f"config.json: {' and '.join(spellings)} are names of one field, and differ")
            if spellings:
                self._spelled[name] = spellings[0]
        super().__init__({**values, **{name: values[one] for name, one in self._spelled.items()}}, "config.json")

    def wrong(self, name: str, expected: str) -> ModelError:
        return self._given.wrong(self._spelled.get(name, name), expected)


@dataclass(frozen=True)
class _Attention:
    """Attention of a layer. `num_parameters`: numbers in its matrices."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    cached_values: int
    num_parameters: int

    @classmethod
    def parse(cls, family: str, fields: JsonFields) -> "_Attention":
        hidden, num_heads = fields.count("hidden_size"), fields.count("num_attention_heads")
        if "kv_lora_rank" in fields:
            return cls._latent(fields, hidden, num_heads)
        if "head_dim" not in fields and hidden % num_heads:
            raise fields.wrong("num_attention_heads", f"a divisor of {hidden}, the hidden size, without head_dim")
        head_dim = fields.count("head_dim", hidden // num_heads)
        has_one = fields.flag("multi_query", False) and not fields.flag("new_decoder_architecture", False)
        default = num_heads if family in _OWN_KV_HEADS else None
        num_kv_heads = 1 if has_one else fields.count("num_key_value_heads", default)
        if num_heads % num_kv_heads:
            raise fields.wrong("num_key_value_heads", f"a divisor of {num_heads} attention heads")
        sizes = 2 * (num_heads + num_kv_heads) * head_dim
        return cls(num_heads, num_kv_heads, head_dim, 2 * num_kv_heads * head_dim, hidden * sizes)

    @classmethod
    def _latent(cls, fields: JsonFields, hidden: int, num_heads: int) -> "_Attention":
        """Parses DeepSeek's latent attention. Source: DeepSeek-V2, arXiv 2405.04434."""
        rank, rotated = fields.count("kv_lora_rank"), fields.count("qk_rope_head_dim")
        plain, value = fields.count("qk_nope_head_dim"), fields.count("v_head_dim")
        if (rank + rotated) % 2:
            raise fields.wrong("kv_lora_rank", "an even number, as qk_rope_head_dim")
        queries = num_heads * (plain + rotated)
        query_rank = fields.count("q_lora_rank") if "q_lora_rank" in fields else 0
        query = query_rank * (hidden + queries) if query_rank else hidden * queries
        keys_and_values = hidden * (rank + rotated) + rank * num_heads * (plain + value)
        output = num_heads * value * hidden
        return cls(num_heads, num_heads, plain + rotated, rank + rotated, query + keys_and_values + output)


def _mlp_parameters(family: str, fields: JsonFields, num_layers: int) -> int:
    """Counts the parameters of all MLPs' matrices, experts included."""
    hidden = fields.count("hidden_size")
    width = fields.count("intermediate_size", 4 * hidden if family in _PLAIN else None)
    dense = (2 if family in _PLAIN else 3) * hidden * width
    if "num_local_experts" not in fields:
        return num_layers * dense
    num_experts = fields.count("num_local_experts")
    fields.count("num_experts_per_tok", num_experts, num_experts)
    expert = 3 * hidden * fields.count("moe_intermediate_size", width)
    shared = fields.count("n_shared_experts", 0, least=0) * expert
    shared += 3 * hidden * fields.count("shared_expert_intermediate_size", 0, least=0)
    num_dense = fields.count("first_k_dense_replace", len(_list(fields, "mlp_only_layers")), num_layers, 0)
    return num_dense * dense + (num_layers - num_dense) * (num_experts * (expert + hidden) + shared)


def _other_parameters(family: str, fields: JsonFields, num_layers: int, attention: _Attention) -> int:
    """Counts embeddings, head, norms and biases."""
    hidden, vocab_size = fields.count("hidden_size"), fields.count("vocab_size")
    is_plain = family in _PLAIN
    is_tied = fields.flag("tie_word_embeddings", (is_plain and family != "gpt_neox") or family.startswith("gemma"))
    positions = fields.count("max_position_embeddings") * hidden if family in _POSITIONS else 0
    norm = 2 * hidden if is_plain else hidden
    qkv = (attention.num_heads + 2 * attention.num_kv_heads) * attention.head_dim
    biases = 0
    if is_plain and fields.flag("bias", True):
        biases = qkv + 2 * hidden + fields.count("intermediate_size", 4 * hidden)
    elif family.startswith("qwen2"):
        biases = qkv
    elif fields.flag("attention_bias", False):
        biases = qkv + hidden
    if family == "gpt_oss":
        width, num_experts = fields.count("intermediate_size"), fields.count("num_local_experts")
        biases += num_experts * (2 * width + hidden + 1) + attention.num_heads
    head_norms = 2 * attention.head_dim if family.startswith("qwen3") else 0
    return (
        (1 if is_tied else 2) * vocab_size * hidden + positions + num_layers * (2 * norm + biases + head_norms) + norm
    )


def _weight_bits(fields: JsonFields, dtype: str) -> int:
    """Reads the bits of a matrix's number: the dtype's, or fewer for quantized weights."""
    if "quantization_config" not in fields:
        return BITS[dtype]
    quantization = fields.section("quantization_config")
    method = quantization.text("quant_method", "")
    if method in _METHOD_BITS:
        return _METHOD_BITS[method]
    groups = quantization.section("config_groups")
    if bits := [
        groups.section(name).section("weights").count("num_bits", most=BITS[dtype]) for name, _ in groups.items()
    ]:
        return max(bits)
    return quantization.count("bits", most=BITS[dtype])


def _window(fields: JsonFields) -> int | None:
    is_off = "sliding_window" not in fields or not fields.flag("use_sliding_window", True)
    return None if is_off else fields.count("sliding_window")


def _all_slide(family: str, fields: JsonFields) -> bool:
    """Tells whether each layer has the window, if there is one."""
    types = _list(fields, "layer_types")
    if types:
        return all(one == "sliding_attention" for one in types)
    if "max_window_layers" in fields:
        return bool(fields.raw("max_window_layers") == 0)
    return family in ("mistral", "mixtral")


def _check_layer_types(fields: JsonFields, num_layers: int) -> None:
    types = _list(fields, "layer_types")
    if types and (len(types) != num_layers or any(one not in _ATTENTION for one in types)):
        raise fields.wrong("layer_types", f"one of {', '.join(_ATTENTION)} for each of {num_layers} layers")


def _list(fields: JsonFields, name: str) -> list[Any]:
    value = fields.raw(name)
    if value is not None and not isinstance(value, list):
        raise fields.wrong(name, "a list")
    return value or []
