"""The tensors of a decoder, read from a checkpoint."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from engine.checkpoint.checkpoint import Checkpoint
from engine.checkpoint.config import ModelConfig
from engine.checkpoint.families.mixture import MixtureConfig
from engine.model.feed_forward import DenseLayer, ExpertLinear, FeedForward, Linear, MixtureLayer
from kernels.backend import Backend, Heads, Weight
from kernels.cpu.library import NoKernels
from kernels.quantized.matrix import Quantized
from kernels.torch_backend import TorchBackend
from wire.errors import ModelError

Packing = Callable[[str, Callable[[], Weight]], Weight]
"""A function that finds the packed matrix by its first tensor's name, or packs it by the given function."""
Pack = Callable[[torch.Tensor], Weight]
"""A backend's function that packs a plain matrix."""
META = torch.device("meta")
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def pack_anew(_name: str, pack: Callable[[], Weight]) -> Weight:
    """Implements `Packing` for a process with private weights."""
    return pack()


@dataclass(frozen=True, kw_only=True)
class LayerWeights:
    """A layer. Query, key and value are one matrix, as are gate and up: fewer and larger products.

    row_norms: norms of columns of qkv. sinks: learned scores of query heads, float32. added_norm, added_mlp_norm: norms
    of what attention and the feed-forward layer add to states. A norm is None if the architecture has none.
    """

    attention_norm: torch.Tensor | None
    qkv: Linear
    row_norms: tuple[tuple[slice, torch.Tensor], ...] = ()
    heads: Heads
    sinks: torch.Tensor | None = None
    attention_output: Linear
    added_norm: torch.Tensor | None = None
    mlp_norm: torch.Tensor | None
    feed_forward: FeedForward
    added_mlp_norm: torch.Tensor | None = None


@dataclass(frozen=True)
class DecoderWeights:
    """embedding, head: [vocab_size, hidden_size], one object where they are tied."""

    embedding: Weight
    layers: tuple[LayerWeights, ...]
    norm: torch.Tensor
    head: Weight


LoadWeights = Callable[[Checkpoint, torch.dtype, torch.device, Backend], DecoderWeights]


class WeightLoader:
    """A reader of a checkpoint's weights into one dtype on one device, packed for one backend."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        dtype: torch.dtype,
        device: torch.device,
        backend: Backend,
        packing: Packing = pack_anew,
    ) -> None:
        self._checkpoint = checkpoint
        self._config: ModelConfig = checkpoint.native_config
        self._dtype = dtype
        self._device = device
        self._backend = backend
        self._packing = packing
        self._orders = _row_orders(checkpoint.native_config)

    def load(self) -> DecoderWeights:
        """Loads all weights. Raises ModelError if a tensor is missing or of the wrong shape."""
        config = self._config
        vocabulary = config.vocab_size, config.hidden_size
        is_stored, has_codes = HEAD in self._checkpoint, any(map(self._checkpoint.has_codes, (EMBEDDING, HEAD)))
        is_copy = is_stored and self._checkpoint.says_tied and not has_codes
        is_tied = config.tied_embeddings and (is_copy or not is_stored)
        embedding = self._packing(EMBEDDING, partial(self._pack_embedding, vocabulary, is_copy))
        head = embedding if is_tied else self._packed({HEAD: vocabulary})
        layers = tuple(self._layer(index) for index in range(config.num_layers))
        norm = self._norm("model.norm", config.hidden_size)
        norm = norm if self._device == META else norm / config.scalars.logits
        return DecoderWeights(embedding, layers, norm, head)

    def _pack_embedding(self, vocabulary: tuple[int, int], has_copy: bool) -> Weight:
        """Packs embeddings. Raises ModelError if the head that is stored beside them has to be a copy, and is none."""
        if has_copy:
            head, embedding = (self._tensor(name, *vocabulary) for name in (HEAD, EMBEDDING))
            if not head.is_meta and not torch.equal(head, embedding):
                raise ModelError(
                    f"config.json: tie_word_embeddings is true, and tensor {HEAD} differs from {EMBEDDING}: say false "
                    "where the stored head is right, else take the tensor out"
                )
        return self._pack({EMBEDDING: vocabulary}, self._backend.pack)

    def _layer(self, index: int) -> LayerWeights:
        config, attention, layer = self._config, self._config.attention, f"model.layers.{index}"
        hidden, is_mixture = config.hidden_size, config.mixture is not None and config.mixture.layers[index]
        queries, keys = attention.num_heads * attention.head_dim, attention.num_kv_heads * attention.head_dim
        family, norms = config.family, config.family.norms
        attend = f"{layer}.self_attn"
        query_norm, key_norm = None, None
        row_norms: tuple[tuple[slice, torch.Tensor], ...] = ()
        if norms.of_heads:
            query_norm, key_norm = (self._norm(f"{attend}.{name}", attention.head_dim) for name in ("q_norm", "k_norm"))
        if norms.of_whole_rows:
            row_norms = (
                (slice(queries), self._norm(f"{attend}.q_norm", queries)),
                (slice(queries, queries + keys), self._norm(f"{attend}.k_norm", keys)),
            )
        qkv = {"q_proj": queries, "k_proj": keys, "v_proj": keys}
        if family.fuses_qkv:
            qkv = {"qkv_proj": queries + 2 * keys}
        sinks = (attention.num_heads,)

        def norm(name: str | None) -> torch.Tensor | None:
            return None if name is None else self._norm(f"{layer}.{name}", hidden)

        return LayerWeights(
            attention_norm=norm(norms.before_attention),
            qkv=self._linear(attend, qkv, hidden, attention.qkv_bias),
            row_norms=row_norms,
            heads=Heads(
                num_queries=attention.num_heads,
                num_kv=attention.num_kv_heads,
                size=attention.head_dim,
                query_norm=query_norm,
                key_norm=key_norm,
                norm_eps=config.rms_norm_eps,
            ),
            sinks=self._floats(f"{attend}.sinks", sinks) if family.has_sinks else None,
            attention_output=self._linear(attend, {"o_proj": hidden}, queries, attention.output_bias),
            added_norm=norm(norms.after_attention),
            mlp_norm=norm(norms.before_mlp),
            feed_forward=self._mixture(layer) if is_mixture else self._dense(layer),
            added_mlp_norm=norm(norms.after_mlp),
        )

    def _dense(self, layer: str) -> DenseLayer:
        config, part = self._config, f"{layer}.mlp"
        hidden, mlp, family = config.hidden_size, config.intermediate_size, config.family
        gate_up = {"gate_up_proj": 2 * mlp} if family.fuses_gate else {"gate_proj": mlp, "up_proj": mlp}
        return DenseLayer(
            gate_up=self._linear(part, gate_up, hidden, config.mlp_bias, self._backend.pack_gated),
            down=self._linear(part, {"down_proj": hidden}, mlp, config.mlp_bias),
            activation=family.activation,
        )

    def _mixture(self, layer: str) -> MixtureLayer:
        config, hidden = self._config, self._config.hidden_size
        assert config.mixture is not None
        mixture, names = config.mixture, config.mixture.names
        part, width = f"{layer}.{names.part}", mixture.intermediate_size
        return MixtureLayer(
            router=self._router(f"{part}.{names.router}", mixture),
            num_chosen=mixture.num_chosen,
            shares=mixture.shares,
            gate_up=self._experts(f"{part}.experts", {names.gate: width, names.up: width}, hidden),
            down=self._experts(f"{part}.experts", {names.down: hidden}, width),
            activation=config.family.activation,
        )

    def _router(self, name: str, mixture: MixtureConfig) -> Linear:
        size, pack = mixture.num_experts, self._backend.pack_exactly
        shapes = {f"{name}.weight": (size, self._config.hidden_size)}
        weight = self._packing(f"{name}.weight", partial(self._pack, shapes, pack))
        return Linear(weight, self._tensor(f"{name}.bias", size) if mixture.has_bias else None)

    def _experts(self, part: str, name_to_size: dict[str, int], in_size: int) -> ExpertLinear:
        """Loads a matrix of each expert as `_linear` does. Raises ModelError if the backend cannot multiply them."""
        mixture = self._config.mixture
        assert mixture is not None
        linears = [
            self._linear(f"{part}.{index}", name_to_size, in_size, mixture.has_bias)
            for index in range(mixture.num_experts)
        ]
        biases = [one.bias[None] for one in linears if one.bias is not None]
        try:
            experts = self._backend.experts([one.weight for one in linears])
        except NoKernels as error:
            raise ModelError(f"{part}: {error}") from error
        return ExpertLinear(experts, _joined(biases) if biases else None)

    def _linear(
        self, part: str, name_to_size: dict[str, int], in_size: int, has_bias: bool, pack: Pack | None = None
    ) -> Linear:
        """Loads matrices of a part of a layer as one, of `name_to_size` columns each."""
        names = {f"{part}.{name}": size for name, size in name_to_size.items()}
        weight = self._packed({f"{name}.weight": (size, in_size) for name, size in names.items()}, pack)
        if not has_bias:
            self._require_zeros({f"{name}.bias": size for name, size in names.items()})
        bias = self._stacked({f"{name}.bias": (size,) for name, size in names.items()}) if has_bias else None
        return Linear(weight, bias)

    def _require_zeros(self, name_to_size: Mapping[str, int]) -> None:
        """Reads biases that older packages write beside all codes. Raises ModelError for other numbers than zeros."""
        for name, size in name_to_size.items():
            if name in self._checkpoint and self._checkpoint.has_codes(f"{name.removesuffix('bias')}weight"):
                bias = self._tensor(name, size)
                if not bias.is_meta and bool(bias.any()):
                    raise ModelError(f"tensor {name} is not of zeros, and the model of config.json has no such bias")

    def _packed(self, name_to_shape: dict[str, tuple[int, int]], pack: Pack | None = None) -> Weight:
        return self._packing(next(iter(name_to_shape)), partial(self._pack, name_to_shape, pack or self._backend.pack))

    def _pack(self, name_to_shape: dict[str, tuple[int, int]], pack: Pack) -> Weight:
        codes = [self._codes(name, shape) for name, shape in name_to_shape.items()]
        parts = [one for one in codes if one is not None]
        if len(parts) == len(codes):
            return self._backend.pack_codes(parts, self._dtype)
        plain = [
            self._tensor(name, *shape) if one is None else one.dequantize().to(self._dtype)
            for one, (name, shape) in zip(codes, name_to_shape.items(), strict=True)
        ]
        return pack(_joined(plain))

    def _codes(self, name: str, shape: tuple[int, int]) -> Quantized | None:
        codes, order = self._checkpoint.read_codes(name, shape, self._dtype, self._device), self._order_of(name)
        return codes if codes is None or order is None else codes.pick(order)

    def _stacked(self, name_to_shape: Mapping[str, tuple[int, ...]]) -> torch.Tensor:
        return _joined([self._tensor(name, *shape) for name, shape in name_to_shape.items()])

    def _floats(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        return self._checkpoint.read(name, shape, torch.float32, self._device)

    def _norm(self, name: str, size: int) -> torch.Tensor:
        tensor, offset = self._tensor(f"{name}.weight", size), self._config.scalars.norm_offset
        return tensor.float() + offset if self._config.family.norms.is_wide and self._device != META else tensor

    def _tensor(self, name: str, *shape: int) -> torch.Tensor:
        tensor, order = self._checkpoint.read(name, shape, self._dtype, self._device), self._order_of(name)
        return tensor if order is None else tensor[order]

    def _order_of(self, name: str) -> torch.Tensor | None:
        """Finds the order of a tensor's rows in which heads rotate as ours do; None as they are, or without content."""
        return None if self._device == META else self._orders.get(name.split(".")[-2])


def _row_orders(config: ModelConfig) -> Mapping[str, torch.Tensor]:
    """Maps a matrix or norm to the order of its rows; empty where heads rotate in a checkpoint as ours do."""
    attention = config.attention
    if (order := config.ropes[0].head_order(attention.head_dim)) is None:
        return {}
    num_rotated = attention.num_heads + attention.num_kv_heads
    heads = torch.arange(num_rotated + attention.num_kv_heads)[:, None] * attention.head_dim
    rotated, values = heads[:num_rotated] + order, heads[num_rotated:] + torch.arange(attention.head_dim)
    return {
        "q_proj": rotated[: attention.num_heads].flatten(),
        "k_proj": rotated[: attention.num_kv_heads].flatten(),
        "qkv_proj": torch.cat([rotated, values]).flatten(),
        "q_norm": order,
        "k_norm": order,
    }


def _joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Joins tensors along their first dimension; on `meta` without torch.cat, which would import 900 modules there."""
    if not parts[0].is_meta:
        return torch.cat(list(parts))
    return parts[0].new_empty((sum(map(len, parts)), *parts[0].shape[1:]))


class _Outlines(TorchBackend):
    """A backend for tensors without content; it does not widen codes, which would import 900 modules."""

    def pack_codes(self, parts: Sequence[Quantized], dtype: torch.dtype) -> Weight:
        return Weight(parts[0].codes, sum(one.columns for one in parts), parts[0].depth, dtype)


def load_private(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device, backend: Backend) -> DecoderWeights:
    """Loads weights for this process alone. Raises ModelError if a tensor is missing, wrong or not finite."""
    return WeightLoader(checkpoint, dtype, device, backend).load()


def check_weights(checkpoint: Checkpoint) -> None:
    """Raises ModelError for a tensor that is missing, of another shape or unknown; reads no content.

    Of an architecture without native code it counts numbers; names and shapes are checked when tensors are read.
    """
    if checkpoint.config.is_native:
        WeightLoader(checkpoint, torch.float32, META, _Outlines()).load()
        checkpoint.refuse_unread()
    else:
        from engine.checkpoint.modules.outline import Outline
        from engine.model.products import check_numbers

        check_numbers(checkpoint, Outline(checkpoint.values))


def count_bytes(checkpoint: Checkpoint, dtype: torch.dtype, backend: Backend) -> int:
    """Counts the bytes of a model's matrices as a backend keeps them; reads no content."""
    if not checkpoint.config.is_native:
        from engine.model.products import count_module_bytes

        return count_module_bytes(checkpoint, dtype, backend)
    name_to_bytes: dict[str, int] = {}

    def count(name: str, pack: Callable[[], Weight]) -> Weight:
        weight = pack()
        name_to_bytes[name] = weight.data.nbytes
        return weight

    WeightLoader(checkpoint, dtype, META, backend, count).load()
    return sum(name_to_bytes.values())
