"""`baton models`: the architectures that are served, how each runs, from which files, and what is refused of it.

A fold over the tables of the readers; what is refused is what ModelConfig.parse refuses of a small configuration.
"""

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from cli.terminal import Subparsers, render
from wire.errors import ModelError

DESCRIPTION = """\
Lists the architectures that are served: how each runs, the name that it has in GGUF files, and which fields of
config.json are refused of it. `baton up --model FOLDER` says what it refuses of a checkpoint, with file and field."""
HEAD = ("architecture", "model_type", "runs", "one mind", "GGUF", "of", "refused")
SMALL: Mapping[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "eos_token_id": 1,
}
PROBES: Mapping[str, Mapping[str, Any]] = {
    "rope dynamic": {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
    "rope of an unknown kind": {"rope_scaling": {"rope_type": "unknown"}},
    "partial rotary": {"partial_rotary_factor": 0.5},
    "another activation": {"hidden_act": "relu2", "hidden_activation": "relu2"},
    "attention both ways": {"use_bidirectional_attention": True},
    "soft caps": {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    "multipliers": {"logits_scaling": 8.0},
    "layers without rope": {"no_rope_layers": [1, 1, 1, 0]},
    "experts": {"num_experts": 8, "num_local_experts": 8},
    "latent attention": {"kv_lora_rank": 512},
}
"""Fields of config.json by what they mean, each to be refused by the architectures that lack it."""


def add_parser(commands: Subparsers) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "models",
        help="list the architectures that are served",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--markdown", action="store_true", help="print the page docs/models.md")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    rows, of_all = native_rows()
    if args.markdown:
        print(page(rows, of_all))
        return 0
    print(render(HEAD, rows))
    print("\n" + "\n".join(f"{name}: {', '.join(items)}" for name, items in {**widths(), **of_all}.items()))
    return 0


def native_rows() -> tuple[list[tuple[str, ...]], dict[str, Sequence[str]]]:
    """Makes a row of each native architecture; what all of them refuse stands apart."""
    from engine.checkpoint.families import FAMILIES
    from engine.checkpoint.gguf.config import ARCHITECTURES, architecture_of
    from engine.checkpoint.text_part import TEXT_PARTS

    refused = {name: refusals(name) for name in FAMILIES}
    of_all = [probe for probe in PROBES if all(probe in one for one in refused.values())]
    rows = []
    for name, family in FAMILIES.items():
        files = sorted({arch for arch in ARCHITECTURES for one in (False, True) if architecture_of(arch, one) == name})
        wholes = [whole for whole, part in TEXT_PARTS.items() if part.architecture == name]
        own = [probe for probe in refused[name] if probe not in of_all]
        cells = (name, family.model_type, "native", "yes", *map(", ".join, (files, wholes, own)))
        rows.append(tuple(cell or "-" for cell in cells))
    return rows, {"refused of all": of_all}


def refusals(architecture: str) -> list[str]:
    """Lists the probes that the reader of config.json refuses of a small model of this architecture."""
    return [name for name, fields in PROBES.items() if not _is_taken(architecture, fields)]


def _is_taken(architecture: str, fields: Mapping[str, Any]) -> bool:
    from engine.checkpoint.config import ModelConfig

    try:
        ModelConfig.parse({**SMALL, "architectures": [architecture], **fields})
    except ModelError:
        return False
    return True


def widths() -> dict[str, Sequence[str]]:
    """Lists the widths in which every native architecture is read."""
    from engine.checkpoint.compressed import SUPPORTED
    from engine.checkpoint.config import DTYPES
    from engine.checkpoint.gguf.blocks import TYPES

    return {"safetensors": DTYPES, "GGUF": [*TYPES], "quantization_config": [SUPPORTED]}


def page(rows: Sequence[Sequence[str]], of_all: Mapping[str, Sequence[str]]) -> str:
    """Writes docs/models.md."""
    table = [HEAD, ["---"] * len(HEAD), *rows]
    lines = [f"| {' | '.join(row)} |" for row in table]
    rest = [f"- {name}: {', '.join(items)}" for name, items in {**widths(), **of_all}.items()]
    return "\n".join([PAGE_HEAD, *lines, "", *rest])


PAGE_HEAD = """\
# Models

Made by `baton models --markdown`, of the tables that the readers of checkpoints use; a test holds the two together.

- `native`: Baton's own decoder, in which no row's result depends on other rows of its step (`one mind`): a request that
  goes on with another worker goes on with the very same tokens.
- `GGUF`: the architecture's name in such files, `-` where they are not read.
- `of`: models with other parts, whose text part this is; it is served alone.
- `refused`: what config.json may not say of it; every refusal names the field.
"""
