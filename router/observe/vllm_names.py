"""The router's metrics under vLLM's names, for dashboards and autoscalers that read vLLM's."""

from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from router.observe.metrics import NAMESPACE
from wire.tier import Tier

PREFIX = "vllm"
TOTAL = "0"
"""The label `engine` of metrics that the router measures for all workers together."""


@dataclass(frozen=True)
class Source:
    """A metric of Baton. where: label values that samples must have. labels: the labels that stay, by vLLM's name.

    Samples that differ only in other labels are summed.
    """

    name: str
    where: Mapping[str, Set[str]] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)


ROUTER = {"role": {"router"}}
DEVICE, HOST, BEYOND = {"tier": {Tier.DEVICE}}, {"tier": {Tier.HOST}}, {"tier": set(Tier) - {Tier.DEVICE}}
WORKER = {"engine": "worker"}
SOURCES: Mapping[str, Source] = {
    "num_requests_running": Source("num_requests_running", ROUTER),
    "num_requests_waiting": Source("num_requests_waiting", ROUTER),
    "kv_cache_usage_perc": Source("kv_cache_usage_perc", DEVICE, WORKER),
    "prefix_cache_queries": Source("prefix_cache_queries", DEVICE),
    "prefix_cache_hits": Source("prefix_cache_hits", DEVICE),
    "external_prefix_cache_queries": Source("prefix_cache_queries", HOST),
    "external_prefix_cache_hits": Source("prefix_cache_hits", BEYOND),
    "num_preemptions": Source("num_preemptions", labels=WORKER),
    "prompt_tokens": Source("prompt_tokens"),
    "generation_tokens": Source("generation_tokens"),
    "request_success": Source("finished_choices", labels={"finished_reason": "finish_reason"}),
    "time_to_first_token_seconds": Source("time_to_first_token_seconds"),
    "inter_token_latency_seconds": Source("inter_token_latency_seconds"),
    "time_per_output_token_seconds": Source("inter_token_latency_seconds"),
    "e2e_request_latency_seconds": Source("e2e_request_latency_seconds"),
    "request_queue_time_seconds": Source("request_queue_time_seconds"),
    "spec_decode_num_drafts": Source("spec_decode_num_drafts", labels=WORKER),
    "spec_decode_num_draft_tokens": Source("spec_decode_num_draft_tokens", labels=WORKER),
    "spec_decode_num_accepted_tokens": Source("spec_decode_num_accepted_tokens", labels=WORKER),
}
"""Sources by vLLM's name, without prefix and `_total`. vLLM up to 0.10 has `time_per_output_token_seconds`."""


class VllmNames(Collector):
    """A collector of all metrics of a registry, then of SOURCES again, under vLLM's names and labels."""

    def __init__(self, registry: CollectorRegistry, model_name: str) -> None:
        self._registry = registry
        self._common = {"model_name": model_name, "engine": TOTAL}

    def collect(self) -> Iterator[Metric]:
        metrics = {metric.name: metric for metric in self._registry.collect()}
        yield from metrics.values()
        for name, source in SOURCES.items():
            yield self._renamed(name, source, metrics[f"{NAMESPACE}_{source.name}"])

    def _renamed(self, name: str, source: Source, metric: Metric) -> Metric:
        renamed = Metric(f"{PREFIX}:{name}", metric.documentation, metric.type)
        values: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
        for sample in metric.samples:
            ending = sample.name.removeprefix(metric.name)
            if ending == "_created" or any(sample.labels[label] not in those for label, those in source.where.items()):
                continue
            kept = {theirs: sample.labels[ours] for theirs, ours in source.labels.items()}
            bucket = {"le": sample.labels["le"]} if "le" in sample.labels else {}
            series = ending, tuple({**self._common, **kept, **bucket}.items())
            values[series] = values.get(series, 0.0) + sample.value
        renamed.samples = [Sample(renamed.name + end, dict(labels), value) for (end, labels), value in values.items()]
        return renamed
