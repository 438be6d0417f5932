"""What a server has said of one request, gathered from its stream."""

from typing import Any

from google.protobuf.json_format import MessageToDict

from wire.convert import reason_from_pb, tiers_from_pb
from wire.pb import inference_pb2 as pb
from wire.tier import Tier


class Generation:
    """Grows with each response until `complete`."""

    def __init__(self) -> None:
        self.request_id = ""
        self.complete: pb.Complete | None = None
        self._texts: dict[int, str] = {}
        self._token_ids: dict[int, list[int]] = {}
        self._logprobs: dict[int, list[pb.TokenLogprobs]] = {}

    def accept(self, response: pb.GenerateResponse) -> str:
        """Takes a response in; the text that choice 0 gained."""
        self.request_id = response.request_id
        if response.WhichOneof("event") == "complete":
            self.complete = response.complete
            return ""
        chunk = response.chunk
        self._texts[chunk.index] = self._texts.get(chunk.index, "") + chunk.text
        self._token_ids.setdefault(chunk.index, []).extend(chunk.token_ids)
        self._logprobs.setdefault(chunk.index, []).extend(chunk.logprobs)
        return "" if chunk.index else chunk.text

    def text(self, index: int) -> str:
        """All text of a choice so far."""
        return self._texts.get(index, "")

    def to_object(self, complete: pb.Complete) -> dict[str, Any]:
        """The object that `--json` prints: choice 0 stands at the top too."""
        choices = [self._choice(choice) for choice in complete.choices]
        first = choices[0]
        usage = complete.usage
        cached = tiers_from_pb(usage.cached_tokens)
        return {
            "request_id": self.request_id,
            "text": first["text"],
            "token_ids": first["token_ids"],
            "finish_reason": first["finish_reason"],
            "choices": choices,
            "usage": {
                "prompt_tokens": usage.prompt_tokens,
                "completion_tokens": usage.completion_tokens,
                "cached_tokens": {tier.value: cached.get(tier, 0) for tier in Tier},
            },
            "seed": complete.seed,
            "workers": {
                "prefill": complete.timeline.prefill_worker or None,
                "decode": complete.timeline.decode_worker or None,
            },
            "timeline": {
                "total_ms": complete.timeline.total_ms,
                "spans": [_span(span) for span in complete.timeline.spans],
            },
        }

    def _choice(self, choice: pb.Choice) -> dict[str, Any]:
        reason = reason_from_pb(choice.finish_reason)
        which = choice.WhichOneof("matched_stop")
        described = {
            "index": choice.index,
            "text": self.text(choice.index),
            "token_ids": self._token_ids.get(choice.index, []),
            "finish_reason": None if reason is None else reason.value,
            "matched_stop": None if which is None else getattr(choice, which),
        }
        logprobs = self._logprobs.get(choice.index)
        if logprobs:
            described["logprobs"] = [MessageToDict(one, preserving_proto_field_name=True) for one in logprobs]
        return described


def _span(span: pb.Span) -> dict[str, Any]:
    return {
        "name": span.name,
        "worker": span.worker,
        "start_ms": span.start_ms,
        "duration_ms": span.duration_ms,
        "counts": dict(span.counts),
    }
