"""lm-eval, unmodified, against the HTTP port of a real cluster: answers, and log-probabilities of texts."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from engine.checkpoint.hub import find_folder
from engine.checkpoint.pulled import MODELS
from tests.clients.conftest import MODEL
from tests.cluster.served_cluster import ServedCluster
from tests.engine.gguf.files import load_oracle

pytestmark = [pytest.mark.clients, pytest.mark.timeout(400)]
TIMEOUT_S = 200
MAX_TOKENS = 6
PETS = "Pets: Tom dog, Lucy parrot, Anna cat. Question: which pet has"
DOCS = [
    {"question": f"{PETS} {name}?", "pets": ["dog", "parrot", "cat"], "answer": index}
    for index, name in enumerate(("Tom", "Lucy", "Anna"))
]
TASKS: dict[str, dict[str, Any]] = {
    "generating": {
        "output_type": "generate_until",
        "doc_to_target": " {{pets[answer]}}",
        "generation_kwargs": {"until": [".", "\n"], "max_gen_toks": MAX_TOKENS},
        "metric_list": [{"metric": "exact_match"}],
    },
    "choosing": {
        "output_type": "multiple_choice",
        "doc_to_target": "answer",
        "doc_to_choice": "pets",
        "metric_list": [{"metric": "acc"}],
    },
}


def test_lm_eval(cluster: ServedCluster, tmp_path: Path) -> None:
    answered = evaluate(cluster.status()["http_address"], tmp_path)
    oracle = Oracle()
    for sample, doc in zip(answered["choosing"], DOCS, strict=True):
        logprobs = [oracle.logprob(str(doc["question"]), pet) for pet in ("dog", "parrot", "cat")]
        told = [float(logprob) for [(logprob, _)] in sample["resps"]]
        assert told == pytest.approx(logprobs, abs=5e-3)
        assert sample["acc"] == float(logprobs.index(max(logprobs)) == doc["answer"])
    for sample, doc in zip(answered["generating"], DOCS, strict=True):
        [[text]] = sample["resps"]
        assert text == oracle.answer(str(doc["question"]))


def evaluate(address: str, folder: Path) -> dict[str, Any]:
    """Runs both tasks; returns the samples of each as lm-eval logs them, in order."""
    (folder / "docs.json").write_text("\n".join(map(json.dumps, DOCS)))
    for name, task in TASKS.items():
        data = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(folder / "docs.json")}}}
        whole = {"task": name, "test_split": "test", "doc_to_text": "question", **data, **task}
        (folder / f"{name}.yaml").write_text(json.dumps(whole))  # which is YAML, too
    python = Path(os.environ["BATON_CLIENTS_VENV"]) / "bin/python"
    arguments = (
        f"base_url=http://{address}/v1/completions,model={MODEL},tokenizer={find_folder(MODEL)},num_concurrent=2"
    )
    command = [*(str(python), "-m", "lm_eval", "run", "--model", "local-completions", "--model_args", arguments)]
    command += [*("--tasks", ",".join(TASKS), "--include_path", str(folder), "--batch_size", "2")]
    command += [*("--output_path", str(folder / "out"), "--log_samples")]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"HF_HOME": str(folder / "hf"), "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, env=environment)
    assert done.returncode == 0, done.stderr
    return {name: samples_of(folder / "out", name) for name in TASKS}


def samples_of(folder: Path, task: str) -> list[dict[str, Any]]:
    [log] = folder.rglob(f"samples_{task}_*.jsonl")
    samples: list[dict[str, Any]] = [json.loads(line) for line in log.read_text().splitlines()]
    return sorted(samples, key=lambda sample: int(sample["doc_id"]))


class Oracle:
    """The same weights, dequantized, in transformers."""

    def __init__(self) -> None:
        folder = find_folder(MODEL)
        self._tokenizer = AutoTokenizer.from_pretrained(folder)
        self._model = load_oracle(MODELS[MODEL].path, folder)

    @torch.no_grad()
    def logprob(self, question: str, pet: str) -> float:
        """Returns the log-probability of a choice after a question and a space."""
        start = len(self._tokenizer(question).input_ids)
        ids = self._tokenizer(f"{question} {pet}").input_ids
        logits = self._model(torch.tensor([ids])).logits[0, start - 1 : -1].log_softmax(-1)
        return float(logits.gather(1, torch.tensor(ids[start:])[:, None]).sum())

    @torch.no_grad()
    def answer(self, question: str) -> str:
        """Returns the greedy answer, up to the first stop."""
        ids = torch.tensor([self._tokenizer(question).input_ids])
        made = self._model.generate(ids, max_new_tokens=MAX_TOKENS, do_sample=False)[0, ids.shape[1] :]
        text = str(self._tokenizer.decode(made, skip_special_tokens=True))
        return min((text.partition(stop)[0] for stop in (".", "\n")), key=len)
