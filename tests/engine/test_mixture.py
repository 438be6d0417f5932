"""Mixtures of experts: their configurations, and checkpoints that lack an expert or have one too many."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from engine.checkpoint.checkpoint import Checkpoint
from engine.checkpoint.config import ModelConfig
from engine.model.batch import CausalModel
from engine.model.decoder import Decoder
from engine.model.weights import check_weights, count_bytes
from kernels.cpu.library import best_isa
from kernels.routing import Gating
from kernels.triton_backend import TritonBackend
from tests.engine.test_checkpoint import reconfigure, replaced, reweigh
from tests.harness.checkpoints import VOCAB_SIZE, make_checkpoint
from tests.harness.model_alone import PagedRun, logits_of
from tests.kernels.backends import make_backend
from wire.errors import ModelError

CPU = torch.device("cpu")
SMALL: dict[str, Any] = {
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
MIXTRAL = SMALL | {"architectures": ["MixtralForCausalLM"]}
QWEN3 = SMALL | {"architectures": ["Qwen3MoeForCausalLM"], "moe_intermediate_size": 32}
GPT_OSS = SMALL | {"architectures": ["GptOssForCausalLM"]}

Checkpoints = Callable[[str], Path]
Tensors = dict[str, torch.Tensor]


def test_layers_of_qwen3_that_are_mixtures() -> None:
    def layers(**fields: Any) -> tuple[bool, ...]:
        mixture = ModelConfig.parse(QWEN3 | fields).mixture
        assert mixture is not None
        return mixture.layers

    assert layers() == (True,) * 4
    assert layers(mlp_only_layers=[0, 2]) == (False, True, False, True)
    assert layers(decoder_sparse_step=2) == (False, True, False, True)
    assert layers(decoder_sparse_step=2, mlp_only_layers=[3]) == (False, True, False, False)


def test_shares_follow_the_family_and_its_switch() -> None:
    configs = (MIXTRAL, QWEN3, QWEN3 | {"norm_topk_prob": True}, GPT_OSS)
    mixtures = [ModelConfig.parse(one).mixture for one in configs]
    shares = [one and one.shares for one in mixtures]
    assert shares == [Gating.OF_ALL_NORMED, Gating.OF_ALL, Gating.OF_ALL_NORMED, Gating.OF_CHOSEN]
    assert [one and (one.num_experts, one.num_chosen) for one in mixtures] == [(8, 2), (128, 8), (128, 8), (128, 4)]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (MIXTRAL | {"num_local_experts": 0}, "num_local_experts is 0, expected an integer from 1"),
        (QWEN3 | {"num_experts": 0}, "num_experts is 0"),
        (GPT_OSS | {"num_local_experts": -1}, "num_local_experts is -1"),
        (MIXTRAL | {"num_local_experts": 8.0}, "num_local_experts is 8.0"),
        (QWEN3 | {"num_experts": 8, "num_local_experts": 9}, "num_experts and num_local_experts are names of one"),
        (MIXTRAL | {"num_experts_per_tok": 9}, "num_experts_per_tok is 9, expected an integer from 1 to 8"),
        (GPT_OSS | {"num_experts_per_tok": 0}, "num_experts_per_tok is 0"),
        (QWEN3 | {"moe_intermediate_size": 0}, "moe_intermediate_size is 0"),
        (QWEN3 | {"decoder_sparse_step": 0}, "decoder_sparse_step is 0"),
        (QWEN3 | {"mlp_only_layers": [4]}, "mlp_only_layers is .4., expected a list of layers below 4"),
        (QWEN3 | {"mlp_only_layers": "0"}, "mlp_only_layers is 0"),
        (QWEN3 | {"shared_expert_intermediate_size": 64}, "shared_expert_intermediate_size is 64, expected none"),
        (MIXTRAL | {"n_shared_experts": 1}, "n_shared_experts is 1, expected none: shared experts"),
        (MIXTRAL | {"architectures": ["Qwen2MoeForCausalLM"]}, "Qwen2MoeForCausalLM is not supported"),
        (GPT_OSS | {"swiglu_limit": 10.0}, "swiglu_limit is 10.0, expected 7.0"),
        (GPT_OSS | {"swiglu_alpha": 1.0}, "swiglu_alpha is 1.0, expected 1.702"),
        (
            SMALL | {"architectures": ["LlamaForCausalLM"], "num_local_experts": 8},
            "num_local_experts is 8, expected none",
        ),
    ],
)
def test_wrong_fields_are_refused_by_name(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        ModelConfig.parse(config)


def linked(folder: Path, target: Path) -> Path:
    """Makes a copy of a checkpoint, of links."""
    target.mkdir(exist_ok=True)
    for file in folder.iterdir():
        (target / file.name).symlink_to(file)
    return target


def without(name: str) -> Callable[[Path], None]:
    return lambda folder: reweigh(folder, lambda tensors: tensors.pop(name))


def with_tensor(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Path], None]:
    return lambda folder: reweigh(folder, lambda tensors: tensors.update({name: change(tensors[name]).contiguous()}))


def with_another(name: str, like: str) -> Callable[[Path], None]:
    return lambda folder: reweigh(folder, lambda tensors: tensors.update({name: tensors[like].clone()}))


def with_config(**fields: Any) -> Callable[[Path], None]:
    return lambda folder: reconfigure(folder, **fields)


W1, W7 = (f"model.layers.1.block_sparse_moe.experts.{index}.w1.weight" for index in (5, 6))
GATE = "model.layers.0.mlp.gate.weight"
GATE_UP = "model.layers.1.mlp.experts.gate_up_proj"
FAULTS: dict[str, tuple[str, Callable[[Path], None], str]] = {
    "an expert missing": ("mixtral", without(W1), f"lack the tensor {W1}"),
    "an expert too many": ("mixtral", with_another(W7, W1), f"have {W7}, which is no part"),
    "more experts by the configuration": (
        "mixtral",
        with_config(num_local_experts=7),
        r"gate.weight has shape \[6, 64\]",
    ),
    "an expert of another shape": ("mixtral", with_tensor(W1, lambda one: one[1:]), rf"{W1} has shape \[127, 64\]"),
    "a router of other experts": ("qwen3-moe", with_tensor(GATE, lambda one: one[1:]), rf"{GATE} has shape \[8, 64\]"),
    "an expert in a dense layer": (
        "qwen3-moe",
        with_config(mlp_only_layers=[1, 2]),
        "lack the tensor model.layers.2.mlp",
    ),
    "a stacked expert missing": (
        "gpt-oss",
        with_tensor(GATE_UP, lambda one: one[1:]),
        rf"{GATE_UP} has shape \[7, 64, 256",
    ),
    "stacked experts missing": ("gpt-oss", without(GATE_UP), f"lack the tensor {GATE_UP}"),
    "biases missing": ("gpt-oss", without(f"{GATE_UP}_bias"), f"lack the tensor {GATE_UP}_bias"),
    "stacked experts of integers": (
        "gpt-oss",
        with_tensor(GATE_UP, lambda one: one.int()),
        f"{GATE_UP} is torch.int32",
    ),
    "sinks of other heads": (
        "gpt-oss",
        with_tensor("model.layers.0.self_attn.sinks", lambda one: one[1:]),
        r"layers.0.self_attn.sinks has shape \[3\]",
    ),
    "a router's bias missing": ("gpt-oss", without("model.layers.0.mlp.router.bias"), "lack the tensor .*router.bias"),
}


@pytest.mark.parametrize(("arch", "spoil", "message"), FAULTS.values(), ids=FAULTS)
def test_experts_that_do_not_fit_are_refused_by_tensor(
    checkpoint: Checkpoints, tmp_path: Path, arch: str, spoil: Callable[[Path], None], message: str
) -> None:
    folder = linked(checkpoint(arch), tmp_path)
    spoil(folder)
    with pytest.raises(ModelError, match=message):
        check_weights(Checkpoint(folder))


@pytest.fixture(scope="module")
def mxfp4(checkpoint: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """gpt-oss with drawn experts in MXFP4, and with the weights that transformers makes of them."""
    made = tuple(linked(checkpoint("gpt-oss"), tmp_path_factory.mktemp(name)) for name in ("packed", "plain"))
    packed, plain = (load_file(folder / "model.safetensors") for folder in made)
    generator = torch.Generator().manual_seed(0)
    for name in [name for name in plain if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        num_experts, depth, columns = plain[name].shape
        shape = (num_experts, columns, depth // 32)
        packed[f"{name}_blocks"] = torch.randint(256, (*shape, 16), generator=generator, dtype=torch.uint8)
        packed[f"{name}_scales"] = torch.randint(121, 125, shape, generator=generator, dtype=torch.uint8)
        plain[name] = convert_moe_packed_tensors(
            packed[f"{name}_blocks"], packed[f"{name}_scales"], dtype=torch.float32
        ).contiguous()
        del packed[name]
    for folder, tensors in zip(made, (packed, plain), strict=True):
        save_file(tensors, replaced(folder / "model.safetensors"), {"format": "pt"})
    reconfigure(made[0], quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})
    return made[0], made[1]


def logits(model: CausalModel) -> torch.Tensor:
    prompts = torch.randint(VOCAB_SIZE, (3, 40), generator=torch.Generator().manual_seed(1)).tolist()
    run = PagedRun(model, prompts, 8)
    run.prefill(40)
    return run.step(1).clone()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kernels", ["torch", best_isa()])
def test_mxfp4_has_the_bits_of_the_weights_that_it_stands_for(
    mxfp4: tuple[Path, Path], kernels: str, dtype: str
) -> None:
    packed, plain = (logits(Decoder.load(one, dtype, CPU, 16, make_backend(kernels))) for one in mxfp4)
    assert torch.equal(packed, plain)


def test_mxfp4_is_refused_on_a_gpu(mxfp4: tuple[Path, Path]) -> None:
    with pytest.raises(ModelError, match=r"model\.layers\.0\.mlp\.experts: no kernel of a GPU multiplies experts"):
        count_bytes(Checkpoint(mxfp4[0]), torch.bfloat16, TritonBackend())


@pytest.mark.parametrize("arch", ["mixtral", "gpt-oss"])
def test_logits_of_triton_are_near_the_logits_of_torch(checkpoint: Checkpoints, arch: str) -> None:
    found, expected = (
        logits(Decoder.load(checkpoint(arch), "float32", CPU, 16, backend))
        for backend in (TritonBackend(), make_backend("torch"))
    )
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_a_router_is_not_rounded_with_the_weights(checkpoint: Checkpoints) -> None:
    model = Decoder.load(checkpoint("mixtral"), "float32", CPU, 16, make_backend(f"{best_isa()}-int8"))
    router, *experts = model.weights.layers[0].feed_forward.matrices
    assert router.data.dtype is torch.float32
    assert {one.data.dtype for one in experts} == {torch.uint8}


@pytest.mark.parametrize("kernels", ["torch", best_isa()])
def test_a_policy_of_sinks_goes_with_learned_sinks(tmp_path: Path, kernels: str) -> None:
    """Within its window it changes nothing; beyond, kernels agree on what it changes."""
    make_checkpoint("gpt-oss", tmp_path, layer_types=["full_attention"] * 2)
    prompts = torch.randint(VOCAB_SIZE, (2, 90), generator=torch.Generator().manual_seed(1)).tolist()

    def run(kernels: str, policy: str, prompts: list[list[int]]) -> torch.Tensor:
        model = Decoder.load(tmp_path, "float32", CPU, 16, make_backend(kernels), kv_policy=policy)
        return logits_of(model, prompts, 8, 23)

    policy, short = "sinks=4+60", [one[:40] for one in prompts]
    torch.testing.assert_close(run(kernels, policy, short), run("torch", "full", short), rtol=1e-4, atol=1e-4)
    found = run(kernels, policy, prompts)
    torch.testing.assert_close(found, run("torch", policy, prompts), rtol=1e-4, atol=1e-4)
    assert (found[0] - run(kernels, "full", prompts)[0]).abs().max() > 0.1


SCALES = f"{GATE_UP}_scales"
SPOILED: dict[str, tuple[Callable[[Path], None], str]] = {
    "a scale that is NaN": (
        with_tensor(SCALES, lambda one: one.index_fill(2, torch.tensor([1]), 255)),
        f"{SCALES} has a scale of 255, which is NaN",
    ),
    "scales of another shape": (with_tensor(SCALES, lambda one: one[:, 1:]), rf"{SCALES} has shape \[8, 255, 2\]"),
    "no scales": (without(SCALES), f"lack the tensor {SCALES}"),
    "blocks of floats": (with_tensor(f"{GATE_UP}_blocks", torch.Tensor.half), "_blocks is torch.float16, expected"),
    "scales too large": (
        with_tensor(SCALES, lambda one: one.fill_(254)),
        r"experts\.0\.gate_proj\.weight has NaN or infinity as float32",
    ),
}


@pytest.mark.parametrize(("spoil", "message"), SPOILED.values(), ids=SPOILED)
def test_wrong_mxfp4_is_refused_by_tensor(
    mxfp4: tuple[Path, Path], tmp_path: Path, spoil: Callable[[Path], None], message: str
) -> None:
    folder = linked(mxfp4[0], tmp_path)
    spoil(folder)
    with pytest.raises(ModelError, match=message):
        Decoder.load(folder, "float32", CPU, 16, make_backend("torch"))
