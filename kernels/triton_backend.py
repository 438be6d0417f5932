"""The operations of a decoder on a GPU: Triton for what touches pages, torch for the rest."""

from kernels import int4, kv_write, paged_decode
from kernels.torch_backend import TorchBackend


class TritonBackend(TorchBackend):
    """Torch's operations, with Triton's attention of decoding rows and write of KV."""

    name = "triton"
    version = "triton-4"

    write_kv = staticmethod(kv_write.write_kv)
    decode = staticmethod(paged_decode.paged_decode_attention)
    close_blocks = staticmethod(int4.close_blocks)
