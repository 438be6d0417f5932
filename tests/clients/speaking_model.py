"""A tiny checkpoint of random weights and long context: its template knows tools, and its answers are one sentence."""

import json
import shutil
from itertools import pairwise
from pathlib import Path

import tokenizers
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.harness.checkpoints import make_checkpoint

ANSWER = "All is well here"
CONTEXT_LEN = 131_072
END = "<|im_end|>"
LAST = "\n"
"""What the template ends with where an answer begins."""
EMBEDDING = 20.0
"""Factor on embeddings: what the layer adds to one is then a small part of it."""
SHARPNESS = 20.0
TEMPLATE = """\
{%- set system = messages[0].content if messages[0].role == 'system' else '' -%}
{%- if system or tools -%}
<|im_start|>system
{{ system }}
{%- if tools %}
Functions:
{%- for tool in tools %}
{{ tool | tojson }}
{%- endfor %}
Call one as <tool_call>{"name": NAME, "arguments": OBJECT}</tool_call>
{%- endif -%}
<|im_end|>
{% endif -%}
{%- set turn = namespace(role='') -%}
{%- for message in messages -%}
{%- if message.role == 'system' -%}
{%- if not loop.first -%}{{ raise_exception('A system message must be the first.') }}{%- endif -%}
{%- elif message.role == 'user' -%}
{%- if turn.role == 'user' -%}{{ raise_exception('Turns must alternate.') }}{%- endif -%}
<|im_start|>user
{{ message.content }}<|im_end|>
{% set turn.role = 'user' -%}
{%- elif message.role == 'assistant' -%}
{%- if turn.role == 'assistant' -%}{{ raise_exception('Turns must alternate.') }}{%- endif -%}
<|im_start|>assistant
{{ message.content or '' }}
{%- for call in message.tool_calls or [] -%}
<tool_call>{{ {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}</tool_call>
{%- endfor -%}
<|im_end|>
{% set turn.role = 'assistant' -%}
{%- elif message.role == 'tool' -%}
<|im_start|>user
<tool_response>{{ message.content }}</tool_response><|im_end|>
{% set turn.role = 'tool' -%}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% endif -%}
"""
"""Strict as those of real models: system first, turns that alternate; roles that it does not know are passed over."""


def make_speaking_model(source: Path, folder: Path) -> Path:
    """Writes a model of SmolLM2's tokenizer into `folder`, which it returns.

    source: a folder of SmolLM2. Attention and its KV are random; the head alone decides which token follows which.
    """
    tokenizer = tokenizers.Tokenizer.from_file(str(source / "tokenizer.json"))
    shape = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    }
    make_checkpoint(
        "llama-gqa", folder, vocab_size=tokenizer.get_vocab_size(), max_position_embeddings=CONTEXT_LEN, **shape
    )
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(source / name, folder / name)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": tokenizer.token_to_id(END)}))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    weights = load_file(folder / "model.safetensors")
    teach(weights, [id_of(tokenizer, LAST), *tokenizer.encode(ANSWER).ids, id_of(tokenizer, END)])
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def teach(weights: dict[str, Tensor], ids: list[int]) -> None:
    """Changes embeddings and head so that each of these tokens is followed by the next one, whatever stands before."""
    assert len(set(ids)) == len(ids), "the next token is read off the latest alone"
    embeddings, head = weights["model.embed_tokens.weight"], weights["lm_head.weight"].zero_()
    embeddings *= EMBEDDING
    for before, after in pairwise(ids):
        head[after] = SHARPNESS * embeddings[before] / embeddings[before].norm()


def id_of(tokenizer: tokenizers.Tokenizer, text: str) -> int:
    [found] = tokenizer.encode(text, add_special_tokens=False).ids
    return int(found)
