"""A model of transformers: made of config.json, looked at in a dry run, filled with tensors. No other file imports it.

Made by transformers' classes alone: `auto_map` is not read, and no code comes from a checkpoint. What may not be served
is refused before any weight is read, with its reason.
"""

import inspect
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from torch import nn
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.pytorch_utils import Conv1D

from engine.checkpoint.config import MAX_LAYERS, AttentionShape, ServedConfig, parse_dtype, parse_eos
from engine.checkpoint.families.family import FULL, SLIDING, Windows
from engine.checkpoint.json_fields import JsonFields
from engine.checkpoint.modules.trace import ATTENTION, Call, Trace, attend, refuse
from engine.checkpoint.rope import MAX_CONTEXT, MIN_CONTEXT
from wire.errors import ModelError

UNREAD = (
    "auto_map",
    "quantization_config",
    "fusion_config",
    "attn_implementation",
    "_attn_implementation",
    "dtype",
    "torch_dtype",
    "num_labels",
)
"""Fields of config.json that choose code or numbers which are ours to choose, or the classes of a classifier."""
DECODERS = ("ForCausalLM", "LMHeadModel")
REASONS = {
    "bloom": "its positions are biases of scores (ALiBi)",
    "mpt": "its positions are biases of scores (ALiBi)",
    "falcon": "its code has attention of its own, not transformers' attention interface",
}
"""Reasons by `model_type` where the code would fail with less clear ones."""
NO_KV = "state that is not KV (docs/models-beyond-kv.md)"
DRY_TOKENS = 5
_EXPERT = re.compile(r"(.+\.experts\.)(\d{1,9})(\..+)", re.ASCII)

transformers.AttentionInterface.register(ATTENTION, attend)
transformers.logging.disable_progress_bar()
transformers.logging.set_verbosity_error()  # what is wrong is raised


class Outline:
    """A model without weights, and the calls of its attention in a dry run."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        """Takes the object in config.json. Raises ModelError, with the reason, for a model that cannot be served."""
        fields = JsonFields(values, "config.json")
        self._type, self._says_tied = fields.text("model_type", "unknown"), values.get("tie_word_embeddings") is True
        with self.refusing():
            self._config = _parse(self._type, fields)
            with torch.device("meta"):
                self.model: nn.Module = transformers.AutoModelForCausalLM.from_config(
                    self._config, attn_implementation=ATTENTION
                ).eval()
            _require_class(self.model, fields)
            _refuse_other_state(self.model, self._config)
            calls, logits = dry_run(self.model)
            windows = _windows(calls, self._config)
        heads, vocab_size = calls[0].heads, logits.shape[-1]
        self.config = ServedConfig(
            architecture=type(self.model).__name__,
            vocab_size=vocab_size,
            num_layers=len(calls),
            max_context_len=_count(self._config, "max_position_embeddings", MAX_CONTEXT, MIN_CONTEXT),
            dtype=parse_dtype(fields),
            eos_token_ids=parse_eos(fields, vocab_size),
            attention=AttentionShape(
                num_heads=heads.num_queries, num_kv_heads=heads.num_kv, head_dim=heads.size, windows=windows
            ),
        )

    def fill(self, tensors: dict[str, torch.Tensor], dtype: torch.dtype) -> nn.Module:
        """Makes the model with tensors in host memory. Raises ModelError for missing, wrong or unknown tensors."""
        self._config._experts_implementation = "eager"
        made: Any = type(self.model)
        _require_all_experts(tensors)
        with self.refusing():
            model, info = made.from_pretrained(
                None,
                config=self._config,
                state_dict=tensors,
                dtype=dtype,
                attn_implementation=ATTENTION,
                output_loading_info=True,
                ignore_mismatched_sizes=True,
            )
        for kind, problem in (
            ("missing", "lack"),
            ("mismatched", "have another shape of"),
            ("unexpected", "may not have"),
        ):
            if found := info[f"{kind}_keys"]:
                raise ModelError(f"the weights {problem} {str(min(found))[:256]}, by config.json")
        outlined: Any = self.model
        untied = {*outlined.all_tied_weights_keys} - {*model.all_tied_weights_keys}  # transformers warns, and serves it
        if untied and self._says_tied:
            raise ModelError(f"config.json: tie_word_embeddings is true, and {min(untied)} differs from the embeddings")
        filled: nn.Module = model.eval()
        return filled

    @contextmanager
    def refusing(self) -> Iterator[None]:
        """Makes ModelError, in one sentence, of any failure of transformers' code, which may raise anything."""
        name = f"architecture {self._type[:64]} is not supported"
        try:
            yield
        except ModelError as error:
            raise ModelError(f"{name}: {error.message}") from error
        except Exception as error:
            reason = " ".join(str(error).split())[:200] or type(error).__name__
            raise ModelError(f"{name}: transformers {transformers.__version__} cannot run it: {reason}") from error


def _parse(model_type: str, fields: JsonFields) -> Any:
    """Makes transformers' configuration. Raises ModelError for a kind of model that is not served."""
    if model_type not in transformers.CONFIG_MAPPING:
        code = ", and code of its own (auto_map) is never run" if "auto_map" in fields else ""
        raise ModelError(f"transformers {transformers.__version__} does not know it{code}")
    kind = transformers.CONFIG_MAPPING[model_type]
    for name in {"num_hidden_layers", kind.attribute_map.get("num_hidden_layers", "num_hidden_layers")}:
        fields.count(name, 1, MAX_LAYERS)  # before transformers lists the layers
    config = kind.from_dict({name: one for name, one in fields.items() if name not in UNREAD})
    parts, rope = sorted({*kind.sub_configs} - {"text_config"}), str(getattr(config, "rope_parameters", None))
    architecture = str((fields.raw("architectures") or DECODERS)[0])[:64]
    refuse(
        {
            "it has an encoder": config.is_encoder_decoder,
            f"it has parts besides text ({', '.join(parts)})": parts,
            f"{architecture} is no decoder-only language model": not architecture.endswith(DECODERS)
            or kind not in MODEL_FOR_CAUSAL_LM_MAPPING,
            REASONS.get(model_type, ""): model_type in REASONS,
            "its attention is latent (kv_lora_rank), for which pages have no layout": hasattr(config, "kv_lora_rank"),
            "its positions are biases of scores (alibi)": getattr(config, "alibi", False),
            "its rotary embedding depends on a request's length, and KV must be a function of the prefix": any(
                f"'{one}'" in rope for one in ("dynamic", "longrope")
            ),
        }
    )
    _count(config, "num_hidden_layers", MAX_LAYERS)
    config._experts_implementation = "batched_mm"  # the only one whose shapes depend on no content
    return config


def _count(config: Any, name: str, most: int, least: int = 1) -> int:
    """Returns a count of transformers' configuration. Raises ModelError for a wrong one."""
    return JsonFields({name: getattr(config, name, None)}, "config.json").count(name, most=most, least=least)


def dry_run(model: nn.Module, first: int = 0) -> tuple[list[Call], torch.Tensor]:
    """Runs a few tokens through a model, each of which sees itself alone; returns calls of attention, and all logits.

    first: the id of the first token. Raises ModelError for code that takes no positions, or mixes tokens by itself.
    """
    if "position_ids" not in inspect.signature(model.forward).parameters:
        raise ModelError("its code takes no positions")
    trace, device = Trace(), next(model.parameters()).device
    for module in model.modules():
        setattr(module, ATTENTION, trace)
    token_ids = torch.tensor([[first, *range(1, DRY_TOKENS)]], device=device)
    with torch.inference_mode():
        positions = torch.arange(DRY_TOKENS, device=device)[None]
        logits = model(input_ids=token_ids, position_ids=positions, use_cache=False).logits[0]
    return trace.calls, logits


def matrix_of(module: nn.Module) -> torch.Tensor | None:
    """Returns the matrix [out, in] of a linear layer, None of another module."""
    if isinstance(module, Conv1D):
        return module.weight.T
    return module.weight if type(module) is nn.Linear else None


def keeps_some_logits(model: nn.Module) -> bool:
    """Tells whether a model computes logits of chosen rows alone."""
    return "logits_to_keep" in inspect.signature(model.forward).parameters


def _windows(calls: Sequence[Call], config: Any) -> Windows:
    """Returns the windows of layers. Raises ModelError if the calls are not of one kind, and one in each layer."""
    num_layers, num_modules = config.num_hidden_layers, len({id(call.module) for call in calls})
    types: Sequence[str] = getattr(config, "layer_types", None) or [SLIDING] * num_layers
    window = config.sliding_window if getattr(config, "use_sliding_window", hasattr(config, "sliding_window")) else None
    asked = tuple(window if one == SLIDING else None for one in types)
    found = tuple(call.variant.window for call in calls)
    refuse(
        {
            f"its code calls transformers' attention interface {len(calls)} times in {num_layers} layers": not (
                num_modules == len(calls) == num_layers
            ),
            "its layers have KV of different shapes": any(call.heads != calls[0].heads for call in calls),
            f"its configuration has windows {asked}, its code gives attention {found}": found != asked,
        }
    )
    return found


def _require_class(model: nn.Module, fields: JsonFields) -> None:
    """Raises ModelError if config.json names another class than transformers' own of this kind of model."""
    made = type(model).__name__
    named = str((fields.raw("architectures") or [made])[0])[:64]
    refuse({f"{named} is not transformers' class {made}, and code of its own is never run": named != made})


def _require_all_experts(names: Iterable[str]) -> None:
    """Raises ModelError for an expert that is missing below another: transformers would join them without a gap."""
    stem_to_experts = defaultdict[tuple[str, str], set[int]](set)
    for name in names:
        if match := _EXPERT.fullmatch(name):
            stem_to_experts[match[1], match[3]].add(int(match[2]))
    for (stem, kind), experts in stem_to_experts.items():
        if missing := {*range(len(experts))} - experts:
            raise ModelError(f"the weights lack {stem}{min(missing)}{kind}"[:256])


def _refuse_other_state(model: Any, config: Any) -> None:
    """Raises ModelError for a model whose layers keep more of earlier tokens than keys and values."""
    others = {str(one)[:64] for one in getattr(config, "layer_types", None) or ()} - {FULL, SLIDING}
    has_convolutions = any(isinstance(one, nn.Conv1d) for one in model.modules())
    refuse(
        {
            f"its layers of {min(others, default='')} have {NO_KV}": others,
            f"its layers have {NO_KV}": getattr(model, "_is_stateful", False) or has_convolutions,
        }
    )
