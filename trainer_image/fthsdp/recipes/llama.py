"""A Llama-style language model in plain PyTorch: RMSNorm, rotary positions, SwiGLU, grouped-query attention.

Nothing in it knows of fault tolerance; ``shard`` applies FSDP2 block by block as for any other model.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import torch
import torch.nn.functional as F  # noqa: N812 - the name everybody uses
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from fthsdp.errors import ConfigError

__all__ = ["SIZES", "Llama", "LlamaConfig", "ModelSize", "next_token_loss", "shard"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaConfig:
    """The shape of a model; raises ConfigError for one that cannot be built."""

    num_layers: int
    width: int
    num_heads: int
    num_kv_heads: int
    """Heads of keys and values; each serves ``num_heads / num_kv_heads`` query heads."""
    hidden_width: int
    """Width inside the feed-forward part."""
    vocabulary: int = 256
    rope_theta: float = 10_000.0
    """Base of the rotary wavelengths; Su et al. 2021."""
    norm_epsilon: float = 1e-5

    def __post_init__(self) -> None:
        for name in ("num_layers", "width", "num_heads", "num_kv_heads", "hidden_width", "vocabulary"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} is not at least 1")
        if self.width % (2 * self.num_heads):
            raise ConfigError(f"width={self.width} is no multiple of twice num_heads={self.num_heads}")
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(f"num_heads={self.num_heads} is no multiple of num_kv_heads={self.num_kv_heads}")

    @property
    def head_width(self) -> int:
        """Width of one head."""
        return self.width // self.num_heads


class ModelSize(StrEnum):
    """Sizes by name, with the number of parameters over bytes."""

    TINY = "tiny"
    """0.95 million."""
    SMALL = "small"
    """14 million."""
    MEDIUM = "medium"
    """110 million."""


SIZES = {
    ModelSize.TINY: LlamaConfig(num_layers=4, width=128, num_heads=4, num_kv_heads=2, hidden_width=448),
    ModelSize.SMALL: LlamaConfig(num_layers=8, width=384, num_heads=6, num_kv_heads=2, hidden_width=1152),
    ModelSize.MEDIUM: LlamaConfig(num_layers=16, width=768, num_heads=12, num_kv_heads=4, hidden_width=2304),
}


def _rotate(heads: Tensor, theta: float) -> Tensor:
    """Rotate pairs of elements of ``heads`` (batch, heads, positions, head width) by angles that grow with position."""
    half = heads.shape[-1] // 2
    wavelengths = theta ** (torch.arange(half, device=heads.device, dtype=torch.float32) / -half)
    angles = torch.outer(torch.arange(heads.shape[-2], device=heads.device, dtype=torch.float32), wavelengths)
    cos, sin = angles.cos().to(heads.dtype), angles.sin().to(heads.dtype)
    first, second = heads[..., :half], heads[..., half:]
    return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)


class _Attention(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        kv_width = config.num_kv_heads * config.head_width
        self.query = nn.Linear(config.width, config.width, bias=False)
        self.key = nn.Linear(config.width, kv_width, bias=False)
        self.value = nn.Linear(config.width, kv_width, bias=False)
        self.output = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            part.unflatten(-1, (-1, self.config.head_width)).transpose(1, 2)
            for part in (self.query(x), self.key(x), self.value(x))
        )
        query, key = _rotate(query, self.config.rope_theta), _rotate(key, self.config.rope_theta)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        mixed: Tensor = self.output(attended.transpose(1, 2).flatten(-2))
        return mixed


class _FeedForward(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.width, config.hidden_width, bias=False)
        self.up = nn.Linear(config.width, config.hidden_width, bias=False)
        self.down = nn.Linear(config.hidden_width, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        mixed: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return mixed


class _Block(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.width, eps=config.norm_epsilon)
        self.attention = _Attention(config)
        self.feed_forward_norm = nn.RMSNorm(config.width, eps=config.norm_epsilon)
        self.feed_forward = _FeedForward(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        mixed: Tensor = x + self.feed_forward(self.feed_forward_norm(x))
        return mixed


def _initialize(module: nn.Module, *, std: float) -> None:
    for part in module.modules():
        if isinstance(part, nn.Linear | nn.Embedding):
            nn.init.normal_(part.weight, std=std)


class Llama(nn.Module):
    """Tokens (batch, positions), int64, to logits (batch, positions, vocabulary)."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        blocks = [_Block(config) for _ in range(config.num_layers)]
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.RMSNorm(config.width, eps=config.norm_epsilon)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        _initialize(self, std=0.02)
        for block in blocks:  # what adds to the residual stream is smaller the more layers add to it, as in GPT-2
            _initialize(block.attention.output, std=0.02 / (2 * config.num_layers) ** 0.5)
            _initialize(block.feed_forward.down, std=0.02 / (2 * config.num_layers) ** 0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def next_token_loss(model: nn.Module, windows: Tensor) -> Tensor:
    """Return the mean cross-entropy in nats of the tokens of ``windows`` (batch, length + 1), each but the first."""
    logits: Tensor = model(windows[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())


def shard(model: Llama, mesh: DeviceMesh) -> None:
    """Shard ``model`` over the ranks of ``mesh`` with FSDP2: each block is gathered when its turn comes."""
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
