"""What an engine says of itself."""

from dataclasses import dataclass

from wire.block_counts import BlockCounts


@dataclass(frozen=True)
class EngineStats:
    """Counts since the start, and pages and sequences as they are."""

    blocks: BlockCounts
    num_running: int
    num_waiting: int
    computed_prompt_tokens: int
    cached_prompt_tokens: int
    generated_tokens: int
    num_preemptions: int
