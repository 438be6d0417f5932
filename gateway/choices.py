"""The common part of /v1/completions and /v1/chat/completions: choices, with log-probabilities and usage."""

import json
import time
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from baton import Chunk, Completion
from baton.results import Choice, PromptPart
from gateway.generation import PROMPT_IDS, ChoiceDraft, Dialect, Generation, members
from httpd.errors import envelope
from wire.errors import BatonError

DONE = b"data: [DONE]\n\n"


class ChoicesDialect(Dialect):
    """An endpoint whose answers are choices."""

    object_name: str
    event_name: str
    id_prefix: str
    has_one_prompt: bool
    """Whether the prompt's token ids stand once in the answer, not in each choice; vLLM differs by endpoint."""

    @abstractmethod
    def choice(self, choice: Choice, text: str, number: int) -> dict[str, Any]:
        """Describes a choice, under its number in the answer: its text, without log-probabilities."""

    @abstractmethod
    def event(self, text: str, number: int, logprobs: str) -> str:
        """Writes the event of a choice's new text, or of a part of its prompt. logprobs: JSON."""

    @abstractmethod
    def last_event(self, choice: Choice, number: int) -> str:
        """Writes the event of a choice's end."""

    def begin(self, generation: Generation) -> None:
        self._generation = generation
        self._start = b"data: " + self._head(self.event_name)
        self._tail = b'],"usage":null}\n\n' if self._has_usage else b"]}\n\n"
        self._num_new = 0
        self._prompt_ids: dict[int, list[int]] = {}

    def events(self, chunk: Chunk, numbers: Sequence[int]) -> Iterator[bytes]:
        is_plain = isinstance(chunk, PromptPart) or not self._generation.returns_ids
        self._num_new += 0 if isinstance(chunk, PromptPart) else len(chunk.token_ids)
        if self._has_usage and self._generation.usage.get("continuous_usage_stats"):
            self._tail = b'],"usage":%b}\n\n' % json.dumps(_usage_of(self.num_prompt_tokens, self._num_new)).encode()
        if isinstance(chunk, PromptPart):
            for number in numbers:
                self._prompt_ids.setdefault(number, []).extend(chunk.token_ids)
            if self._generation.hides_prompt:
                return
        logprobs = json.dumps(self.logprobs(chunk, numbers)) if chunk.logprobs else "null"
        for number in numbers:
            event = self.event(chunk.text, number, logprobs).encode()
            yield self._start + event + self._tail if is_plain else self._with_ids(event, number, chunk.token_ids)

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

    def whole(self, drafts: Sequence[ChoiceDraft], completions: Sequence[Completion]) -> list[bytes]:
        pieces, shared = [self._head(self.object_name)], dict[str, list[bytes]]()
        for draft in drafts:
            if self.has_one_prompt and PROMPT_IDS in draft.ids:
                shared[PROMPT_IDS] = draft.ids.pop(PROMPT_IDS)
        for number, choice in enumerate(_choices(completions)):
            described = self.choice(choice, "".join(drafts[number].text), number)
            pieces += [b", " if number else b"", *drafts[number].pieces(described)]
        return [*pieces, b"]", *members(shared), b', "usage": ', self._usage(completions), b"}"]

    def _with_ids(self, event: bytes, number: int, token_ids: Sequence[int]) -> bytes:
        """Writes an event with its token ids; a choice's first event has the prompt's ids, too."""
        of_choice: dict[str, Sequence[int]] = {"token_ids": token_ids}
        of_answer: dict[str, Sequence[int]] = {}
        if number in self._prompt_ids:
            (of_answer if self.has_one_prompt else of_choice)[PROMPT_IDS] = self._prompt_ids.pop(number)
        told = json.dumps(of_choice)[1:].encode()  # with the bracket that ends a choice
        more = b"," + json.dumps(of_answer)[1:-1].encode() if of_answer else b""
        return self._start + event[:-1] + b"," + told + b"]" + more + self._tail[1:]

    @property
    def _has_usage(self) -> bool:
        """Whether a stream ends with usage."""
        return bool(self._generation.usage.get("include_usage")) or self._generation.timeline

    def _usage(self, completions: Sequence[Completion]) -> bytes:
        timelines = [asdict(one.timeline) for one in completions] if self._generation.timeline else None
        return json.dumps({**usage_of(completions), **({"timelines": timelines} if timelines else {})}).encode()

    def _head(self, name: str) -> bytes:
        named = {"id": f"{self.id_prefix}-{self._generation.request_id}", "object": name, "created": int(time.time())}
        return json.dumps({**named, **self._generation.named})[:-1].encode() + b', "choices": ['


def usage_of(completions: Sequence[Completion]) -> dict[str, Any]:
    """Sums the tokens of all prompts."""
    num_prompt = sum(one.usage.prompt_tokens for one in completions)
    num_new = sum(one.usage.completion_tokens for one in completions)
    num_reasoning = sum(one.usage.reasoning_tokens for one in completions)
    details = {"completion_tokens_details": {"reasoning_tokens": num_reasoning}} if num_reasoning else {}
    return {
        **_usage_of(num_prompt, num_new),
        "prompt_tokens_details": {"cached_tokens": sum(sum(one.usage.cached_tokens.values()) for one in completions)},
        **details,
    }


def _usage_of(num_prompt: int, num_new: int) -> dict[str, Any]:
    return {"prompt_tokens": num_prompt, "completion_tokens": num_new, "total_tokens": num_prompt + num_new}


def _choices(completions: Sequence[Completion]) -> Iterator[Choice]:
    return (choice for completion in completions for choice in completion.choices)
