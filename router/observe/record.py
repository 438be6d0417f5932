"""The outcome of a request, for the log and for metrics, never for the client."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from wire.errors import BatonError
from wire.ids import QualifiedId, WorkerId
from wire.pb import inference_pb2 as pb
from wire.tier import Tier

OK = "OK"
GATES = (
    "router.wait_tokenizer",
    "router.wait_room",
    "router.wait_decode",
    "router.wait_trial",
    "prefill.queue",
    "prefill.wait_slot",
    "prefill.wait_pages",
    "prefill.wait_turn",
    "decode.queue",
    "decode.wait_slot",
    "decode.wait_pages",
    "decode.wait_turn",
)
"""Spans of a timeline in which a request waits for others; docs/timeline.md tells what for."""


@dataclass(frozen=True)
class RequestSummary:
    """How far a request has come. `cached`: prompt tokens by the tier that had their KV; None before that is known."""

    num_prompt_tokens: int
    num_output_tokens: int
    cached: Mapping[str, int] | None
    prefill_worker: WorkerId | None
    decode_worker: WorkerId | None
    num_attempts: int


@dataclass(frozen=True)
class RequestRecord:
    """A request that is over. `outcome`: its gRPC status; `ttft_s`: from arrival to first token, None without one."""

    request_id: QualifiedId
    outcome: str
    summary: RequestSummary
    ttft_s: float | None
    timeline: pb.Timeline

    @property
    def total_s(self) -> float:
        return self.timeline.total_ms / 1000

    @cached_property
    def waits_s(self) -> Mapping[str, float]:
        """Time spent at each gate."""
        waits_s: dict[str, float] = {}
        for span in self.timeline.spans:
            if span.name in GATES:
                waits_s[span.name] = waits_s.get(span.name, 0.0) + span.duration_ms / 1000
        return waits_s

    @property
    def values(self) -> Mapping[str, object]:
        """The fields of its line in the log; nothing that the client sent or got."""
        summary, waits_s = self.summary, self.waits_s
        cached = summary.cached or {}
        return {
            "request_id": self.request_id,
            "outcome": self.outcome,
            "prompt_tokens": summary.num_prompt_tokens,
            "output_tokens": summary.num_output_tokens,
            **{f"cached_{tier}": cached.get(tier, 0) for tier in Tier},
            "prefill_worker": summary.prefill_worker,
            "decode_worker": summary.decode_worker,
            "attempts": summary.num_attempts,
            "ttft_ms": None if self.ttft_s is None else round(self.ttft_s * 1000, 1),
            "total_ms": round(self.timeline.total_ms, 1),
            "waited_ms": round(sum(waits_s.values()) * 1000, 1),
            "longest_wait": max(waits_s, key=waits_s.__getitem__, default=None),
        }


def outcome_of(error: Exception) -> str:
    """The gRPC status that a client gets for an error; one that is none of ours is a bug."""
    return error.status.grpc if isinstance(error, BatonError) else BatonError.status.grpc
