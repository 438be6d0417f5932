import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

import demo_model
from deploy.plan.config import ModelSettings
from deploy.plan.model import DraftFacts, ModelFacts, inspect_model, mapped_within
from kernels.selection import select_backend
from tests.engine.gguf.files import make_gguf
from tests.harness.checkpoints import make_checkpoint
from tests.kernels.backends import lend_kernels
from tests.text.backends import byte_level
from wire.errors import ConfigError, ModelError
from wire.served_model import ServedModel


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lend_kernels(tmp_path / "cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def bytes_of_matrices(folder: Path) -> int:
    return sum(one.nbytes for one in load_file(folder / "model.safetensors").values() if one.dim() == 2)


def test_what_is_known_of_a_folder(tmp_path: Path) -> None:
    folder = make_checkpoint("llama-gqa", tmp_path / "small")
    model = inspect_model(ModelSettings(path=str(folder), block_size=32), "cpu")
    assert (model.served.name, model.served.folder, model.served.dtype) == ("small", str(folder), "float32")
    assert model.served.layout.block_size == 32
    assert model.served.layout.block_bytes == 16384  # 2 layers, keys and values, 2 heads of 16, 32 tokens, 4 bytes
    assert model.context_bytes == 32 * 16384
    assert model.weight_bytes == bytes_of_matrices(folder)
    assert model.is_mapped


@pytest.mark.parametrize(("device", "weight_cache_bytes"), [("cuda", 1 << 30), ("cpu", 0), ("cpu", 100)])
def test_weights_that_the_cache_does_not_take_count_for_each_worker(device: str, weight_cache_bytes: int) -> None:
    facts = ModelFacts(served=ServedModel.__new__(ServedModel), device=device, weight_bytes=200)
    mapped = mapped_within(facts, weight_cache_bytes)
    assert (mapped.is_mapped, mapped.node_bytes) == (False, 0)
    shared = mapped_within(replace(facts, device="cpu", draft=DraftFacts("draft", 50)), 250)
    assert (shared.is_mapped, shared.node_bytes) == (True, 250)


def test_the_fingerprint_follows_weights_and_dtype_and_not_the_place(tmp_path: Path) -> None:
    one, same = (make_checkpoint("llama-gqa", tmp_path / name) for name in ("one", "same"))
    other = make_checkpoint("llama-gqa", tmp_path / "other", seed=1)
    fingerprints = [
        inspect_model(ModelSettings(path=str(folder)), "cpu").served.fingerprint for folder in (one, same, other)
    ]
    fingerprints.append(inspect_model(ModelSettings(path=str(one), dtype="bfloat16"), "cpu").served.fingerprint)
    assert fingerprints[0] == fingerprints[1]
    assert len(set(fingerprints)) == 3


def test_another_kv_dtype_is_another_layout_of_the_same_model(tmp_path: Path) -> None:
    folder = make_checkpoint("llama-gqa", tmp_path / "small")
    full, codes = (
        inspect_model(ModelSettings(path=str(folder), kv_dtype=name), "cpu").served for name in ("auto", "int8")
    )
    assert full.fingerprint == codes.fingerprint
    assert (full.layout.quantization, codes.layout.quantization) == ("none", "int8")
    assert full.layout.payload_bytes / codes.layout.payload_bytes == 4 * 16 / (16 + 2)


@pytest.mark.parametrize(
    ("arch", "settings", "message"),
    [
        ("mistral-window", {"kv_policy": "snapkv=25%"}, "snapkv=25%: the model has windows"),
        ("qwen2", {"allowed_kv_policies": ("h2o=25%",)}, "h2o=25%: the model has windows"),
    ],
)
def test_policies_that_drop_by_worth_are_refused(
    tmp_path: Path, arch: str, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        inspect_model(ModelSettings(path=str(make_checkpoint(arch, tmp_path / "model")), **settings), "cpu")


def test_the_first_policy_is_the_deployments_own(tmp_path: Path) -> None:
    settings = ModelSettings(
        path=str(make_checkpoint("llama-gqa", tmp_path)), allowed_kv_policies=("snapkv=25%", "full")
    )
    assert inspect_model(settings, "cpu").served.kv_policies == ("full", "snapkv=25%")


def test_sinks_are_another_layout_and_a_longer_context_of_the_same_model(tmp_path: Path) -> None:
    folder = make_checkpoint("llama-gqa", tmp_path / "small")
    policies = ("full", "sinks=4+60")
    full, sinks = (
        inspect_model(ModelSettings(path=str(folder), dtype="float32", kv_policy=policy), "cpu") for policy in policies
    )
    assert full.served.fingerprint == sinks.served.fingerprint
    assert (full.served.layout.num_sinks, full.served.max_context_len, full.context_bytes) == (0, 1024, 64 * 8192)
    layout = sinks.served.layout
    assert (layout.num_sinks, layout.window, sinks.served.max_context_len) == (4, 60, 1 << 20)
    assert sinks.context_bytes == 6 * 8192


def rename_layers(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_bytes())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))


def spoil_weights(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"][0] = math.nan
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (rename_layers, "have model.layers.1.input_layernorm.weight, which is no part of the model"),
        (spoil_weights, "tensor model.norm.weight has NaN or infinity"),
        (lambda folder: (folder / "tokenizer.json").unlink(), "tokenizer.json: missing"),
        (
            lambda folder: byte_level().save(str(folder / "tokenizer.json")),
            r"the tokenizer has a token \d+, config.json a",
        ),
    ],
    ids=["another number of layers", "NaN", "no tokenizer", "another tokenizer"],
)
def test_a_model_that_would_answer_wrongly_is_refused(
    tmp_path: Path, spoil: Callable[[Path], None], message: str
) -> None:
    folder = make_checkpoint("llama-gqa", tmp_path / "model")
    spoil(folder)
    for _ in range(2):
        with pytest.raises(ModelError, match=message):
            inspect_model(ModelSettings(path=str(folder)), "cpu")


def test_a_model_is_called_what_it_is_told() -> None:
    assert inspect_model(ModelSettings(served_name="gpt-5"), "cpu").served.name == "gpt-5"
    served = inspect_model(ModelSettings(served_name=("gpt-5", "gpt-6", "gpt-5")), "cpu").served
    assert (served.name, served.aliases) == ("gpt-5", ("gpt-6",))


def test_without_a_name_it_is_the_demo_model() -> None:
    model = inspect_model(ModelSettings(), "cpu")
    assert (model.served.name, model.served.folder) == ("demo-model", str(demo_model.CHECKPOINT))


def test_without_a_name_and_a_demo_model_it_says_what_to_give(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_model, "CHECKPOINT", tmp_path / "none")
    with pytest.raises(ConfigError, match="give a model: --model FOLDER"):
        inspect_model(ModelSettings(), "cpu")


def test_a_folder_that_is_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json is missing"):
        inspect_model(ModelSettings(path=str(tmp_path)), "cpu")


def test_modules_of_transformers_promise_no_tokens_and_share_no_weights(tmp_path: Path) -> None:
    folder = make_checkpoint("gpt-neox", tmp_path / "model")
    model = inspect_model(ModelSettings(path=str(folder)), "cpu")
    assert not model.served.batch_invariant
    assert (model.is_mapped, model.node_bytes) == (False, 0)
    assert model.worker_bytes(0) == model.weight_bytes > bytes_of_matrices(folder)
    with pytest.raises(ConfigError, match=r"speculation\.proposer: GPTNeoXForCausalLM runs by transformers' modules"):
        inspect_model(ModelSettings(path=str(folder)), "cpu", proposer="ngram")
    native = inspect_model(ModelSettings(path=str(make_checkpoint("llama-gqa", tmp_path / "llama"))), "cpu", "auto")
    assert native.served.batch_invariant


@pytest.mark.parametrize(
    ("exact", "proposer", "kernels", "is_promised"),
    [
        ("auto", "off", "triton", False),
        ("off", "off", "triton", False),
        ("on", "off", "triton-exact", True),
        ("on", "ngram", "triton-exact", False),
    ],
)
def test_a_gpu_promises_tokens_with_products_of_one_order(
    exact: str, proposer: str, kernels: str, is_promised: bool, tmp_path: Path
) -> None:
    """Without a device here `auto` is off."""
    settings = ModelSettings(path=str(make_checkpoint("llama-gqa", tmp_path / "llama")), exact=exact)
    model = inspect_model(settings, "cuda", proposer=proposer)
    assert (model.kernels, model.served.batch_invariant) == (kernels, is_promised)
    with pytest.raises(ConfigError, match=r"int8 weights need the C\+\+ kernels of a CPU"):
        inspect_model(replace(settings, weights="int8"), "cuda")


@pytest.mark.parametrize(
    ("folder", "dtype", "kernels"),
    [
        ("llama-gqa", "bfloat16", "triton-exact"),
        ("llama-gqa", "float32", "triton"),
        ("Q4_K", "bfloat16", "triton"),
        ("cohere", "bfloat16", "triton"),
    ],
)
def test_a_gpu_has_products_of_one_order_by_default_where_their_kind_was_timed(
    folder: str, dtype: str, kernels: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kernels.tiles.is_quick_in_order", lambda: True)
    monkeypatch.setattr("kernels.selection.select_backend", select_backend.__wrapped__)
    is_file = folder == "Q4_K"
    path = make_gguf(tmp_path, folder, "llama-tied") if is_file else make_checkpoint(folder, tmp_path / folder)
    for exact, expected in (("auto", kernels), ("on", "triton-exact"), ("off", "triton")):
        settings = ModelSettings(path=str(path), dtype=dtype, exact=exact)
        model = inspect_model(settings, "cuda")
        assert model.kernels == expected
        assert model.served.batch_invariant is (expected == "triton-exact" and folder != "cohere")
        if folder == "cohere":
            continue
        with_guesses = inspect_model(settings, "cuda", proposer="ngram")
        assert with_guesses.kernels == ("triton" if exact == "auto" else expected)


def test_products_of_one_order_have_kv_of_their_own(tmp_path: Path) -> None:
    folder = str(make_checkpoint("llama-gqa", tmp_path / "llama"))
    off, on = (inspect_model(ModelSettings(path=folder, exact=one), "cuda").served for one in ("off", "on"))
    assert off.fingerprint != on.fingerprint
    of_cpu = [inspect_model(ModelSettings(path=folder, exact=one), "cpu").served for one in ("off", "on")]
    assert of_cpu[0] == of_cpu[1]
    assert of_cpu[0].batch_invariant


def test_what_is_known_of_a_draft(tmp_path: Path) -> None:
    folder = make_checkpoint("llama-gqa", tmp_path / "model")
    other = make_checkpoint("llama-mqa", tmp_path / "draft", seed=1, num_hidden_layers=1)
    without, model = (
        inspect_model(ModelSettings(path=str(folder)), "cpu", draft=draft) for draft in (None, str(other))
    )
    assert model.served == without.served
    assert model.draft == DraftFacts(str(other), bytes_of_matrices(other), 4096)
    assert without.draft.folder is None
    assert model.worker_bytes(10 * 16384) == without.worker_bytes(10 * 16384) + 20 * 4096
    assert model.node_bytes == without.node_bytes + model.draft.weight_bytes


def rewrite(folder: Path, **fields: object) -> None:
    config = json.loads((folder / "config.json").read_bytes())
    (folder / "config.json").write_text(json.dumps({name: one for name, one in (config | fields).items() if one != ""}))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (
            lambda folder: make_checkpoint("llama-gqa", folder, vocab_size=300),
            "a vocab_size of 300, the model's is 256",
        ),
        (lambda folder: rewrite(folder, max_position_embeddings=512), "a max_position_embeddings of 512, less than"),
        (lambda folder: rewrite(folder, vocab_size=""), "vocab_size"),
        (lambda folder: rewrite(folder, hidden_size="wide"), "hidden_size"),
        (lambda folder: rewrite(folder, intermediate_size=64), "config.json makes it"),
        (rename_layers, "which is no part of the model"),
        (lambda folder: (folder / "model.safetensors").unlink(), "neither model.safetensors nor"),
        (lambda folder: swap_tokens(folder / "tokenizer.json"), "tokenizer.json gives 'A' the id"),
    ],
    ids=["vocabulary", "context", "lacks a field", "no number", "lies", "lies of layers", "no weights", "other tokens"],
)
def test_a_draft_that_is_none_of_the_model_is_refused_by_name(
    tmp_path: Path, spoil: Callable[[Path], object], message: str
) -> None:
    folder, draft = (make_checkpoint("llama-gqa", tmp_path / name) for name in ("model", "draft"))
    spoil(draft)
    with pytest.raises(ModelError, match=f"^speculation.draft: .*{message}"):
        inspect_model(ModelSettings(path=str(folder)), "cpu", draft=str(draft))


def swap_tokens(file: Path) -> None:
    tokenizer = json.loads(file.read_bytes())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["A"], vocabulary["B"] = vocabulary["B"], vocabulary["A"]
    file.write_text(json.dumps(tokenizer))


def test_other_weights_have_the_same_text_and_another_template_has_not(tmp_path: Path) -> None:
    folders = [make_checkpoint("llama-gqa", tmp_path / str(seed), seed=seed) for seed in range(3)]
    (folders[2] / "chat_template.jinja").write_text("{{ messages[0].content }}")
    one, other, chatty = (inspect_model(ModelSettings(path=str(folder)), "cpu").served for folder in folders)
    assert (one.text_hex, one.layout_hex) == (other.text_hex, other.layout_hex)
    assert one.fingerprint_hex != other.fingerprint_hex
    assert one.text_hex != chatty.text_hex
