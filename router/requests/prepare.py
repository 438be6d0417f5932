"""From a valid request to what workers are told: token ids, settings, block keys. Runs beside the event loop."""

import secrets
from dataclasses import dataclass

from router.requests.validator import Limits, ValidRequest, resolve
from text.codec import TextCodec
from wire.ids import BlockKey, NamespaceRoot
from wire.keys import cover
from wire.sampling import SamplingParams

SEED_BITS = 63


@dataclass(frozen=True)
class Prepared:
    """A request ready for workers. `keys` name all blocks of the prompt, a partly filled last one included."""

    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    keys: tuple[BlockKey, ...]


def prepare(valid: ValidRequest, tokenizer: TextCodec, limits: Limits, root: NamespaceRoot) -> Prepared:
    """Tokenizes, draws a seed if none was given, names the blocks. Raises InvalidRequest if it does not fit."""
    prompt_ids = tuple(tokenizer.encode(valid.prompt)) if isinstance(valid.prompt, str) else valid.prompt
    sampling = resolve(valid, prompt_ids, limits, secrets.randbits(SEED_BITS))
    keys = tuple(name.key for name in cover(root, prompt_ids, limits.block_size))
    return Prepared(prompt_ids, sampling, keys)
