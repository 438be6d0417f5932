"""Architectures without native code: transformers' modules over pages give transformers' tokens, or are refused."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXMLP

from engine.checkpoint.checkpoint import Checkpoint
from engine.checkpoint.fingerprint import DigestCache
from engine.engine import Engine
from engine.model.decoder import Decoder
from engine.model.loading import load_model
from engine.model.modules_model import ModulesModel
from engine.model.weights import check_weights, count_bytes
from engine.speculation.draft_folder import open_draft
from kernels.backend import KVPages
from kernels.cpu.library import best_isa
from kernels.selection import select_backend
from kernels.torch_backend import TorchBackend
from tests.harness.checkpoints import MODULES, choose_prompt, make_checkpoint, oracle_logits
from tests.harness.engines import drive, make_core, prefill, request, resume
from tests.harness.model_alone import PagedRun, generate
from tests.harness.node import Node
from tests.kernels.backends import make_backend
from wire.errors import ConfigError, ModelError
from wire.kv_policy import Dropping, parse_kv_policy
from wire.sampling import SamplingParams

CPU = torch.device("cpu")
LENGTHS = (1, 16, 17, 100)
NUM_TOKENS = 24
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)

Checkpoints = Callable[[str], Path]


def load(folder: Path, dtype: str = "float32", **settings: Any) -> ModulesModel:
    model = load_model(folder, dtype, CPU, 16, **settings)
    assert isinstance(model, ModulesModel)
    return model


@pytest.mark.parametrize("arch", MODULES)
def test_alone_in_chunks_and_handed_off_tokens_equal_transformers(checkpoint: Checkpoints, arch: str) -> None:
    model, chosen = load(checkpoint(arch)), [choose_prompt(checkpoint(arch), one, NUM_TOKENS) for one in LENGTHS]
    prompts, expected = [one.prompt_ids for one in chosen], [list(one.token_ids) for one in chosen]
    assert generate(model, prompts, NUM_TOKENS, chunk_len=37) == expected
    assert generate(model, prompts[-1:], NUM_TOKENS) == expected[-1:]
    node = Node(model.layout)
    decode = make_core(model, node)
    runs = resume(decode, prefill(make_core(model, node), prompts, GREEDY))
    assert [run.outputs[0] for run in runs] == expected
    assert decode.stats().computed_prompt_tokens == 0


@pytest.mark.parametrize("arch", ["gpt-neox", "olmoe"])
def test_a_step_may_sample_nothing(checkpoint: Checkpoints, arch: str) -> None:
    """As a lone prompt's first chunk does."""
    model, chosen = load(checkpoint(arch)), choose_prompt(checkpoint(arch), 100, NUM_TOKENS)
    assert generate(model, [chosen.prompt_ids], NUM_TOKENS, chunk_len=37) == [list(chosen.token_ids)]


def test_code_may_ask_a_product_for_its_dtype(tmp_path: Path) -> None:
    """As the router of HunYuan's experts does."""
    config = transformers.HunYuanMoEV1Config(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=4,
        moe_topk=2,
    )
    torch.manual_seed(0)
    reference: Any = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    reference.save_pretrained(tmp_path)
    prompt, model = list(range(2, 42)), load(tmp_path)
    run = PagedRun(model, [prompt], 1)
    logits = model.forward(run.batch([(run.rows[0], 40)]), KVPages(run.kv, run.scales))
    with torch.inference_mode():
        torch.testing.assert_close(logits[0], reference(torch.tensor([prompt])).logits[0, -1], rtol=1e-4, atol=1e-4)


def test_kernels_of_torch_give_the_same_tokens(checkpoint: Checkpoints) -> None:
    chosen = choose_prompt(checkpoint("gpt-neox"), 100, NUM_TOKENS)
    model = load(checkpoint("gpt-neox"), backend=TorchBackend())
    assert generate(model, [chosen.prompt_ids], NUM_TOKENS) == [list(chosen.token_ids)]


def test_a_zeroed_block_changes_the_tokens(checkpoint: Checkpoints) -> None:
    chosen = choose_prompt(checkpoint("gpt-neox"), 100, NUM_TOKENS)
    run = PagedRun(load(checkpoint("gpt-neox")), [chosen.prompt_ids], NUM_TOKENS)
    run.prefill(100)
    run.kv[run.rows[0].pages[4]] = 0
    assert run.decode(NUM_TOKENS) != [list(chosen.token_ids)]


@pytest.mark.parametrize("policy", ["full", "snapkv=40%", "h2o=40%"])
def test_modules_and_native_decoder_agree_where_both_run_a_model(checkpoint: Checkpoints, policy: str) -> None:
    folder = checkpoint("llama-gqa")
    prompt = choose_prompt(folder, 100, NUM_TOKENS).prompt_ids
    native, modules = (one.load(folder, "float32", CPU, 16) for one in (Decoder, ModulesModel))
    outputs = []
    for model in (native, modules):
        dropping = parse_kv_policy(policy)
        asked = replace(request(prompt, GREEDY), dropping=dropping if isinstance(dropping, Dropping) else None)
        outputs.append(drive(make_core(model), [asked])[0].outputs)
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize(("dtype", "kv_dtype", "most"), [("bfloat16", "auto", 0.1), ("float32", "int8", 0.02)])
def test_narrow_numbers_stay_close_to_transformers(
    checkpoint: Checkpoints, dtype: str, kv_dtype: str, most: float
) -> None:
    prompt = choose_prompt(checkpoint("stablelm"), 100, NUM_TOKENS).prompt_ids
    model, exact = load(checkpoint("stablelm"), dtype, kv_dtype=kv_dtype), oracle_logits(checkpoint("stablelm"), prompt)
    run = PagedRun(model, [prompt], 1)
    logits = model.forward(run.batch([(run.rows[0], 100)]), KVPages(run.kv, run.scales))
    assert logits.dtype is torch.float32
    assert 0 < (logits[0] - exact[-1]).abs().max() < most * exact[-1].abs().max()


def test_an_engine_in_process_serves_it(checkpoint: Checkpoints) -> None:
    chosen = choose_prompt(checkpoint("starcoder2"), 100, NUM_TOKENS)
    engine = Engine.load(str(checkpoint("starcoder2")), dtype="float32")
    assert engine.core.model.layout.window == 48
    assert engine.generate([chosen.prompt_ids], GREEDY)[0].choices[0].token_ids == list(chosen.token_ids)


def test_bytes_of_weights_are_counted_without_content(checkpoint: Checkpoints) -> None:
    found = Checkpoint(checkpoint("opt"))
    check_weights(found)
    num_bytes = sum(one.nbytes for one in load_file(checkpoint("opt") / "model.safetensors").values())
    head = 256 * 64 * 4  # tied: once as an embedding, once as a packed product
    assert count_bytes(found, torch.float32, make_backend(best_isa())) == num_bytes + head
    assert count_bytes(found, torch.bfloat16, select_backend(CPU)) == (num_bytes + head) // 2


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "code of its own": ({"model_type": "falcon"}, "falcon .*: its code has attention of its own"),
    "ALiBi": ({"model_type": "bloom"}, r"bloom .*: its positions are biases of scores \(ALiBi\)"),
    "a state space": (
        {"model_type": "mamba", "num_hidden_layers": 2},
        "mamba .*: its layers.* have state that is not KV",
    ),
    "a token shift": ({"model_type": "rwkv", "num_hidden_layers": 2}, "rwkv .*: its layers have state that is not KV"),
    "state beside attention": (
        {"model_type": "falcon_h1", "num_hidden_layers": 2},
        "falcon_h1 .*: its layers.* have state that is not KV",
    ),
    "delta nets": (
        {"model_type": "qwen3_next", "num_hidden_layers": 4},
        "qwen3_next .*: its layers of linear_attention have state that is not KV",
    ),
    "convolutions": (
        {"model_type": "lfm2", "num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]},
        "lfm2 .*: its layers of conv have state that is not KV",
    ),
    "latent attention": ({"model_type": "deepseek_v3"}, "deepseek_v3 .*: its attention is latent"),
    "an encoder and a decoder": ({"model_type": "t5"}, "t5 .*: it has an encoder"),
    "an encoder": (
        {"model_type": "bert", "num_hidden_layers": 2, "architectures": ["BertLMHeadModel"]},
        "bert .*: its tokens see the tokens after them",
    ),
    "no language model": (
        {"model_type": "gpt_neox", "architectures": ["GPTNeoXForSequenceClassification"]},
        "gpt_neox .*: GPTNeoXForSequenceClassification is no decoder-only language model",
    ),
    "vision": ({"model_type": "llava"}, r"llava .*: it has parts besides text \(vision_config\)"),
    "speech": ({"model_type": "whisper"}, "whisper .*: it has an encoder"),
    "an unknown kind": (
        {"model_type": "of_my_own", "auto_map": {"AutoModelForCausalLM": "evil.Model"}},
        r"of_my_own .*: transformers 5\S+ does not know it, and code of its own \(auto_map\) is never run",
    ),
    "heads that do not fit": (
        {"model_type": "gpt_neox", "hidden_size": 65, "num_attention_heads": 4},
        "gpt_neox .*: transformers 5\\S+ cannot run it: .*divisible",
    ),
    "a word for a number": ({"model_type": "opt", "hidden_size": "many"}, "opt .*: transformers 5\\S+ cannot run it: "),
    "too many layers": ({"model_type": "opt", "num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000"),
    "a context of no size": (
        {"model_type": "gpt_neox", "num_hidden_layers": 1, "max_position_embeddings": 1},
        "max_position_embeddings is 1, expected an integer from 16",
    ),
    "a rotation by length": (
        {"model_type": "gpt_neox", "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
        "gpt_neox .*: its rotary embedding depends on a request's length",
    ),
    "layers before they are listed": ({"model_type": "cohere2", "num_hidden_layers": 10**9}, "layers is 1000000000"),
    "another class": (
        {"model_type": "gpt_neox", "architectures": ["MyForCausalLM"], "auto_map": {"AutoModelForCausalLM": "my.My"}},
        "gpt_neox .*: MyForCausalLM is not transformers' class GPTNeoXForCausalLM, and code of its own is never run",
    ),
    "codes": (
        {"model_type": "gpt_neox", "quantization_config": {"quant_method": "awq"}},
        "quantization_config is read of native architectures alone",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_models_that_pages_cannot_serve_are_refused_with_the_reason(tmp_path: Path, kind: str) -> None:
    config, message = REFUSED[kind]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=message) as refused:
        Checkpoint(tmp_path)
    assert "\n" not in refused.value.message


def test_classes_of_a_classifier_are_not_made(tmp_path: Path) -> None:
    make_checkpoint("gpt-neox", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | {"num_labels": 10**12}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert Checkpoint(tmp_path).config.architecture == "GPTNeoXForCausalLM"


@pytest.mark.parametrize(
    ("stored", "message"),
    [
        ("experts.9.gate_proj.weight", r"the weights lack model\.layers\.0\.mlp\.experts\.0\.gate_proj\.weight"),
        ("experts.0.gate.weight", r"the weights lack model\.layers\.0\.mlp\.experts\.0\.gate_proj\.weight"),
        ("experts.0.gate_proj.weight", "olmoe is not supported: transformers .* cannot run it"),
    ],
)
def test_experts_that_cannot_be_joined_are_refused(tmp_path: Path, stored: str, message: str) -> None:
    """One that is numbered or named otherwise, or of another shape."""
    make_checkpoint("olmoe", tmp_path)
    tensors, part = load_file(tmp_path / "model.safetensors"), "model.layers.0.mlp"
    tensors[f"{part}.{stored}"] = tensors.pop(f"{part}.experts.0.gate_proj.weight").T.contiguous()
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=message):
        load(tmp_path)


def test_a_head_that_is_no_copy_of_the_embeddings_it_is_tied_to_is_refused(tmp_path: Path) -> None:
    make_checkpoint("gpt-neox", tmp_path)
    config = json.loads((tmp_path / "config.json").read_bytes())
    (tmp_path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    with pytest.raises(ModelError, match=r"config\.json: tie_word_embeddings is true, and .* differs from the embedd"):
        load(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["embed_out.weight"] = tensors["gpt_neox.embed_in.weight"].clone()
    save_file(tensors, tmp_path / "model.safetensors")
    load(tmp_path)


def test_code_that_mixes_tokens_by_itself_is_refused(checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    forward: Any = GPTNeoXMLP.forward
    monkeypatch.setattr(GPTNeoXMLP, "forward", lambda module, states: forward(module, states + states.roll(1, 1)))
    with pytest.raises(ModelError, match="its tokens see earlier ones by other ways than attention"):
        load(checkpoint("gpt-neox"))


def test_windows_that_the_code_does_not_apply_are_refused(tmp_path: Path) -> None:
    make_checkpoint("stablelm", tmp_path, sliding_window=32)
    with pytest.raises(ModelError, match=r"has windows \(32, 32\), its code gives attention \(None, None\)"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda tensors: tensors.update({"gpt_neox.other": tensors.pop("gpt_neox.layers.0.mlp.dense_h_to_4h.bias")}),
            "the weights lack gpt_neox.layers.0.mlp.dense_h_to_4h.bias",
        ),
        (
            lambda tensors: tensors.pop("gpt_neox.layers.1.mlp.dense_h_to_4h.bias"),
            r"the weights have 99712 numbers, config\.json makes a model of 99840: some are missing",
        ),
        (
            lambda tensors: tensors.update({"gpt_neox.layers.2.bias": torch.zeros(3)}),
            "the weights may not have gpt_neox.layers.2.bias",
        ),
        (
            lambda tensors: tensors.update({"embed_out.weight": torch.zeros(64, 256)}),
            r"the weights have another shape of \('lm_head.weight'",
        ),
        (lambda tensors: tensors["embed_out.weight"].fill_(torch.nan), "embed_out.weight has NaN"),
    ],
)
def test_weights_that_are_not_the_models_are_refused(
    tmp_path: Path, change: Callable[[dict[str, torch.Tensor]], object], message: str
) -> None:
    make_checkpoint("gpt-neox", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=message):
        load(tmp_path)


def test_a_model_of_more_numbers_than_the_weights_takes_no_memory(tmp_path: Path) -> None:
    config = json.loads((make_checkpoint("gpt-neox", tmp_path) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"vocab_size": 10**12}))
    for refusing in (lambda: check_weights(Checkpoint(tmp_path)), lambda: load(tmp_path)):
        with pytest.raises(ModelError, match=r"config\.json makes a model of 128000000"):
            refusing()


def test_neither_sinks_nor_drafts_go_with_modules(checkpoint: Checkpoints) -> None:
    with pytest.raises(ConfigError, match=r"kv_policy sinks=4\+60: queries of OPTForCausalLM cannot be turned back"):
        load(checkpoint("opt"), kv_policy="sinks=4+60")
    native = Checkpoint(checkpoint("llama-gqa"))
    for folder, target in ((checkpoint("opt"), native), (native.folder, Checkpoint(checkpoint("opt")))):
        with pytest.raises(
            ModelError, match="OPTForCausalLM runs by transformers' modules, with which nothing is gues"
        ):
            open_draft(folder, target)


def test_blocks_of_another_version_of_transformers_have_other_names(
    checkpoint: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prints = []
    for found in ("5.17.0", "5.24.0"):
        monkeypatch.setattr("engine.checkpoint.checkpoint.version", lambda _, found=found: found)
        models = [Checkpoint(checkpoint(arch)) for arch in ("opt", "llama-gqa")]
        prints.append([one.fingerprint("float32", "1", DigestCache(tmp_path / "digests")) for one in models])
    assert [one == other for one, other in zip(*prints, strict=True)] == [False, True]


def test_a_native_model_is_loaded_without_transformers(checkpoint: Checkpoints) -> None:
    script = (
        "import sys, torch; from pathlib import Path; from engine.model.loading import load_model;"
        "load_model(Path(sys.argv[1]), None, torch.device('cpu'), 16); print('transformers' in sys.modules)"
    )
    command = [sys.executable, "-c", script, str(checkpoint("llama-gqa"))]
    assert subprocess.run(command, env=os.environ, capture_output=True, text=True, check=True).stdout == "False\n"
