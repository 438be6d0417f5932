"""The rule for fields that a path does not read. Pure, except for the list of the request under way.

A field is refused only if leaving it out could change what the client relies on: the answer's shape, constraints,
length, secrecy or price, or state that later turns name. Other fields are left out, and the answer names them. The rule
holds within objects, too; docs/api.md has its tables.
"""

import json
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from functools import lru_cache
from os.path import commonprefix
from textwrap import shorten

from wire.typed_reader import Misfit

MAX_UNKNOWN = 16
"""Bound on a request's names that no table has: each is compared with known names."""
MAX_TOLD, MAX_TOLD_BYTES = 16, 256
MAX_NAME_LEN = 32


class LeftOut:
    """The left-out fields of a request: `names` from TOLD, and "other" for fields that no table has."""

    def __init__(self) -> None:
        self.names: dict[str, None] = {}
        self._unknown: set[str] = set()

    def add(self, name: str) -> None:
        """Raises Misfit for too many names that no table has."""
        if name not in TOLD:
            self._unknown.add(name)
            if len(self._unknown) > MAX_UNKNOWN:
                raise Misfit(f"is one of more than {MAX_UNKNOWN} fields that are not known")
        self.names[name if name in TOLD else "other"] = None

    def headers(self, sent: Mapping[str, str]) -> list[tuple[bytes, bytes]]:
        """Lists the header with the fields' names, at most MAX_TOLD. sent: the client's names."""
        names = ", ".join([sent.get(name, name) for name in self.names][:MAX_TOLD])
        return [(b"x-baton-ignored", shorten(names, MAX_TOLD_BYTES, placeholder="").rstrip(",").encode())] * bool(names)


UNDER_WAY: ContextVar[LeftOut | None] = ContextVar("fields left out", default=None)
"""The left-out fields of the request that this task reads."""


def leave_out(name: str) -> None:
    """Notes a left-out field of the request under way. Raises Misfit for too many unknown fields."""
    (UNDER_WAY.get() or LeftOut()).add(name)


def pass_over(name: str, known: frozenset[str], value: object) -> None:
    """Leaves out an unknown field. Raises Misfit if leaving it out would change the answer.

    Does not note values that ask for nothing: an empty list, object or text, and the values of ONLY.
    """
    idle = ONLY.get(name, ())
    if value in ([], {}, "") or any(value == one and (type(value) is bool) == (type(one) is bool) for one in idle):
        return  # true is not 1
    if name in REFUSED:
        but = f", but as {' or '.join(map(json.dumps, idle))}" if idle else ""
        raise Misfit(f"is not offered{but}: {REFUSED[name]}")
    if name not in IGNORED and (meant := _nearest(name[:MAX_NAME_LEN], known)):
        raise Misfit(f"is no field of this request: did you mean {meant}?")
    leave_out(name)


@lru_cache(1024)
def _nearest(name: str, known: frozenset[str]) -> str:
    """Returns the known name within edit distance 2 of a name (1 for names of 4 or 5 letters), or ""."""
    bounds = {one: (len(one) >= 4) + (len(one) >= 6) for one in sorted(known)}
    fit = {one: edits for one, edits in bounds.items() if abs(len(one) - len(name)) <= edits}
    return next((one for one, edits in fit.items() if _is_near(name, one, edits)), "")


def _is_near(name: str, other: str, edits: int) -> bool:
    """Whether two names are within an edit distance."""
    shared = len(commonprefix((name, other)))  # noqa: RUF071  # letters, not folders
    name, other = name[shared:], other[shared:]
    steps = ((name[1:], other), (name, other[1:]), (name[1:], other[1:]))
    return name == other or (edits > 0 and any(_is_near(*step, edits - 1) for step in steps))


ONLY: Mapping[str, Sequence[object]] = {
    "add_generation_prompt": (True,),
    "add_special_tokens": (True,),
    "background": (False,),
    "ban_eos_token": (False,),
    "best_of": (1,),
    "continue_final_message": (False,),
    "do_sample": (True,),
    "dry_multiplier": (0,),
    "dynatemp_range": (0,),
    "echo": (False,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "function_call": ("none",),
    "guidance_scale": (1,),
    "include": (["reasoning.encrypted_content"],),
    "include_obfuscation": (False,),
    "include_reasoning": (True,),
    "length_penalty": (1,),
    "logprobs": (False,),
    "min_keep": (0,),
    "min_length": (0,),
    "min_new_tokens": (0,),
    "mirostat": (0,),
    "modalities": (["text"],),
    "n": (1,),
    "n_indent": (0,),
    "n_probs": (0,),
    "no_stop_trim": (False,),
    "no_repeat_ngram_size": (0,),
    "num_beams": (1,),
    "parse_tool_calls": (True,),
    "partial": (False,),
    "penalize_nl": (False,),
    "penalty_alpha": (0,),
    "post_sampling_probs": (False,),
    "prefix": (False,),
    "priority": (0,),
    "prompt_logprobs": (0, False),
    "raw": (False,),
    "repeat_penalty": (1,),
    "repeat_last_n": (0,),
    "response_format": ({"type": "text"},),
    "return_hidden_states": (False,),
    "return_token_ids": (False,),
    "return_tokens": (False,),
    "return_tokens_as_token_ids": (False,),
    "service_tier": ("auto", "default", "standard_only"),
    "smoothing_factor": (0,),
    "spaces_between_special_tokens": (True,),
    "speed": ("standard",),
    "store": (False,),
    "strict": (False,),
    "t_max_predict_ms": (0,),
    "tfs_z": (1,),
    "timeline": (False,),
    "tool_choice": ("none", "auto"),
    "top_a": (0,),
    "top_logprobs": (0,),
    "top_n_sigma": (-1, 0),
    "truncation": ("disabled",),
    "typical_p": (1,),
    "use_beam_search": (False,),
    "xtc_probability": (0,),
}
"""Unsupported fields, with the values that ask for nothing."""
_WHY: Mapping[str, Sequence[str]] = {
    "a function of a tool has it, beside its parameters": ("strict",),
    "a function's schema is parameters": ("input_schema", "inputSchema"),
    "a model has no adapters": ("adapter", "adapters", "lora", "lora_adapters", "lora_path", "lora_request"),
    "a client runs the tools, and counts": ("max_tool_calls",),
    "a client's library sends its fields at the top level": ("extra_body", "extra_headers", "extra_query"),
    "gateways are several and keep nothing; send the whole conversation": (
        *("background", "container", "context", "conversation", "include", "previous_response_id", "session_params"),
        "store",
    ),
    "gateways are several and keep nothing; send the whole conversation (in Anthropic's tool_runner: thread=False)": (
        "thread",
    ),
    "give continue_final_message": ("partial", "prefill", "prefix"),
    "give each option at the top level, in OpenAI's name": ("generation_config", "options"),
    "give echo with logprobs": ("prompt_logprobs",),
    "give max_tokens, min_tokens or stop": (
        *("eos_token_id", "max_length", "max_new_tokens", "max_time", "max_tokens_to_sample", "maxOutputTokens"),
        *("min_length", "min_new_tokens", "n_indent", "n_predict", "num_predict", "stop_regex", "stop_strings"),
        *("stop_words", "stopping_strings", "t_max_predict_ms"),
    ),
    "give n, and choose": ("beam_width", "best_of", "num_return_sequences"),
    "give reasoning_effort, thinking_token_budget or chat_template_kwargs": (
        *("enable_thinking", "reasoning_format", "think", "thinking_budget"),
    ),
    "give repetition_penalty": ("repeat_penalty",),
    "give seed": ("random_seed",),
    "give response_format or structured_outputs": (
        *("ebnf", "format", "grammar", "guided_whitespace_pattern", "json_schema", "output_format", "regex"),
        *("response_schema", "schema", "structural_tag"),
    ),
    "give tools and tool_choice": ("function_call", "functions"),
    "it would be lost: a prompt has text, turns and tools, in fields of their own": (
        *("attachments", "audio", "data_sources", "documents", "file", "file_ids", "history", "image_data"),
        *("image_url", "images", "input_audio", "output", "refusal", "systemPrompt", "system_prompt", "video_url"),
    ),
    "keys separate the caches of tenants": ("cache_salt",),
    "answers have no such form": (
        *("include_obfuscation", "include_reasoning", "modalities", "n_probs", "no_stop_trim", "parse_tool_calls"),
        *("post_sampling_probs", "response_fields", "return_hidden_states", "return_tokens"),
        "return_tokens_as_token_ids",
    ),
    "no model served fills gaps": ("suffix",),
    "no service stands beside the model": ("mcp_servers", "moderation", "plugins", "web_search_options"),
    "the operator chooses where workers are": ("inference_geo",),
    "templates are programs, which the operator chooses; give chat_template_kwargs": (
        *("chat_template", "raw", "template"),
    ),
    "texts are the tokenizer's": ("add_special_tokens", "spaces_between_special_tokens"),
    "the context is the deployment's, and nothing is cut to it": ("n_ctx", "num_ctx", "truncate_prompt_tokens"),
    "the router moves KV": ("kv_transfer_params",),
    "the sampler has no such stage": (
        *("allowed_token_ids", "bad_words", "ban_eos_token", "custom_token_bans", "do_sample", "dry_multiplier"),
        *("dynatemp_range", "epsilon_cutoff", "eta_cutoff", "guidance_scale", "length_penalty", "logits_processors"),
        *("min_keep", "mirostat", "negative_prompt", "no_repeat_ngram_size", "num_beams", "penalize_nl"),
        *("penalty_alpha", "repeat_last_n", "samplers", "smoothing_factor", "tfs_z", "top_a", "top_n_sigma"),
        *("typical_p", "use_beam_search", "vllm_xargs", "xtc_probability"),
    ),
    "there is one service for all": ("service_tier", "speed"),
    "this path does not read it, another does": (
        *("add_generation_prompt", "chat_template_kwargs", "continue_final_message", "echo", "guided_choice"),
        *("guided_grammar", "guided_json", "guided_regex", "input", "instructions", "logprobs"),
        *("max_completion_tokens", "max_output_tokens", "max_tokens", "messages", "n", "output_config", "prompt"),
        *("reasoning", "response_format", "return_token_ids", "stop", "stop_sequences", "structured_outputs"),
        *("system", "text", "thinking", "thinking_token_budget", "timeline", "tokens", "tool_choice", "tools"),
        "top_logprobs",
    ),
}
"""Unsupported fields that would change the answer, by a clause with the reason or the way out."""
REFUSED = {name: why for why, names in _WHY.items() for name in names}
IGNORED = frozenset(
    (
        *("additional_kwargs", "allowed_callers", "annotations", "anthropic_beta", "anthropic_version", "betas"),
        *("background_tasks", "cache_control", "cache_prompt", "chat_id", "citations", "client_metadata"),
        *("context_management", "continuous_usage_stats", "created_at", "defer_loading", "dry_allowed_length"),
        *("dry_base", "dry_penalty_last_n", "dry_sequence_breakers", "dynatemp_exponent", "eager_input_streaming"),
        *("features", "files", "filter_ids", "frequency_penalty", "generate_summary", "guided_decoding_backend", "id"),
        *("id_slot", "ignore_eos", "include_stop_str_in_output", "include_usage", "input_examples", "keep_alive"),
        *("keep_s", "kv_policy", "logit_bias", "low_vram", "main_gpu", "metadata", "min_p", "min_tokens"),
        *("mirostat_eta", "mirostat_tau", "mm_processor_kwargs", "model_item", "models", "n_keep", "num_batch"),
        *("num_gpu", "num_keep", "num_thread", "numa", "parallel_tool_calls", "prediction", "presence_penalty"),
        *("priority", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "provider"),
        *("provider_options", "provider_specific_fields", "reasoning_details", "reasoning_effort"),
        *("repetition_penalty", "request_id", "response_metadata", "return_progress", "return_token_strs", "route"),
        *("safety_identifier", "seed", "session", "session_id", "signature", "skip_special_tokens"),
        *("status", "stop_token_ids", "stream", "stream_options", "summary", "temperature", "thinking_blocks"),
        *("timestamp", "timings_per_token", "tool_ids", "tool_servers", "top_k"),
        *("top_p", "trace_id", "transforms", "truncation", "usage", "use_mlock", "use_mmap", "user", "variables"),
        *("verbosity", "xtc_threshold"),
    )
)
"""Fields that may be left out wherever no path reads them."""
SERVICES = frozenset(
    (
        *("code_execution", "code_interpreter", "file_search", "image_generation", "mcp", "mcp_toolset"),
        *("tool_search", "tool_search_tool_bm25", "tool_search_tool_regex", "web_fetch", "web_search"),
        "web_search_preview",
    )
)
"""Kinds of tools that a hosted service would run; Baton has none and leaves them out, by name."""
PROGRAMS_OWN = frozenset(("custom", "local_shell"))
"""Kinds of tools besides functions that agent programs send to /v1/responses and run; no template can call them."""
BILLING = "x-anthropic-billing-header"
TOLD = IGNORED | SERVICES | PROGRAMS_OWN | {"schema.format", "thinking_token_budget", BILLING}
"""Names for left-out fields in headers and counts; a path reads the last three, but in vain."""
