"""`baton size`: computes the memory of a model, and the number of requests that fit on a GPU."""

import argparse
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from cli.size.capacity import Fit, RequestKV, Technique, techniques
from cli.size.shape import BITS, ModelShape
from cli.terminal import Subparsers, read_count, render
from deploy.plan.byte_size import format_bytes, parse_any_bytes, parse_bytes
from deploy.plan.config import ModelSettings
from deploy.plan.sizing import GPU_RESERVE_BYTES
from engine.checkpoint.gguf import TABLE_FILE, is_gguf
from engine.checkpoint.pulled import MODELS
from wire.errors import ConfigError, ModelError
from wire.kv_policy import Dropping, Sinks, parse_kv_policy

DESCRIPTION = """\
Tells the memory that a model takes: its weights, and its KV, the keys and values of all tokens of the requests that are
under way. From those it tells how many requests a GPU holds at once, and what other choices would change.

It is arithmetic from config.json: it needs neither the weights, nor a GPU, nor a cluster."""
GPUS = ("16GiB", "24GiB", "48GiB", "80GiB", "141GiB")
LIMITS = {"weights": "the weights", "activations": "weights and reserve", "kv": "KV"}


def add_parser(commands: Subparsers) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "size",
        help="tell the memory that a model takes",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    parser.add_argument(
        "model",
        metavar="MODEL",
        type=str,
        help="a folder with a config.json, or with such a folder named checkpoint; that file; or a GGUF file",
    )
    parser.add_argument(
        "--context", type=read_count, metavar="N", help="tokens of a request (default: the most it can)"
    )
    parser.add_argument("--concurrency", type=read_count, metavar="M", default=1, help="requests at once (default: 1)")
    parser.add_argument(
        "--gpu", type=str, metavar="SIZE", default="24GiB", help="memory of the GPU, as 80GiB or 80GB (default: 24GiB)"
    )
    parser.add_argument("--kv-dtype", choices=tuple(BITS), help="numbers that KV is kept in (default: the model's)")
    kept = parser.add_mutually_exclusive_group()
    kept.add_argument("--window", type=read_count, metavar="W", help="keep KV of the last W tokens (default: its own)")
    kept.add_argument(
        "--kv-policy",
        metavar="POLICY",
        help="what `baton up` would keep: full, or like sinks=4+1020, snapkv=25%%, h2o=25%%",
    )
    parser.add_argument("--json", action="store_true", help="print one object, for scripts")


def run(args: argparse.Namespace) -> int:
    path = _place(args.model)
    within = path / "checkpoint"
    path = within if (within / "config.json").exists() and not (path / "config.json").exists() else path
    shape = ModelShape.read(path)
    layout = shape.kv_layout(ModelSettings.block_size)
    policy = parse_kv_policy(args.kv_policy or "full")
    if isinstance(policy, Sinks):
        layout = replace(layout, window=policy.window, num_sinks=policy.num_sinks)
    dropping = policy if isinstance(policy, Dropping) else None
    if dropping and layout.window:
        raise ConfigError(f"--kv-policy {policy}: the model has windows")
    num_tokens = args.context or shape.max_context_len
    window = min(args.window or layout.window or num_tokens, num_tokens)
    kv = RequestKV(layout, num_tokens, BITS[shape.dtype], window if window < num_tokens else None, dropping)
    kv = kv.kept_in(args.kv_dtype) if args.kv_dtype else kv
    weight_bytes = _packed_bytes(path) if (path / TABLE_FILE).exists() else shape.weight_bytes()
    fit = Fit(parse_any_bytes(args.gpu, "--gpu"), weight_bytes, kv)
    if args.json:
        print(json.dumps(to_object(shape, fit, args.concurrency)))
    else:
        print(render_size((path if path.is_dir() else path.parent).resolve().name, shape, fit, args.concurrency))
    return 0


def _packed_bytes(folder: Path) -> int:
    """Counts the bytes of a GGUF file's weights in the CPU's kernels; reads no content."""
    import torch

    from engine.checkpoint.checkpoint import Checkpoint
    from engine.model.decoder import compute_dtype
    from engine.model.weights import count_bytes
    from kernels.selection import select_backend

    checkpoint, backend = Checkpoint(folder), select_backend(torch.device("cpu"))
    return count_bytes(checkpoint, compute_dtype(None, checkpoint.config, backend), backend)


def _place(model: str) -> Path:
    """Finds a folder or a config.json; for a GGUF file or a pulled name the converted folder."""
    path = Path(os.path.expanduser(model))
    if (path.is_file() and is_gguf(path)) or (model in MODELS and not path.exists() and MODELS[model].find()):
        from engine.checkpoint.hub import find_folder  # which imports torch

        return find_folder(model)
    if not path.exists():
        raise ModelError(f"{model[:64]} is neither a folder, a GGUF file nor a config.json")
    return path


def to_object(shape: ModelShape, fit: Fit, num_requests: int) -> dict[str, Any]:
    """Makes the object for scripts; bytes throughout."""
    kv = fit.kv
    return {
        "bytes_per_token": kv.bytes_per_token,
        "bytes_per_token_per_layer": kv.bytes_per_token_per_layer,
        "bytes_per_request": kv.num_bytes,
        "weight_bytes": fit.weight_bytes,
        "max_requests": fit.max_requests,
        "limited_by": fit.limited_by,
        "parameters": shape.num_parameters,
        "context": kv.num_tokens,
        "block_bytes": kv.block_bytes,
        "blocks_per_request": kv.num_blocks,
        "gpu_bytes": fit.device_bytes,
        "reserve_bytes": GPU_RESERVE_BYTES,
        "kv_room_bytes": fit.kv_room_bytes,
        "concurrency": num_requests,
        "total_bytes": fit.total_bytes(num_requests),
        "fits": num_requests <= fit.max_requests,
        "techniques": {one.name: _technique_object(one.fit) for one in techniques(shape, fit)},
    }


def _technique_object(fit: Fit) -> dict[str, int]:
    return {
        "bytes_per_token": fit.kv.bytes_per_token,
        "bytes_per_request": fit.request_bytes,
        "max_requests": fit.max_requests,
    }


def render_size(name: str, shape: ModelShape, fit: Fit, num_requests: int) -> str:
    """Renders the model, one request, the GPU, other GPUs, and each technique."""
    return "\n\n".join(
        [_model(name, shape), _parts(fit), _verdict(fit, num_requests), _gpus(fit), _techniques(shape, fit)]
    )


def _model(name: str, shape: ModelShape) -> str:
    heads = f"{shape.num_heads} query heads sharing {shape.num_kv_heads} KV heads of {shape.head_dim}"
    if shape.is_latent:
        heads = f"{shape.num_heads} heads sharing a latent vector of {shape.cached_values}"
    number = shape.num_parameters / 1e6
    parameters = f"{number / 1e3:.4g} billion" if number >= 1e3 else f"{number:.4g} million"
    kept = shape.dtype if shape.weight_bits == BITS[shape.dtype] else f"{shape.weight_bits} bits"
    first = f"{name}: {parameters} parameters in {kept}, context of {shape.max_context_len:,} tokens"
    return f"{first}\n{shape.num_layers} layers, {heads}"


def _parts(fit: Fit) -> str:
    kv = fit.kv
    layers = f"{format_bytes(kv.bytes_per_token_per_layer)} in each of {kv.layout.num_layers} layers"
    sinks = f"first {kv.layout.num_sinks:,} and the " if kv.layout.num_sinks else ""
    kept = "" if kv.window is None else f", of which the {sinks}last {kv.window:,} are kept"
    kept += "" if kv.dropping is None else f" of prompt, of which {kv.dropping} keeps a part"
    parts = (
        ("weights", fit.weight_bytes, ""),
        ("reserve", GPU_RESERVE_BYTES, "for activations and libraries; `baton up` leaves it free"),
        (
            "KV of a token",
            kv.bytes_per_token,
            f"its keys and values: {layers}",
        ),
        (
            "KV of a request",
            kv.num_bytes,
            f"{kv.num_tokens:,} tokens{kept}: {kv.num_blocks:,} blocks of {kv.layout.block_size} tokens",
        ),
    )
    return "\n".join(f"{name:<16} {format_bytes(size):>11}  {text}".rstrip() for name, size, text in parts)


def _verdict(fit: Fit, num_requests: int) -> str:
    gpu, room = f"A GPU of {format_bytes(fit.device_bytes)}", format_bytes(fit.kv_room_bytes)
    told = {
        "weights": f"{gpu} cannot hold the weights.",
        "activations": f"{gpu} holds the weights, but not the reserve beside them.",
        "kv": f"{gpu} has {room} left for KV: room for {fit.max_requests:,} such requests at once.",
    }[fit.limited_by]
    if num_requests == 1:
        return told
    verb = "which fits" if num_requests <= fit.max_requests else "which does not fit"
    return f"{told}\n{num_requests:,} at once take {format_bytes(fit.total_bytes(num_requests))} in all, {verb}."


def _gpus(fit: Fit) -> str:
    sizes = sorted({fit.device_bytes, *(parse_bytes(size, "GPU") for size in GPUS)})
    fits = [replace(fit, device_bytes=size) for size in sizes]
    rows = [
        (format_bytes(one.device_bytes), format_bytes(one.kv_room_bytes), f"{one.max_requests}", LIMITS[one.limited_by])
        for one in fits
    ]
    return render(("GPU", "left for KV", "requests at once", "limited by"), rows)


def _techniques(shape: ModelShape, fit: Fit) -> str:
    is_served = fit.kv.window in (None, fit.kv.layout.window)
    rows = [Technique("none", fit, "yes" if is_served else "not yet"), *techniques(shape, fit)]
    gpu = format_bytes(fit.device_bytes)
    head = ("change", "KV of a token", "of a request", f"requests on {gpu}", "in Baton")
    return render(head, [_row(one) for one in rows])


def _row(one: Technique) -> tuple[str, ...]:
    kv = one.fit.kv
    sizes = format_bytes(kv.bytes_per_token), format_bytes(one.fit.request_bytes)
    return one.name, *sizes, f"{one.fit.max_requests}", one.status
