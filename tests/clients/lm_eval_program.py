"""The lm-eval package's model of a completions endpoint; prints its log-likelihoods and a generation, as JSON."""

import json
import sys
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalCompletionsAPI


class Bytes:
    """A tokenizer of a token for each byte, as the model's."""

    eos_token_id = 0

    def encode(self, text: str, **_: Any) -> list[int]:
        return list(text.encode())


class Completions(LocalCompletionsAPI):  # type: ignore[misc]
    """The same client, which needs no tokenizer of the hub."""

    def tok_encode(self, string: Any, **_: Any) -> Any:
        return list(string.encode()) if isinstance(string, str) else [list(one.encode()) for one in string]

    @property
    def eot_token_id(self) -> int:
        return 0


model = Completions(
    base_url=f"{sys.argv[1]}/completions",
    model="fake",
    tokenizer_backend=None,
    tokenized_requests=True,
    max_length=500,
    num_concurrent=1,
    max_retries=1,
)
model.tokenizer = Bytes()
pairs = [("hello, ", "world"), ("a", "b")]
asked = [Instance("loglikelihood", {}, pair, index) for index, pair in enumerate(pairs)]
generating = [Instance("generate_until", {}, ("hello", {"until": ["\0"], "max_gen_toks": 6, "temperature": 0}), 0)]
print(json.dumps({"scores": model.loglikelihood(asked), "text": model.generate_until(generating)}))
