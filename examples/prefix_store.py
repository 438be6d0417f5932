"""The cache of a transformers model in files: what one process has computed, later ones restore and go on from.

python examples/prefix_store.py FOLDER [CHECKPOINT]    # computes the prompt
python examples/prefix_store.py FOLDER [CHECKPOINT]    # restores its blocks, and prints the same tokens
"""

import hashlib
import sys
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from baton import KVLayout, PrefixStore, tiers
from demo_model import CHECKPOINT

PROMPT = """Pets: Tom dog, Lucy parrot, Anna cat, Ben horse. Rooms: Ben 19, Anna 48, Clara 77, David 12, Emma 55.
Ages: Ben 30, Anna 41, Lucy 25, Tom 63. Question: which pet has Lucy?"""
SECRET = bytes(32)  # of a store that only this user reads; else secrets.token_bytes(32), kept in a file

folder, checkpoint = sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else str(CHECKPOINT)
model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
config = model.config
with open(f"{checkpoint}/model.safetensors", "rb") as weights:
    fingerprint = hashlib.file_digest(weights, "sha256").digest() + b"transformers"
layout = KVLayout(config.num_hidden_layers, config.num_key_value_heads, config.head_dim, block_size=16, dtype="float32")


@torch.no_grad()
def run(tokens: list[int], cache: DynamicCache) -> int:
    """Runs tokens after the cached tokens, and returns the likeliest next token."""
    start = cache.get_seq_length()
    positions = torch.arange(start, start + len(tokens))[None]
    logits = model(torch.tensor([tokens]), None, positions, cache).logits
    return int(logits[0, -1].argmax())


def generate(tokens: list[int], cache: DynamicCache, num_tokens: int) -> list[int]:
    """Continues tokens, of which the cache has the first."""
    answer = [run(tokens[cache.get_seq_length() :], cache)]
    while len(answer) < num_tokens:
        answer.append(run(answer[-1:], cache))
    return answer


def stacked(layers: list[Any]) -> torch.Tensor:
    """Stacks the layers of a cache of one sequence: `[num_layers, 2, num_kv_heads, num_tokens, head_dim]`."""
    return torch.stack([torch.stack((layer.keys[0], layer.values[0])) for layer in layers])


def cache_of(kv: torch.Tensor) -> DynamicCache:
    """Makes a cache from such a tensor."""
    cache = DynamicCache()
    for number, (keys, values) in enumerate(kv):
        cache.update(keys[None], values[None], number)
    return cache


tokens = AutoTokenizer.from_pretrained(checkpoint).encode(PROMPT)
with PrefixStore([tiers.files(folder, 1 << 30)], model=fingerprint, layout=layout, secret=SECRET) as store:
    prefix = store.get_closest(tokens[:-1])
    cache = cache_of(prefix.kv)
    answer = generate(tokens, cache, 32)
    store.put([*tokens, *answer[:-1]], stacked(cache.layers))
print(f"{prefix.num_tokens} of {len(tokens)} tokens restored:", *answer)
