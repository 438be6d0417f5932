"""What an engine is asked to do."""

from dataclasses import dataclass

from wire.ids import NamespaceRoot, RequestId
from wire.sampling import SamplingParams


@dataclass(frozen=True)
class ChoiceSoFar:
    """A choice to go on with: its index among the request's n, and what was emitted for it already."""

    index: int
    output_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class EngineRequest:
    """A prompt and its unfinished choices.

    An engine that is to hand the request over after one more token per choice is told so by `HandOff`, a subclass: it
    then publishes all blocks of the prompt, the partly filled last one included, and holds them for the request.
    """

    request_id: RequestId
    root: NamespaceRoot
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    choices: tuple[ChoiceSoFar, ...] = (ChoiceSoFar(0),)


@dataclass(frozen=True)
class HandOff(EngineRequest):
    """A request whose prompt is computed here and whose choices go on elsewhere after their first token."""
