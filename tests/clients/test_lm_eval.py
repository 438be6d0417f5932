"""lm-eval, unmodified, against the HTTP port of a real cluster: answers, and log-probabilities of texts."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from demo_model import CHECKPOINT
from tests.cluster.served_cluster import ServedCluster

pytestmark = pytest.mark.clients
TIMEOUT_S = 100
PETS = "Pets: Tom dog, Lucy parrot, Anna cat. Question: which pet has"
DOCS = [
    {"question": f"{PETS} {name}?", "pets": ["dog", "parrot", "cat"], "answer": index}
    for index, name in enumerate(("Tom", "Lucy", "Anna"))
]
TASKS: dict[str, dict[str, Any]] = {
    "generating": {
        "output_type": "generate_until",
        "doc_to_target": " {{pets[answer]}}",
        "generation_kwargs": {"until": [".", "\n"], "max_gen_toks": 6},
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
    expected = torch_logprobs()
    for sample, logprobs in zip(answered["choosing"], expected, strict=True):
        told = [float(logprob) for [(logprob, _)] in sample["resps"]]
        assert told == pytest.approx(logprobs, abs=2e-3)
        assert sample["acc"] == 1.0
    assert [sample["exact_match"] for sample in answered["generating"]] == [1.0] * len(DOCS)


def evaluate(address: str, folder: Path) -> dict[str, Any]:
    """Runs both tasks; returns the samples of each as lm-eval logs them, in order."""
    (folder / "docs.json").write_text("\n".join(map(json.dumps, DOCS)))
    for name, task in TASKS.items():
        data = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(folder / "docs.json")}}}
        whole = {"task": name, "test_split": "test", "doc_to_text": "question", **data, **task}
        (folder / f"{name}.yaml").write_text(json.dumps(whole))  # which is YAML, too
    python = Path(os.environ["BATON_CLIENTS_VENV"]) / "bin/python"
    arguments = f"base_url=http://{address}/v1/completions,model=demo,tokenizer={CHECKPOINT},num_concurrent=2"
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


def torch_logprobs() -> list[list[float]]:
    """Computes by transformers what each choice of each question has, after a space."""
    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT)
    model = AutoModelForCausalLM.from_pretrained(CHECKPOINT, dtype=torch.float32).eval()

    def logprob(question: str, pet: str) -> float:
        start = len(tokenizer(question).input_ids)
        ids = tokenizer(f"{question} {pet}").input_ids
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0, start - 1 : -1].log_softmax(-1)
        return float(logits.gather(1, torch.tensor(ids[start:])[:, None]).sum())

    return [[logprob(str(one["question"]), pet) for pet in ("dog", "parrot", "cat")] for one in DOCS]
