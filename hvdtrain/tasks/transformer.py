"""A small GPT-like language model on synthetic tokens: many parameters of many shapes."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hvdtrain.errors import InputError
from hvdtrain.tasks.synthetic import SyntheticTask


class Transformer(SyntheticTask):
    """`layers` of causal self-attention and a feed-forward part, `width` wide, with P parameters:

    P = layers * (12 * width + 13) * width + (2 * vocabulary + context + 2) * width

    A step averages 4 * P bytes of gradients (fp32). The defaults have 470,528 parameters, 1.9 MB.
    """

    about_data = "synthetic: sequences that follow one permutation, drawn from a seed"

    def __init__(
        self,
        width: int = 128,
        layers: int = 2,
        heads: int = 4,
        context: int = 64,
        vocabulary: int = 256,
        samples: int = 2048,
        lr: float = 0.002,
        optimizer: str = "adamw",
    ) -> None:
        super().__init__(
            samples, lr, optimizer,
            vocabulary=vocabulary, width=width, layers=layers, heads=heads, context=context,
        )  # fmt: skip
        if width % heads:
            raise InputError(f"width={width} is not a multiple of heads={heads}")
        self.width = width
        self.layers = layers
        self.heads = heads
        self.context = context
        self.vocabulary = vocabulary

    def model(self) -> nn.Module:
        """Return embeddings, the layers, a LayerNorm, and the logits of the next token."""
        return _GPT(self.width, self.layers, self.heads, self.context, self.vocabulary)

    def draw(self, num: int, rng: torch.Generator) -> tuple[Tensor, Tensor]:
        """Return sequences in which one permutation of the vocabulary maps a token to the next."""
        next_token = torch.randperm(self.vocabulary, generator=rng)
        tokens = [torch.randint(self.vocabulary, (num,), generator=rng)]
        for _ in range(self.context):
            tokens.append(next_token[tokens[-1]])
        sequences = torch.stack(tokens, 1)
        return sequences[:, :-1], sequences[:, 1:]


class _GPT(nn.Module):
    def __init__(self, width: int, layers: int, heads: int, context: int, vocabulary: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        self.layers = nn.Sequential(*(_Layer(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.scores = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        indices = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.tokens(tokens) + self.positions(indices)
        return self.scores(self.norm(self.layers(x)))  # type: ignore[no-any-return]


class _Layer(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.mix = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self._attend(self.norm_1(x))
        return x + self.feed(self.norm_2(x))  # type: ignore[no-any-return]

    def _attend(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        shape = (batch, length, 3, self.heads, width // self.heads)
        q, k, v = self.qkv(x).view(shape).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.mix(mixed.transpose(1, 2).reshape(batch, length, width))  # type: ignore[no-any-return]
