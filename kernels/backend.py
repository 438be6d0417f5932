"""The kernels of a device, as one value that the engine is given."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels import reference

WriteKv = Callable[[Tensor, Tensor, Tensor, Tensor], None]
PagedDecodeAttention = Callable[[Tensor, Tensor, Tensor, Tensor, float, int | None], Tensor]
PagedPrefillAttention = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, float, int | None], Tensor]


@dataclass(frozen=True)
class KernelBackend:
    """The three kernels of one implementation; `kernels.reference` holds their contracts.

    `version` is part of the model fingerprint: it changes whenever the numbers may, so that KV of other kernels is
    never mistaken for that of these.
    """

    name: str
    version: str
    write_kv: WriteKv
    paged_decode_attention: PagedDecodeAttention
    paged_prefill_attention: PagedPrefillAttention


def select_backend(device: torch.device) -> KernelBackend:
    """Selects Triton on a CUDA device, the torch reference elsewhere. ImportError on a CUDA device without Triton."""
    return _triton_backend() if device.type == "cuda" else _reference_backend()


def _reference_backend() -> KernelBackend:
    return KernelBackend(
        name="reference",
        version="reference-1",
        write_kv=reference.write_kv,
        paged_decode_attention=reference.paged_decode_attention,
        paged_prefill_attention=reference.paged_prefill_attention,
    )


def _triton_backend() -> KernelBackend:
    # Imported here so that a machine without Triton serves on its CPU.
    from kernels import kv_write, paged_decode

    return KernelBackend(
        name="triton",
        version="triton-1",
        write_kv=kv_write.write_kv,
        paged_decode_attention=paged_decode.paged_decode_attention,
        paged_prefill_attention=reference.paged_prefill_attention,
    )
