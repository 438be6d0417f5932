"""Answers as OpenAI's completions and chats have them: choices under a head, with log-probabilities and usage."""

import json
import time
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from baton import Chunk, Completion
from baton.results import Choice
from gateway.generation import Dialect, Draft, Generation
from httpd.errors import envelope
from wire.errors import BatonError

DONE = b"data: [DONE]\n\n"


class ChoicesDialect(Dialect):
    """An endpoint whose answers are choices."""

    object_name: str
    event_name: str
    id_prefix: str

    @abstractmethod
    def choice(self, choice: Choice, text: str, number: int) -> dict[str, Any]:
        """Describes a choice with its text, but for log-probabilities, under its number in the answer."""

    @abstractmethod
    def event(self, text: str, number: int, logprobs: str) -> str:
        """Writes the event of a choice's new text, or of a part of its prompt. logprobs: JSON."""

    @abstractmethod
    def last_event(self, choice: Choice, number: int) -> str:
        """Writes how a choice ended."""

    def begin(self, generation: Generation) -> None:
        self._generation = generation
        self._start = b"data: " + self._head(self.event_name)
        self._tail = b'],"usage":null}\n\n' if self._has_usage else b"]}\n\n"

    def events(self, chunk: Chunk, numbers: Sequence[int]) -> Iterator[bytes]:
        logprobs = json.dumps(self.logprobs(chunk, numbers)) if chunk.logprobs else "null"
        for number in numbers:
            yield self._start + self.event(chunk.text, number, logprobs).encode() + self._tail

    def end(self, completions: Sequence[Completion]) -> bytes:
        ends = [
            self._start + self.last_event(choice, number).encode() + self._tail
            for number, choice in enumerate(_choices(completions))
        ]
        if self._has_usage:
            ends.append(self._start + b'],"usage":' + self._usage(completions) + b"}\n\n")
        return b"".join((*ends, DONE))

    def failed(self, error: BatonError) -> bytes:
        return b"data: " + envelope(error) + b"\n\n"

    def whole(self, drafts: Sequence[Draft], completions: Sequence[Completion]) -> list[bytes]:
        pieces = [self._head(self.object_name)]
        for number, choice in enumerate(_choices(completions)):
            described = self.choice(choice, "".join(drafts[number].text), number)
            pieces += [b", " if number else b"", *drafts[number].pieces(described)]
        return [*pieces, b'], "usage": ', self._usage(completions), b"}"]

    @property
    def _has_usage(self) -> bool:
        """Whether a stream ends with usage."""
        return self._generation.usage or self._generation.timeline

    def _usage(self, completions: Sequence[Completion]) -> bytes:
        timelines = [asdict(one.timeline) for one in completions] if self._generation.timeline else None
        return json.dumps({**usage_of(completions), **({"timelines": timelines} if timelines else {})}).encode()

    def _head(self, name: str) -> bytes:
        named = {"id": f"{self.id_prefix}-{self._generation.request_id}", "object": name, "created": int(time.time())}
        return json.dumps({**named, "model": self._generation.model})[:-1].encode() + b', "choices": ['


def usage_of(completions: Sequence[Completion]) -> dict[str, Any]:
    """Sums the tokens of all prompts."""
    num_prompt = sum(one.usage.prompt_tokens for one in completions)
    num_new = sum(one.usage.completion_tokens for one in completions)
    num_reasoning = sum(one.usage.reasoning_tokens for one in completions)
    details = {"completion_tokens_details": {"reasoning_tokens": num_reasoning}} if num_reasoning else {}
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_new,
        "total_tokens": num_prompt + num_new,
        "prompt_tokens_details": {"cached_tokens": sum(sum(one.usage.cached_tokens.values()) for one in completions)},
        **details,
    }


def _choices(completions: Sequence[Completion]) -> Iterator[Choice]:
    return (choice for completion in completions for choice in completion.choices)
