"""Several documents in one sample: where each begins, and attention that stays inside it.

Every layer that mixes tokens takes a `Documents` and lets a token see only earlier tokens of its own document. The
result for a document then has the same bits whatever tokens the others have. Shapes in names: B samples, S tokens,
T tokens of all samples, H heads, K head width, X any.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardwright.context import Part, attend_part as attend_over_part

#: The target of a token whose prediction is not trained.
IGNORED = -100


class Documents:
    """The beginnings of the documents of every sample. All tensors are on the device of `numbers_BS`.

    A plain class on purpose, neither a tuple nor a dataclass: engines look for tensors to cast in those. The tensors
    are computed at construction: a compiled block can read them, and cannot make one whose size depends on values.

    Args:
        numbers_BS: int, the number of each token's document. Neighbours with one number are one document.
        counted_BS: bool, the tokens that `sums` adds; all of them if None.
        owners_BS: int, the documents over which `sums` adds; those of `numbers_BS` if None.
        edges: int32, where each document begins among all T tokens, then T at least once. If None they are looked for
            in `numbers_BS`, and the host waits for the device, because their number is the size of a tensor.
    """

    def __init__(
        self,
        numbers_BS: Tensor,
        counted_BS: Tensor | None = None,
        owners_BS: Tensor | None = None,
        edges: Tensor | None = None,
    ) -> None:
        self.numbers_BS, self.counted_BS, self.owners_BS = numbers_BS, counted_BS, owners_BS
        self.starts_BS = _starts(numbers_BS)
        #: The index in the sample at which each token's document begins: int64.
        self.first_BS = _first(self.starts_BS)
        #: Number of tokens of its document before each token: int64, the position that restarts at each document.
        self.ages_BS = torch.arange(numbers_BS.shape[1], device=numbers_BS.device) - self.first_BS
        self._slots_BS = self.first_BS if owners_BS is None else _first(_starts(owners_BS))
        if edges is None:
            begins = self.starts_BS.flatten().nonzero().flatten()
            edges = F.pad(begins, (0, 1), value=numbers_BS.numel()).to(torch.int32)
        #: Where each document begins among all T tokens, then T at least once: int32. Between equal neighbours there is
        #: a document without tokens.
        self.edges = edges
        lengths = edges.diff().tolist() if numbers_BS.device.type == "cpu" else []
        #: The length in tokens of each document of all samples. Only attention on the CPU needs it on the host.
        self.lengths: list[int] = [length for length in lengths if length]

    def before(self, length: int) -> Documents:
        """Return the documents of the first `length` tokens of each sample."""
        if length == self.numbers_BS.shape[1]:
            return self
        parts = (self.numbers_BS, self.counted_BS, self.owners_BS)
        numbers, counted, owners = (None if part is None else part[:, :length] for part in parts)
        assert numbers is not None
        return Documents(numbers, counted, owners, edges_within(self, range(length)))

    def of_pairs(self) -> Documents:
        """For layers that see each token together with the next one.

        The token after the last one of a document belongs to another document. So each last place becomes a document of
        its own, and `sums` does not count it.
        """
        last_BS = self.ends_BS
        begins, ends = self.edges[:-1], self.edges[1:]
        edges = torch.stack((torch.maximum(ends - 1, begins), ends), dim=1).flatten()
        edges = torch.cat((self.edges[:1], edges))
        return Documents(2 * self.numbers_BS.long() + last_BS, ~last_BS, self.numbers_BS, edges)

    @property
    def ends_BS(self) -> Tensor:
        """The tokens that are the last ones of their documents: bool."""
        return torch.cat((self.starts_BS[:, 1:], torch.ones_like(self.starts_BS[:, :1])), dim=1)

    def mask(self) -> Tensor:
        """Return the tokens (the last dimension) that each token sees: bool [B, S, S]."""
        # Both tokens have the same first token, so both are of one document. Lower triangle: none is later.
        return (self.first_BS.unsqueeze(2) == self.first_BS.unsqueeze(1)).tril()

    def sums(self, values_BSX: Tensor) -> Tensor:
        """For each token the sum over the counted tokens of its document: [B, S, X] in the dtype of the values.

        The values may be those of the first tokens of each sample alone.
        """
        length = values_BSX.shape[1]
        if self.counted_BS is not None:
            values_BSX = values_BSX.masked_fill(~self.counted_BS[:, :length].unsqueeze(-1), 0)
        slots_BSX = self._slots_BS[:, :length].unsqueeze(-1).expand_as(values_BSX)
        return torch.zeros_like(values_BSX).scatter_add(1, slots_BSX, values_BSX).gather(1, slots_BSX)


def documents_of(
    documents_BS: Tensor | None, tokens_BS: Tensor, edges: Tensor | None = None
) -> Documents | None:
    """Return the Documents of the arguments `documents` and `edges` of a model's forward; None without documents.

    Raises:
        ValueError: the numbers have another shape than the tokens.
    """
    if documents_BS is None:
        return None
    if documents_BS.shape != tokens_BS.shape or documents_BS.dtype.is_floating_point:
        raise ValueError(
            f"documents: expected an integer for each token, of shape {list(tokens_BS.shape)}, found shape "
            f"{list(documents_BS.shape)} and dtype {str(documents_BS.dtype).removeprefix('torch.')}"
        )
    return Documents(documents_BS, edges=edges)


def within_trained(targets_BS: Tensor) -> Tensor:
    """Return the tokens that are not after the last trained one of their sample: bool [B, S].

    The others are padding, or tokens that no cross-entropy depends on. Losses beside it must not count them either.
    """
    return (targets_BS != IGNORED).flip(1).cumsum(1).flip(1) > 0


def whole(loss: Tensor) -> Tensor:
    """Return the whole of a loss or of logits that tensor parallelism may have cut."""
    return loss.full_tensor() if isinstance(loss, DTensor) else loss


def _starts(numbers_BS: Tensor) -> Tensor:
    starts_BS = torch.ones_like(numbers_BS, dtype=torch.bool)
    starts_BS[:, 1:] = numbers_BS[:, 1:] != numbers_BS[:, :-1]
    return starts_BS


def _first(starts_BS: Tensor) -> Tensor:
    index_S = torch.arange(starts_BS.shape[1], device=starts_BS.device)
    return torch.where(starts_BS, index_S, 0).cummax(dim=1).values


# ---------------------------------------------------------------------------------------------------------------
# Attention


def attend(q_BSHK: Tensor, k_BSHK: Tensor, v_BSHK: Tensor, documents: Documents) -> Tensor:
    """Causal attention inside each document: [B, S, H, K]. Groups of query heads may share a key and value head.

    On the CPU each document is attended by itself: time and memory grow with the squares of the lengths of documents,
    those of a mask with the square of S. Measured beside causal attention without documents, forward and backward on
    one thread, torch 2.13: documents of 8, 32, 128, 512 tokens in S = 2048 (4 heads of width 32) take 0.40, 0.14, 0.16,
    0.44 of its time one by one, and 1.8 to 2.1 with a mask; in 8 samples of S = 256 documents of 8 tokens take 1.8 of
    it one by one and 1.2 with a mask, and those of 32 0.7 and 1.1. A compiled block has the mask, as lengths are not
    known when it is compiled. CUDA has one kernel for sequences of unlike lengths in bfloat16 and float16; float32 has
    the mask.
    """
    grouped = q_BSHK.shape[2] != k_BSHK.shape[2]
    if q_BSHK.device.type == "cuda" and _flash_takes(q_BSHK):
        return _attend_varlen(q_BSHK, k_BSHK, v_BSHK, documents.edges, documents.edges, grouped)
    if q_BSHK.device.type == "cpu" and not torch.compiler.is_compiling():
        return _attend_pieces(q_BSHK, k_BSHK, v_BSHK, documents, grouped)
    return _attend_masked(q_BSHK, k_BSHK, v_BSHK, documents, grouped)


def attend_part(
    q_BRHK: Tensor, k_BKHK: Tensor, v_BKHK: Tensor, documents: Documents | None, part: Part
) -> Tensor:
    """Return the same for some tokens of each sample, to keys that end with the last of them: [B, rows, H, K].

    Without documents a sample is one. CUDA has a kernel without a mask for both.
    """
    if documents is not None and q_BRHK.device.type == "cuda" and _flash_takes(q_BRHK):
        rows, keys = (edges_within(documents, places) for places in (part.rows, part.keys))
        return _attend_varlen(q_BRHK, k_BKHK, v_BKHK, rows, keys, q_BRHK.shape[2] != k_BKHK.shape[2])
    first_BS = None if documents is None else documents.first_BS
    return attend_over_part(q_BRHK, k_BKHK, v_BKHK, part, documents_BS=first_BS)


def edges_within(documents: Documents, places: range) -> Tensor:
    """`Documents.edges` of the tokens at these places of each sample: those of documents outside follow one another."""
    length, count = documents.numbers_BS.shape[1], len(places)
    sample, place = documents.edges // length, documents.edges % length
    return (sample * count + (place - places.start).clamp(0, count)).to(torch.int32)


def _attend_pieces(q: Tensor, k: Tensor, v: Tensor, documents: Documents, grouped: bool) -> Tensor:
    queries, keys, values = (
        # [1, H, L, K] for each document of L tokens.
        [piece.transpose(0, 1).unsqueeze(0) for piece in x.flatten(0, 1).split(documents.lengths)]
        for x in (q, k, v)
    )
    outputs = [
        F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=grouped)[0].transpose(
            0, 1
        )
        for query, key, value in zip(queries, keys, values, strict=True)
    ]
    return torch.cat(outputs).view(q.shape)


def _attend_masked(q: Tensor, k: Tensor, v: Tensor, documents: Documents, grouped: bool) -> Tensor:
    out = F.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=documents.mask().unsqueeze(1),
        enable_gqa=grouped,
    )
    return out.transpose(1, 2)


def _flash_takes(q: Tensor) -> bool:
    width = q.shape[-1]
    supported = torch.backends.cuda.is_flash_attention_available() and width % 8 == 0 and width <= 256
    return (
        supported and q.dtype in (torch.bfloat16, torch.float16) and capability_of(q.device.index) >= (8, 0)
    )


@functools.cache
def capability_of(device: int) -> tuple[int, int]:
    """Return the compute capability of a GPU."""
    return torch.cuda.get_device_capability(device)


def _attend_varlen(
    q: Tensor, k: Tensor, v: Tensor, q_edges: Tensor, k_edges: Tensor, grouped: bool
) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    options = _varlen_options(varlen_attn)
    if grouped and not options.get("enable_gqa", False):
        shared = q.shape[2] // k.shape[2]
        k, v = k.repeat_interleave(shared, dim=2), v.repeat_interleave(shared, dim=2)
    # An upper bound of the lengths is enough, and known without a wait for the device.
    longest = q.shape[1], k.shape[1]
    q_THK, k_THK, v_THK = (x.flatten(0, 1) for x in (q, k, v))
    out: Any = varlen_attn(q_THK, k_THK, v_THK, q_edges, k_edges, *longest, **options)
    return out.view(q.shape)


@functools.cache
def _varlen_options(function: Any) -> dict[str, Any]:
    """Arguments that make it causal and share heads; torch 2.11 to 2.15 have different names for them, or none."""
    names = inspect.signature(function).parameters
    options: dict[str, Any] = {"is_causal": True} if "is_causal" in names else {"window_size": (-1, 0)}
    return options | ({"enable_gqa": True} if "enable_gqa" in names else {})
