"""A decoder of unlike layers: Mamba-2, attention, mixtures of experts and dense MLPs, in the order of a pattern.

Nothing about sharding, processes or devices may enter this file: engines work on the model from outside.
Sources: "Nemotron-H" (NVIDIA, 2025, the order of layers, squared ReLU, no position embedding), "DeepSeekMoE" (Dai et
al., 2024, the shared expert) and "DeepSeek-V3" (2024, the balance of each sequence, multi-token prediction). Shapes in
names: B sequences, S tokens, D width, E experts, F width of an expert, K experts of a token, T tokens of all sequences,
V vocabulary.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwright.activations import DeferredLogits, losses_of_tokens
from shardwright.train.config.shapes.presets import HYBRID_PRESETS, HybridConfig
from shardwright.train.models.native.decoder import (
    EMBEDDING_STD,
    Decoder,
    Embedding,
    Linear,
    truncated_normal,
)
from shardwright.train.models.native.llama import Attention
from shardwright.train.models.native.mamba import Mamba2
from shardwright.train.models.packed import IGNORED, Documents, capability_of

__all__ = ["HYBRID_PRESETS", "Extras", "Hybrid", "HybridConfig"]


class SquaredReluMLP(nn.Module):
    """Two matrices with the square of ReLU between them ("Primer", So et al., 2021)."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.up = Linear(dim, hidden)
        self.down = Linear(hidden, dim)

    def forward(self, x_BSD: Tensor) -> Tensor:
        return self.down(F.relu(self.up(x_BSD)).square())

    def draw(self, residual_std: float) -> None:
        truncated_normal(self.up.weight, 0.02)
        truncated_normal(self.down.weight, residual_std)


class MixtureOfExperts(nn.Module):
    """Every token passes its `top_k` likeliest experts, weighted by their probabilities, and the shared one.

    The weights of all experts are two parameters of three dimensions. So an expert that no token of a rank chose has
    the gradient zero there, not none, and what is communicated never depends on the routing; cut along the first
    dimension, ranks own whole experts. Tokens are sorted by expert and multiplied group by group: no token is dropped,
    none is computed twice, and no size depends on the routing, so that the host never waits for it.
    """

    #: Rows from which on products on the CPU have the same bits for each row. Measured with MKL: 4.
    ROWS_ALIKE = 16

    def __init__(self, config: HybridConfig) -> None:
        super().__init__()
        self.top_k = config.top_k
        self.router = Linear(config.dim, config.n_experts)
        self.up = nn.Parameter(torch.empty(config.n_experts, config.dim, config.expert_dim))
        self.down = nn.Parameter(torch.empty(config.n_experts, config.expert_dim, config.dim))
        self.shared = SquaredReluMLP(config.dim, config.shared_dim) if config.shared_dim else None

    def forward(self, x_BSD: Tensor, documents: Documents | None = None) -> tuple[Tensor, Tensor]:
        """Return the output [B, S, D], and how uneven the routing of each sequence is, float32 [B]: see `imbalance`.

        With `documents` it is the routing of each token's document, float32 [B, S].
        """
        probability_BSE = self.probabilities(x_BSD)
        # Not renormalised: with one expert per token nothing would teach the router otherwise.
        weight_BSK, expert_BSK = probability_BSE.topk(self.top_k, dim=-1)
        # Few rows have a product of their own on the CPU, with sums in another order. Then the bits of a row depend on
        # how many tokens chose its expert, those of other documents among them.
        fill = 0 if documents is None or x_BSD.device.type != "cpu" else self.ROWS_ALIKE
        y_TD = self.routed(x_BSD.flatten(0, 1), weight_BSK.flatten(0, 1), expert_BSK.flatten(0, 1), fill)
        y_BSD = y_TD.view_as(x_BSD)
        if self.shared is not None:
            y_BSD = y_BSD + self.shared(x_BSD)
        return y_BSD, self.uneven(probability_BSE, expert_BSK, documents)

    def uneven(self, probability_BSE: Tensor, expert_BSK: Tensor, documents: Documents | None) -> Tensor:
        """Return the imbalance of the routing, see `imbalance`."""
        return imbalance(probability_BSE, expert_BSK, documents)

    def probabilities(self, x_BSD: Tensor) -> Tensor:
        """Return the router's softmax in float32, also under autocast: near ties must not fall by rounding."""
        with torch.autocast(x_BSD.device.type, enabled=False):
            return F.linear(x_BSD.float(), self.router.weight.float()).softmax(dim=-1)

    def routed(self, x_TD: Tensor, weight_TK: Tensor, expert_TK: Tensor, fill: int = 0) -> Tensor:
        """Return the weighted sum of the chosen experts: [T, D]. Each expert gets `fill` rows of zeros beside its
        tokens."""
        count, dim = expert_TK.numel(), x_TD.shape[1]
        # One row for each choice, then a permutation: unlike a gather of tokens, its backward adds in a fixed order.
        rows, expert_R = x_TD.unsqueeze(1).expand(-1, self.top_k, -1).reshape(count, dim), expert_TK.flatten()
        if fill:
            every = torch.arange(self.router.out_features, device=expert_R.device)
            expert_R = torch.cat((expert_R, every.repeat_interleave(fill)))
            rows = F.pad(rows, (0, 0, 0, fill * len(every)))
        sorted_experts, order = expert_R.sort(stable=True)
        rows = self.chosen(rows.index_select(0, order), sorted_experts)
        rows = torch.empty_like(rows).index_copy(0, order, rows)
        rows = rows[:count] if fill else rows
        return (rows.view(-1, self.top_k, dim) * weight_TK.unsqueeze(-1).to(rows.dtype)).sum(1)

    def chosen(self, rows_RD: Tensor, expert_R: Tensor) -> Tensor:
        """Outputs [R, D] of the expert of each row; rows [R, D] are sorted by their experts."""
        return through_experts(rows_RD, expert_R, self.up, self.down)

    def draw(self, residual_std: float) -> None:
        truncated_normal(self.router.weight, 0.02)
        truncated_normal(self.up, 0.02)
        truncated_normal(self.down, residual_std)
        if self.shared is not None:
            self.shared.draw(residual_std)


def through_experts(rows_RD: Tensor, expert_R: Tensor, up_EDF: Tensor, down_EFD: Tensor) -> Tensor:
    """Each row through the expert of its number; rows are sorted by it."""
    numbers = torch.arange(up_EDF.shape[0], device=expert_R.device)
    ends = torch.searchsorted(expert_R, numbers, right=True, out_int32=True)
    up_EDF, down_EFD = up_EDF.to(rows_RD.dtype), down_EFD.to(rows_RD.dtype)
    if _has_grouped_kernel(rows_RD):
        hidden = F.relu(F.grouped_mm(rows_RD, up_EDF, offs=ends)).square()
        return F.grouped_mm(hidden, down_EFD, offs=ends)
    # Without a kernel `grouped_mm` reads the ends in each product, twice here and four times in backward. One read.
    counts = ends.diff(prepend=ends.new_zeros(1)).tolist()
    experts = zip(rows_RD.split(counts), up_EDF.unbind(), down_EFD.unbind(), strict=True)
    return torch.cat([F.relu(rows @ up).square() @ down for rows, up, down in experts])


def _has_grouped_kernel(rows: Tensor) -> bool:
    """Return whether `grouped_mm` of these rows reads the ends of groups where they are. It does on the CPU, and on a
    GPU of compute capability 8.0 or more in bfloat16. Plans have no values to read, nor does a block that is
    compiled."""
    if rows.device.type in ("cpu", "meta") or torch.compiler.is_compiling():
        return True
    supported = rows.device.type == "cuda" and capability_of(rows.device.index) >= (8, 0)
    return supported and rows.dtype == torch.bfloat16


def imbalance(probability_BSE: Tensor, expert_BSK: Tensor, documents: Documents | None = None) -> Tensor:
    """E times the sum over experts of the part of choices an expert got and its mean probability: float32 [B].

    1 where all experts get as much, E where one gets all ("Switch Transformers", Fedus et al., 2021, equation 4, for
    `top_k` experts). Counted in each sequence by itself (DeepSeek-V3, equation 17), so that it does not matter how the
    sequences of a step are spread over micro-batches and ranks. With `documents` in each document by itself, for each
    of its tokens: float32 [B, S]. It is 0 for a document without counted tokens.
    """
    experts = probability_BSE.shape[-1]
    if documents is not None:
        chosen_BSE = F.one_hot(expert_BSK, experts).float().mean(dim=2)
        count_BS1 = documents.sums(torch.ones_like(probability_BSE[..., :1])).clamp(min=1)
        return experts * (
            documents.sums(chosen_BSE) / count_BS1 * (documents.sums(probability_BSE) / count_BS1)
        ).sum(-1)
    chosen_BE = F.one_hot(expert_BSK.flatten(1), experts).float().mean(dim=1)
    return experts * (chosen_BE * probability_BSE.mean(dim=1)).sum(dim=-1)


class Block(nn.Module):
    """One layer of the pattern, normalised before and added to the residual stream."""

    def __init__(self, config: HybridConfig, kind: str) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.mixer = _mixer(config, kind)

    def forward(self, x_BSD: Tensor, documents: Documents | None = None) -> tuple[Tensor, Tensor | None]:
        """Return the residual stream, and of experts how unevenly they were used: float32 [B], with `documents` [B,
        S]."""
        # A dense layer computes each token by itself.
        alone = documents is None or isinstance(self.mixer, SquaredReluMLP)
        y = self.mixer(self.norm(x_BSD)) if alone else self.mixer(self.norm(x_BSD), documents=documents)
        y_BSD, imbalance_B = y if isinstance(y, tuple) else (y, None)
        return x_BSD + y_BSD, imbalance_B

    def draw(self, depth: int) -> None:
        self.norm.reset_parameters()
        residual_std = 0.02 / math.sqrt(depth)
        if isinstance(self.mixer, Attention):
            for linear in (self.mixer.wq, self.mixer.wk, self.mixer.wv):
                truncated_normal(linear.weight, 0.02)
            truncated_normal(self.mixer.wo.weight, residual_std)
        else:
            self.mixer.draw(residual_std)


def _mixer(config: HybridConfig, kind: str) -> Mamba2 | Attention | MixtureOfExperts | SquaredReluMLP:
    if kind == "M":
        return Mamba2(config)
    if kind == "*":
        return Attention(config)
    return MixtureOfExperts(config) if kind == "E" else SquaredReluMLP(config.dim, config.ffn_dim)


class NextButOne(nn.Module):
    """Multi-token prediction: what the output layer needs to predict the token after the next (DeepSeek-V3, 2.2).

    It sees the residual stream after the last layer, and the embedding of the next token. Embedding and output layer
    are the model's own, which it is handed the results of, or hands its results to.
    """

    def __init__(self, config: HybridConfig) -> None:
        super().__init__()
        self.stream_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.token_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.proj = Linear(2 * config.dim, config.dim)
        self.layers = nn.ModuleList(Block(config, kind) for kind in config.mtp_pattern)
        self.norm = nn.RMSNorm(config.dim, eps=config.norm_eps)

    @staticmethod
    def aligned(
        x_BSD: Tensor, embedded_BSD: Tensor, documents: Documents | None = None
    ) -> tuple[Tensor, Tensor, Documents | None]:
        """Return the stream of every token that has a next one, the embedding of that, and the documents of both."""
        if documents is not None:
            documents = documents.of_pairs().before(x_BSD.shape[1] - 1)
        return x_BSD[:, :-1], embedded_BSD[:, 1:], documents

    @staticmethod
    def predicting(length: int) -> int:
        """Return how many of `length` tokens have a next one."""
        return length - 1

    def forward(
        self, x_BSD: Tensor, next_BSD: Tensor, documents: Documents | None = None
    ) -> tuple[Tensor, list[Tensor]]:
        """Return the normalised stream [B, S, D], and how unevenly each layer of experts was used."""
        x_BSD = self.proj(torch.cat((self.stream_norm(x_BSD), self.token_norm(next_BSD)), dim=-1))
        x_BSD, uneven = _through(self.layers, x_BSD, documents)
        return self.norm(x_BSD), uneven

    def draw(self, depth: int) -> None:
        truncated_normal(self.proj.weight, (2 * self.proj.out_features) ** -0.5)
        for norm in (self.stream_norm, self.token_norm, self.norm):
            norm.reset_parameters()
        for number, block in enumerate(self.layers):
            assert isinstance(block, Block)
            block.draw(depth + number)


def _through(
    blocks: nn.ModuleList, x_BSD: Tensor, documents: Documents | None
) -> tuple[Tensor, list[Tensor]]:
    """Return the stream after all blocks, and how unevenly each layer of experts was used."""
    uneven = []
    for block in blocks:
        x_BSD, imbalance_B = block(x_BSD) if documents is None else block(x_BSD, documents)
        if imbalance_B is not None:
            uneven.append(imbalance_B)
    return x_BSD, uneven


class Extras(NamedTuple):
    """Values from which the losses beside the cross-entropy are made; `None` where the model has no such part."""

    imbalance_B: Tensor | None
    """Mean of `imbalance` over the layers of experts: [B], with documents [B, S]."""
    mtp_logits_BSV: Tensor | None
    """Logits of the token after the next, for all tokens except the last of each sequence."""
    documents: Documents | None = None
    """The documents that forward kept apart, if any."""


def _of_all_tokens(imbalance_BS: Tensor, documents: Documents, length: int) -> Tensor:
    """Return the imbalance of all tokens, from a layer without the last token, which gets the imbalance of its
    document."""
    if (
        imbalance_BS.shape[1] == length
    ):  # ranks divide samples, and the layer has a filler behind the last token
        return imbalance_BS
    last_B1 = imbalance_BS[:, -1:].masked_fill(documents.starts_BS[:, -1:], 0)
    return torch.cat((imbalance_BS, last_B1), dim=1)


def _sums_of_documents(extras: Extras, documents: Documents, targets_BS: Tensor) -> dict[str, Tensor]:
    """`Hybrid.auxiliary_sums` where no document may change the losses of another one."""
    sums, trained_BS = {}, targets_BS != IGNORED
    if extras.imbalance_B is not None:
        sums["balance"] = extras.imbalance_B.masked_fill(~trained_BS, 0).sum()
    if extras.mtp_logits_BSV is not None:
        # The token after the next is the next one's target, unless the next one belongs to another document.
        following_BS = F.pad(targets_BS[:, 1:], (0, 1), value=IGNORED).masked_fill(documents.ends_BS, IGNORED)
        both = torch.stack((trained_BS, following_BS != IGNORED), dim=-1).float()
        trained, predicted = documents.sums(both).unbind(-1)
        scale_BS = trained / predicted.clamp(min=1)
        sums["mtp"] = scaled_loss(extras.mtp_logits_BSV, following_BS[:, :-1], scale_BS[:, :-1])
    return sums


def scaled_loss(logits_BSV: Tensor, targets_BS: Tensor, scale_BS: Tensor) -> Tensor:
    """Return the sum of the cross-entropies of all tokens, each times its factor."""
    if isinstance(logits_BSV, DeferredLogits):
        return logits_BSV.losses(targets_BS, scale_BS, IGNORED)[0]
    return (losses_of_tokens(logits_BSV, targets_BS, ignore_index=IGNORED) * scale_BS.flatten()).sum()


class Hybrid(Decoder):
    """A decoder whose layers follow `config.pattern`.

    As in Nemotron-H no layer knows positions: the order of tokens comes from the scans and convolutions.
    """

    config: HybridConfig
    separates = True
    meanings = {  # noqa: RUF012  # never changed
        "balance": "load of the experts; 1: all equal",
        "mtp": "cross-entropy of the token after the next",
    }

    def __init__(self, config: HybridConfig) -> None:
        super().__init__()
        self.config, self.tied = config, config.tied_embeddings
        self.auxiliary = {}
        if "E" in config.pattern + config.mtp_pattern:
            self.auxiliary["balance"] = config.balance_weight
        if config.mtp_pattern:
            self.auxiliary["mtp"] = config.mtp_weight
        self.tok_embeddings = Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleList(Block(config, kind) for kind in config.pattern)
        self.mtp = NextButOne(config) if config.mtp_pattern else None
        self.norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.output = Linear(config.dim, config.vocab_size)
        if config.tied_embeddings:
            self.output.weight = self.tok_embeddings.weight
        if not self.tok_embeddings.weight.is_meta:
            self.init_weights()

    def blocks(self) -> list[nn.Module]:
        return [*self.layers, *([] if self.mtp is None else [self.mtp])]

    def forward(
        self,
        tokens_BS: Tensor,
        extras: bool = False,
        documents: Tensor | None = None,
        positions: Tensor | None = None,
        edges: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Extras]:
        """Logits [B, S, V] in the compute dtype for token numbers [B, S] (int64), S at most `max_seq_len`.

        With `extras` also what `auxiliary_sums` needs; for that S must be 2 or more where there is an `mtp_pattern`.
        With `documents` [B, S] (int) each document is computed as if it were alone. `positions` have no effect, since
        no layer knows positions.
        """
        length = self.length_of(tokens_BS)
        packed = self.documents_in(documents, tokens_BS, edges)
        embedded_BSD = self.tok_embeddings(tokens_BS)
        x_BSD, uneven = _through(self.layers, embedded_BSD, packed)
        if not extras:
            return self.output(self.norm(x_BSD))
        further_BSD = None
        if self.mtp is not None:
            x_next_documents = self.mtp.aligned(x_BSD, embedded_BSD, packed)
            further_BSD, more = self.mtp(*x_next_documents[: 2 if packed is None else 3])
            uneven += more if packed is None else [_of_all_tokens(each, packed, length) for each in more]
        logits_BSV = self.output(self.norm(x_BSD))
        mtp_logits_BSV = None
        if self.mtp is not None:
            # As many as there are next tokens: a plan may have the head run on a filler behind them.
            mtp_logits_BSV = self.output(further_BSD)[:, : self.mtp.predicting(length)]
        return logits_BSV, Extras(torch.stack(uneven).mean(0) if uneven else None, mtp_logits_BSV, packed)

    @staticmethod
    def auxiliary_sums(extras: object, targets_BS: Tensor) -> dict[str, Tensor]:
        """balance: `imbalance` of every sequence, for each of its trained tokens: those whose target is not `IGNORED`.
        mtp: cross-entropy of the token after the next, where that is trained, scaled to the number of trained tokens of
        the sequence. With documents both are those of each document alone.

        A sum over sequences or documents. So a mean over the trained tokens of a step does not depend on how they are
        spread over micro-batches and ranks."""
        assert isinstance(extras, Extras)
        if extras.documents is not None:
            return _sums_of_documents(extras, extras.documents, targets_BS)
        sums, trained_BS = {}, targets_BS != IGNORED
        if extras.imbalance_B is not None:
            sums["balance"] = (extras.imbalance_B * trained_BS.sum(1)).sum()
        if extras.mtp_logits_BSV is not None:
            scale_B = trained_BS.sum(1) / trained_BS[:, 1:].sum(1).clamp(min=1)
            if isinstance(extras.mtp_logits_BSV, DeferredLogits):
                scale_BS = scale_B.unsqueeze(1).expand_as(targets_BS[:, 1:])
                sums["mtp"] = scaled_loss(extras.mtp_logits_BSV, targets_BS[:, 1:], scale_BS)
                return sums
            losses = losses_of_tokens(extras.mtp_logits_BSV, targets_BS[:, 1:], ignore_index=IGNORED)
            sums["mtp"] = (losses.view(len(targets_BS), -1).sum(1) * scale_B).sum()
        return sums

    @torch.no_grad()
    def init_weights(self) -> None:
        """Draw every weight again from the global generator.

        Matrices are normal with standard deviation 0.02, cut at three deviations, and 0.02 / sqrt(layer + 1) where they
        lead back into the residual stream; embedding and output layer as in `Llama`. Raises RuntimeError on the meta
        device.
        """
        super().init_weights()

    def _draw_weights(self) -> None:
        if not self.tied:
            truncated_normal(self.tok_embeddings.weight, EMBEDDING_STD)
        for depth, block in enumerate(self.layers, start=1):
            assert isinstance(block, Block)
            block.draw(depth)
        if self.mtp is not None:
            self.mtp.draw(len(self.layers) + 1)
        self.norm.reset_parameters()
        truncated_normal(self.output.weight, self.config.dim**-0.5)

    def flops_per_token(self, seq_len: int) -> int:
        """Floating-point operations of forward and backward per trained token: 6 per multiplication and addition of
        the forward pass.

        Counted are, as in `Llama`, the weights that a token is multiplied with (of experts `top_k` and the shared one;
        of the output layer once more for multi-token prediction) and 2 x length x width for attention. A Mamba-2 layer
        has its convolution and, with Q the chunk size, Q (G N + H P) inside chunks and 2 H P N for the states. Not
        counted: embeddings, the pass from chunk to chunk, recomputation, everything element-wise.
        """
        c = self.config
        chunk = min(c.chunk_size, seq_len)
        mamba = c.dim * (c.mamba_in_dim + c.mamba_dim) + c.conv_dim * c.conv_width
        inside = chunk * (c.mamba_groups * c.mamba_state + c.mamba_dim)
        attention = 2 * c.dim * c.head_dim * (c.n_heads + c.n_kv_heads)
        experts = c.dim * c.n_experts + 2 * c.dim * (c.top_k * c.expert_dim + c.shared_dim)
        of_layer = {
            "M": mamba + inside + 2 * c.mamba_dim * c.mamba_state,
            "*": attention + 2 * seq_len * c.n_heads * c.head_dim,
            "E": experts,
            "-": 2 * c.dim * c.ffn_dim,
        }
        output = c.dim * c.vocab_size
        mtp = 2 * c.dim * c.dim + output if c.mtp_pattern else 0
        return 6 * (sum(of_layer[kind] for kind in c.pattern + c.mtp_pattern) + mtp + output)
