"""The quantization that config.json declares, and the reader of its matrices.

| quant_method            | module     |
|-------------------------|------------|
| compressed-tensors, fp8 | compressed |
| awq                     | awq        |
| gptq                    | gptq       |
| mxfp4                   | mxfp4      |

Activations are never quantized: a checkpoint with static scales of activations is refused.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from engine.checkpoint.json_fields import JsonFields
from engine.checkpoint.quantized.awq import AwqScheme
from engine.checkpoint.quantized.compressed import CompressedScheme
from engine.checkpoint.quantized.gptq import GptqScheme
from engine.checkpoint.quantized.mxfp4 import Mxfp4Scheme
from engine.checkpoint.tensor_file import TensorFile
from kernels.quantized.matrix import Quantized

FIELDS = ("quantization_config", "compression_config")
SUPPORTED = "compressed-tensors (weights of 4 and 8 bits, FP8), fp8, awq, gptq or mxfp4"


class CodeReader(Protocol):
    """A reader of the matrices of a checkpoint that have codes."""

    def names(self, name: str) -> Sequence[str]:
        """Lists the tensors that a matrix is made of; empty for a matrix without codes."""

    def read(self, name: str, shape: tuple[int, ...], device: torch.device) -> Quantized:
        """Reads a matrix; on the device `meta` without content. Raises ModelError, which names a malformed matrix.

        shape: [..., depth]; all dimensions but the last are the matrix's columns, in their order.
        """


class Scheme(Protocol):
    """A declaration of quantized matrices in config.json."""

    def open(self, tensor_to_file: Mapping[str, TensorFile]) -> CodeReader:
        """Makes the reader of a checkpoint's matrices; reads nothing."""


def parse_scheme(config: JsonFields) -> Scheme | None:
    """Reads the quantization of config.json, None if absent. Raises ModelError for an unsupported one, or for two."""
    match [name for name in FIELDS if name in config]:
        case []:
            return None
        case [name]:
            fields = config.section(name)
        case [first, *_]:
            raise config.wrong(first, f"no {FIELDS[1]} beside it: a checkpoint has one quantization")
    match fields.text("quant_method", "compressed-tensors"):
        case "compressed-tensors":
            return CompressedScheme.parse(fields)
        case "fp8":
            return CompressedScheme.parse_fp8(fields)
        case "awq":
            return AwqScheme.parse(fields)
        case "gptq":
            return GptqScheme.parse(fields)
        case "mxfp4":
            return Mxfp4Scheme()
    raise fields.wrong("quant_method", SUPPORTED)
