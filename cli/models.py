"""`baton models`: the table of served architectures, with the way each runs, its files, and the fields it refuses.

A fold over the tables of the readers. A field is refused if `parse_config` refuses a small configuration with it.
"""

import argparse
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from cli.terminal import Subparsers, render
from wire.errors import ModelError

DESCRIPTION = """\
Lists the architectures that are served: how each runs, the name that it has in GGUF files, and which fields of
config.json are refused of it. `baton up --model FOLDER` says what it refuses of a checkpoint, with file and field."""
HEAD = ("architecture", "model_type", "runs", "one mind", "GGUF", "of", "refused")
SMALL: Mapping[str, Any] = {
    "head_dim": 16,
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
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
Rows = tuple[list[Sequence[str]], dict[str, Sequence[str]]]
"""Rows, and what is refused by its reasons."""
UNMADE = "transformers makes no model of a small configuration"


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
    native, of_all = native_rows()
    others, reasons = other_rows()
    facts = {**widths(), **of_all}
    if args.markdown:
        print(page([*native, *others], facts, reasons))
        return 0
    print(render(HEAD, [*native, *others]))
    print("\n" + "\n".join(f"{name}: {', '.join(items)}" for name, items in {**facts, **reasons}.items()))
    return 0


def native_rows() -> Rows:
    """Makes a row of each native architecture; what all of them refuse stands apart."""
    from engine.checkpoint.families.table import FAMILIES
    from engine.checkpoint.gguf.config import ARCHITECTURES, architecture_of
    from engine.checkpoint.text_part import TEXT_PARTS

    refused = {name: refusals(name) for name in FAMILIES}
    of_all = [probe for probe in PROBES if all(probe in one for one in refused.values())]
    rows = []
    for name, family in FAMILIES.items():
        files = sorted({arch for arch in ARCHITECTURES for one in (False, True) if architecture_of(arch, one) == name})
        wholes = [whole for whole, part in TEXT_PARTS.items() if part.architecture == name]
        own = [probe for probe in refused[name] if probe not in of_all]
        rows.append(_row(name, family.model_type, "native", "yes", *map(", ".join, (files, wholes, own))))
    return rows, {"refused of all native ones": of_all}


def other_rows() -> Rows:
    """Makes a row of each other decoder of transformers whose small configuration passes the dry run.

    Returns the `model_type` of the others, too, by the reasons that refuse them. Takes some 20 s.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    from engine.checkpoint.families.table import FAMILIES
    from engine.checkpoint.text_part import TEXT_PARTS

    rows, reasons = [], defaultdict[str, list[str]](list)
    for model_type, name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        if name in FAMILIES or name in TEXT_PARTS:
            continue
        for kept in ([*SMALL][1:], SMALL, ()):
            small = {field: SMALL[field] for field in kept}
            found = refusal({**small, "model_type": model_type, "architectures": [name]})
            if "cannot run it" not in found:
                break
        if found:
            reasons[UNMADE if "cannot run it" in found else found].append(model_type)
        else:
            rows.append(_row(name, model_type, "transformers", "no", "", "", ""))
    return rows, {f"refused: {reason}": names for reason, names in sorted(reasons.items())}


def refusals(architecture: str) -> list[str]:
    """Lists the probes that the reader of config.json refuses of a small model of this architecture."""
    small = {**SMALL, "architectures": [architecture]}
    return [name for name, fields in PROBES.items() if refusal({**small, **fields})]


def refusal(config: Mapping[str, Any]) -> str:
    """Returns the reason for which config.json's object is refused, "" if it is taken."""
    from engine.checkpoint.checkpoint import parse_config

    try:
        parse_config(config)
    except ModelError as error:
        return error.message.partition(" is not supported: ")[2] or error.message
    return ""


def widths() -> dict[str, Sequence[str]]:
    """Lists the widths in which native architectures are read, and the version of transformers that runs others."""
    import transformers

    from engine.checkpoint.config import DTYPES
    from engine.checkpoint.gguf.blocks import TYPES
    from engine.checkpoint.quantized.scheme import SUPPORTED

    return {
        "safetensors": DTYPES,
        "GGUF": [*TYPES],
        "quantization_config": [SUPPORTED],
        "transformers": [transformers.__version__],
    }


def page(
    rows: Sequence[Sequence[str]], facts: Mapping[str, Sequence[str]], reasons: Mapping[str, Sequence[str]]
) -> str:
    """Writes docs/models.md."""
    table = [f"| {' | '.join(row)} |" for row in (HEAD, ["---"] * len(HEAD), *rows)]
    lists = [[f"- {name}: {', '.join(items)}" for name, items in listed.items()] for listed in (facts, reasons)]
    return "\n".join([PAGE_HEAD, *table, "", *lists[0], OTHERS_HEAD, *lists[1]])


def _row(*cells: str) -> Sequence[str]:
    return [cell or "-" for cell in cells]


PAGE_HEAD = """\
# Models

Made by `baton models --markdown`: native rows of the tables that the readers of checkpoints use, the others by a dry
run of a small configuration through transformers' classes. A test holds page and code together.

- `native`: Baton's own decoder, in which no row's result depends on other rows of its step (`one mind`): a request that
  goes on with another worker goes on with the very same tokens.
- `transformers`: transformers' own modules over the same pages, from plain safetensors, without that promise and
  without speculation ([how](decisions/0053-modules-of-transformers.md)).
- `GGUF`: the architecture's name in such files, `-` where they are not read.
- `of`: models with other parts, whose text part this is; it is served alone.
- `refused`: what config.json may not say of it; every refusal names the field.
"""
OTHERS_HEAD = """
## Refused

By `model_type`, with the reason that `baton up` gives; a checkpoint's own configuration decides.
"""
