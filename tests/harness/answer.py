"""Requests, and what a client has of them."""

from collections.abc import AsyncIterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from wire.pb import inference_pb2 as pb


@dataclass
class ChoiceAnswer:
    """All that a client may compare of one choice."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[bytes] = field(default_factory=list)
    finish: pb.Choice | None = None

    @property
    def matched_stop(self) -> str | None:
        """Which kind of stop ended it, by its name in `Choice`. Only of an answer that is complete."""
        assert self.finish is not None
        matched: str | None = self.finish.WhichOneof("matched_stop")
        return matched


class Reader:
    """Reads one stream, as far as it is told. Raises what the stream ends with."""

    def __init__(self, stream: AsyncIterable[pb.GenerateResponse]) -> None:
        self.complete: pb.Complete | None = None
        self._stream = aiter(stream)
        self.by_index: dict[int, ChoiceAnswer] = {}

    @property
    def num_tokens(self) -> int:
        return sum(len(choice.token_ids) for choice in self.by_index.values())

    @property
    def choices(self) -> list[ChoiceAnswer]:
        return [self.by_index[index] for index in sorted(self.by_index)]

    async def read_tokens(self, num_tokens: int) -> None:
        """Until there are so many of all choices together, or the stream ends."""
        while self.num_tokens < num_tokens and self.complete is None:
            self._take(await anext(self._stream))

    async def read_all(self) -> list[ChoiceAnswer]:
        """To the end, which is one `complete` and nothing after it."""
        async for response in self._stream:
            assert self.complete is None, "something came after the last message"
            self._take(response)
        assert self.complete is not None
        assert self.complete.usage.completion_tokens == self.num_tokens
        return self.choices

    def _take(self, response: pb.GenerateResponse) -> None:
        if response.WhichOneof("event") == "complete":
            self.complete = response.complete
            for finish in response.complete.choices:
                self.by_index.setdefault(finish.index, ChoiceAnswer()).finish = finish
            return
        choice = self.by_index.setdefault(response.chunk.index, ChoiceAnswer())
        choice.token_ids += response.chunk.token_ids
        choice.text += response.chunk.text
        choice.logprobs += [one.SerializeToString(deterministic=True) for one in response.chunk.logprobs]


def ask(prompt: Sequence[int], max_tokens: int = 40, **settings: Any) -> pb.GenerateRequest:
    """Greedy unless told otherwise."""
    sampling = pb.SamplingParams(**{"temperature": 0.0, "max_tokens": max_tokens, "seed": 7, **settings})
    return pb.GenerateRequest(token_ids=pb.TokenIds(ids=prompt), sampling_params=sampling)
