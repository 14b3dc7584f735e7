"""Documents of one sample do not see one another: other tokens in one leave the bits of the others as they are."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwright.activations import checkpoint_blocks, compile_blocks
from shardwright.train.extend import Decoder
from shardwright.train.models import packed
from shardwright.train.models.native import hybrid, llama, mamba
from shardwright.train.models.native.hybrid import Hybrid, MixtureOfExperts
from shardwright.train.models.native.llama import Llama, LlamaConfig
from shardwright.train.models.native.mamba import selective_scan
from shardwright.train.models.packed import Documents, attend, edges_within
from tests.train.kit.hybrid import TINY
from tests.train.models.kit import packed as kit
from tests.train.models.kit.packed import PLACES, Belongings, belongings, differing

LLAMA = LlamaConfig(
    dim=32,
    n_layers=2,
    n_heads=4,
    n_kv_heads=2,
    ffn_dim=48,
    vocab_size=50,
    max_seq_len=kit.LENGTH,
    rope_theta=100.0,
)
SHAPES = {
    "llama": LLAMA,
    "tied": replace(LLAMA, tied_embeddings=True, n_kv_heads=4),
    "hybrid": TINY,
    "mamba": replace(TINY, pattern="MM", mtp_pattern=""),
    "mtp-mamba": replace(TINY, pattern="*", mtp_pattern="ME"),
}
#: The gradient of an expert is a sum over its rows, which stand elsewhere where other tokens choose it, too.
EXPERTS = (".up", ".down")


def built(name: str, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    shape = SHAPES[name]
    model: Decoder = Llama(shape) if isinstance(shape, LlamaConfig) else Hybrid(shape)
    for parameter in model.parameters():  # large enough for every layer to matter
        parameter.data += 0.1 * torch.randn_like(parameter)
    return model.to(dtype)


def loss_of(model: Any) -> kit.Loss:
    def of(returned: Any, targets: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        logits, extras = returned
        loss = kit.cross_entropy(logits, targets)
        if extras is None:
            return loss, logits, None
        sums = model.auxiliary_sums(extras, targets)
        return loss + sum(sums.values()), logits, extras.mtp_logits_BSV

    return of


def found(model: Any, inputs: Tensor, document: tuple[int, int], **options: Any) -> Belongings:
    numbers = kit.documents().to(inputs.device)
    run = options.pop("run", lambda tokens: model(tokens, extras=True, documents=numbers))
    return belongings(model, model.tok_embeddings, run, loss_of(model), inputs, document)


def check_apart(model: Any, device: str = "cpu", places: tuple[tuple[int, int], ...] = PLACES) -> None:
    """Other tokens in all other documents change nothing that belongs to one; without documents they do."""
    inputs = kit.tokens(50)
    for document in places:
        others = kit.with_other_tokens(inputs, document, 50)
        one, two = (found(model, tokens.to(device), document) for tokens in (inputs, others))
        assert differing(one, two, EXPERTS) == [], document
        for name in one.gradients:
            if name.endswith(EXPERTS):
                torch.testing.assert_close(one.gradients[name], two.gradients[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", SHAPES)
def test_other_documents_change_no_bit(name: str) -> None:
    check_apart(built(name))


@pytest.mark.parametrize("name", SHAPES)
def test_without_documents_earlier_tokens_matter(name: str) -> None:
    """The tests above look for a difference that exists."""
    model, inputs, document = built(name), kit.tokens(50), (0, 1)
    others = kit.with_other_tokens(inputs, document, 50)
    logits = [model(tokens)[kit.places(document)] for tokens in (inputs, others)]
    assert (logits[0] != logits[1]).any(-1).all()


@pytest.mark.parametrize("name", ["llama", "hybrid"])
def test_other_documents_change_no_bit_in_bfloat16(name: str) -> None:
    model, inputs = built(name, torch.bfloat16), kit.tokens(50)
    for document in PLACES:
        others = kit.with_other_tokens(inputs, document, 50)
        one, two = (found(model, tokens, document) for tokens in (inputs, others))
        assert torch.equal(one.logits, two.logits)
        assert torch.equal(one.embedded, two.embedded)


@pytest.mark.parametrize("checkpoint", ["full", "ops"])
@pytest.mark.parametrize("name", ["llama", "hybrid"])
def test_other_documents_change_no_bit_with_checkpoints(name: str, checkpoint: str) -> None:
    plain, model = built(name), built(name)
    checkpoint_blocks(model.blocks(), checkpoint)
    check_apart(model, places=PLACES[1:2])
    inputs = kit.tokens(50)
    assert differing(found(plain, inputs, (0, 1)), found(model, inputs, (0, 1))) == []


@pytest.mark.extensive("compiled graphs")
@pytest.mark.parametrize("name", ["llama", "mamba"])
def test_other_documents_change_no_bit_in_compiled_blocks(name: str) -> None:
    torch._dynamo.reset()
    model = built(name)
    compile_blocks(model.blocks(), "aot_eager")
    check_apart(model, places=PLACES[1:4])
    plain, inputs = built(name), kit.tokens(50)
    expected, compiled = (found(each, inputs, (0, 1)) for each in (plain, model))
    torch.testing.assert_close(
        compiled.logits, expected.logits, rtol=1e-4, atol=1e-4
    )  # another order of sums


@pytest.mark.extensive("compiled graphs")
def test_new_lengths_of_documents_compile_nothing() -> None:
    torch._dynamo.reset()
    model = built("mamba")
    compile_blocks(model.blocks(), "aot_eager")
    inputs, numbers = kit.tokens(50), kit.documents()
    with torch.no_grad():
        model(inputs, documents=numbers)
        with torch.compiler.set_stance("fail_on_recompile"):
            model(inputs, documents=numbers.flip(0))
            model(inputs, documents=torch.zeros_like(numbers))


# ---------------------------------------------------------------------------------------------------------------
# A document among others, and alone


@pytest.mark.parametrize("name", SHAPES)
def test_a_document_among_others_is_as_if_alone(name: str) -> None:
    """Logits, gradients of all parameters, and each auxiliary loss. Only the order of sums differs."""
    model, inputs = built(name), kit.tokens(50)
    for document in PLACES:
        own = kit.places(document)
        if int(own.sum()) < 2:
            continue
        together = found(model, inputs, document)
        alone, outputs = inputs[own].unsqueeze(0), []
        handle = model.tok_embeddings.register_forward_hook(functools.partial(kit.keep, outputs))
        logits, extras = model(alone, extras=True)
        handle.remove()
        known = torch.cat((alone[:, 1:], torch.full((1, 1), -100)), 1)
        model.zero_grad()
        loss = kit.cross_entropy(logits, known)
        if extras is not None:
            loss = loss + _sums_alone(extras, known)
        loss.backward()
        torch.testing.assert_close(together.logits, logits[0], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(together.embedded, outputs[0].grad[0], rtol=1e-3, atol=1e-4)
        for parameter_name, parameter in model.named_parameters():
            if parameter.grad is not None:
                torch.testing.assert_close(
                    together.gradients[parameter_name], parameter.grad, rtol=1e-3, atol=1e-4
                )


def _sums_alone(extras: Any, targets: Tensor) -> Tensor:
    """The losses of a sequence of one document, over its L - 1 tokens that are trained."""
    count = targets.shape[1] - 1
    total = torch.zeros(())
    if extras.imbalance_B is not None:
        total = total + count * extras.imbalance_B.sum()
    if extras.mtp_logits_BSV is not None and count > 1:
        further = torch.nn.functional.cross_entropy(
            extras.mtp_logits_BSV.flatten(0, 1), targets[:, 1:].flatten(), reduction="sum", ignore_index=-100
        )
        total = total + further * count / (count - 1)
    return total


def test_attention_of_a_document_has_the_bits_of_the_document_alone() -> None:
    torch.manual_seed(0)
    shape = (2, kit.LENGTH)
    q, k, v = torch.randn(*shape, 4, 8), torch.randn(*shape, 2, 8), torch.randn(*shape, 2, 8)
    together = attend(q, k, v, Documents(kit.documents()))
    for document in PLACES:
        own = kit.places(document)
        numbers = torch.zeros(1, int(own.sum()), dtype=torch.int32)
        alone = attend(*(x[own].unsqueeze(0) for x in (q, k, v)), Documents(numbers))
        assert torch.equal(together[own], alone[0])


def test_attention_with_a_mask_is_that_of_each_document() -> None:
    """Where a compiler or a device without another kernel takes the mask."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, kit.LENGTH, heads, 8) for heads in (4, 2, 2))
    documents = Documents(kit.documents())
    expected = attend(q, k, v, documents)
    masked = packed._attend_masked(q, k, v, documents, grouped=True)
    torch.testing.assert_close(masked, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("chunk", [1, 4, 8, 64])
def test_the_scan_restarts_at_each_document(chunk: int) -> None:
    generator = torch.Generator().manual_seed(0)
    draw: Callable[..., Tensor] = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    shape, a = (2, kit.LENGTH), -4 * torch.rand(4, generator=generator)
    x, dt = draw(*shape, 4, 3), draw(*shape, 4).exp()
    b, c = draw(*shape, 2, 5), draw(*shape, 2, 5)
    together = selective_scan(x, dt, a, b, c, chunk, Documents(kit.documents()).starts_BS)
    for document in PLACES:
        own = kit.places(document)
        alone = selective_scan(*(t[own].unsqueeze(0) for t in (x, dt)), a, b[own][None], c[own][None], chunk)
        torch.testing.assert_close(together[own], alone[0], rtol=1e-5, atol=1e-5)


def test_the_convolution_restarts_at_each_document() -> None:
    model, documents = built("mamba"), Documents(kit.documents())
    mixer = model.layers[0].mixer
    c = mixer.config
    x = torch.randn(2, kit.LENGTH, c.conv_dim, generator=torch.Generator().manual_seed(0))
    together = mixer.convolved_within(documents, x)
    for document in PLACES:
        own = kit.places(document)
        alone = torch.nn.functional.pad(x[own].T, (c.conv_width - 1, 0))
        alone = torch.nn.functional.conv1d(alone, mixer.conv_weight, mixer.conv_bias, groups=c.conv_dim).T
        torch.testing.assert_close(together[own], alone, rtol=1e-5, atol=1e-5)


def test_positions_restart_by_default_and_can_be_given() -> None:
    model, inputs, numbers = built("llama"), kit.tokens(50), kit.documents()
    expected = model(inputs, documents=numbers)
    assert torch.equal(model(inputs, documents=numbers, positions=kit.positions()), expected)
    running = torch.arange(kit.LENGTH).expand(2, -1)
    # Rotary embeddings know distances alone: the angles differ, their differences do not.
    torch.testing.assert_close(
        model(inputs, documents=numbers, positions=running), expected, rtol=1e-3, atol=1e-4
    )
    stretched = model(inputs, documents=numbers, positions=kit.positions() // 2)
    assert not torch.allclose(stretched, expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("name", ["hybrid", "mtp-mamba"])
def test_auxiliary_losses_are_the_sums_of_those_of_documents(name: str) -> None:
    """With all documents trained: none is asked for a token of the next one."""
    model, inputs, numbers = built(name), kit.tokens(50), kit.documents()
    _, extras = model(inputs, extras=True, documents=numbers)
    every = [(sample, number) for sample, lengths in enumerate(kit.LENGTHS) for number in range(len(lengths))]
    of_each = [kit.targets(inputs, document) for document in every]
    found_sums = model.auxiliary_sums(extras, torch.stack(of_each).amax(0))
    for loss, found_sum in found_sums.items():
        expected = sum(model.auxiliary_sums(extras, targets)[loss] for targets in of_each)
        torch.testing.assert_close(found_sum, expected, rtol=1e-5, atol=1e-5)


def test_a_row_of_an_expert_has_the_same_bits_beside_any_number_of_others() -> None:
    """The first token is a document. Its experts are chosen by it alone, or by all tokens."""
    mixture = next(m for m in built("hybrid").modules() if isinstance(m, MixtureOfExperts))
    x, numbers = torch.randn(1, 20, 16), torch.ones(1, 20, dtype=torch.int32)
    numbers[0, 0] = 0
    probability = torch.full((1, 20, 5), 0.1)
    probability[..., :2] = 0.3
    outputs = []
    for others in (probability[:, 1:], probability[:, 1:].flip(-1)):
        routing = torch.cat((probability[:, :1], others), dim=1)
        mixture.probabilities = lambda _, routing=routing: routing  # type: ignore[method-assign]
        outputs.append(mixture(x, documents=Documents(numbers))[0][:, 0])
    assert torch.equal(*outputs)


# ---------------------------------------------------------------------------------------------------------------
# Without documents, and wrong ones


@pytest.mark.parametrize("name", ["llama", "hybrid"])
def test_without_documents_nothing_of_this_runs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **options: Any) -> Any:
        raise AssertionError("ran without documents")

    for module in (llama, hybrid):
        monkeypatch.setattr(module, "Documents", refuse)
    monkeypatch.setattr(packed, "Documents", refuse)
    monkeypatch.setattr(llama, "attend", refuse)
    monkeypatch.setattr(mamba.Mamba2, "convolved_within", refuse)
    model, inputs = built(name), kit.tokens(50)
    logits, extras = model(inputs, extras=True)
    loss_of(model)((logits, extras), inputs)
    with pytest.raises(AssertionError, match="ran without"):
        model(inputs, documents=kit.documents())


@pytest.mark.parametrize("wrong", [torch.zeros(2, 3, dtype=torch.int32), torch.zeros(2, kit.LENGTH)])
def test_wrong_documents_are_an_error(wrong: Tensor) -> None:
    with pytest.raises(ValueError, match="documents: expected an integer for each token"):
        built("llama")(kit.tokens(50), documents=wrong)


def test_models_say_whether_they_separate() -> None:
    assert Llama.separates and Hybrid.separates and not Decoder.separates


# ---------------------------------------------------------------------------------------------------------------
# On a GPU


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", ["llama", "hybrid"])
def test_other_documents_change_no_bit_on_a_gpu(name: str, dtype: torch.dtype) -> None:
    model, inputs = built(name).to("cuda", dtype), kit.tokens(50)
    with kit.deterministic():
        for document in PLACES:
            others = kit.with_other_tokens(inputs, document, 50)
            one, two = (found(model, tokens.cuda(), document) for tokens in (inputs, others))
            assert torch.equal(one.logits, two.logits)
            assert torch.equal(one.embedded, two.embedded)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_attention_on_a_gpu_is_that_of_the_cpu() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, kit.LENGTH, heads, 16) for heads in (4, 2, 2))
    expected = attend(q, k, v, Documents(kit.documents()))
    documents = Documents(kit.documents().cuda())
    for dtype, tolerance in ((torch.float32, 1e-4), (torch.bfloat16, 3e-2)):
        found_there = attend(*(x.to("cuda", dtype) for x in (q, k, v)), documents)
        torch.testing.assert_close(found_there.float().cpu(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_compiled_blocks_on_a_gpu() -> None:
    torch._dynamo.reset()
    plain = built("llama").to("cuda", torch.bfloat16)
    model = copy.deepcopy(plain)
    compile_blocks(model.blocks(), "inductor")
    inputs, numbers = kit.tokens(50).cuda(), kit.documents().cuda()
    for rows in (numbers, numbers.flip(0), torch.zeros_like(numbers)):
        torch.testing.assert_close(
            model(inputs, documents=rows), plain(inputs, documents=rows), rtol=5e-2, atol=5e-2
        )


@pytest.mark.parametrize("places", [range(8), range(8, 16), range(5, 27), range(32)])
def test_edges_of_a_part_are_those_of_its_tokens(places: range) -> None:
    documents = Documents(kit.documents())
    own = kit.documents()[:, places.start : places.stop]
    lengths = edges_within(documents, places).diff()
    expected = [
        int((row == number).sum())
        for row, of in zip(own, kit.LENGTHS, strict=True)
        for number in range(len(of))
    ]
    assert lengths.tolist() == expected


@pytest.mark.parametrize("given", [False, True])
def test_edges_are_those_of_the_numbers(given: bool) -> None:
    """Also for pairs of tokens, and without the last tokens of each sample, where no host counts documents again."""
    whole = Documents(kit.documents())
    if given:  # with documents without tokens at the end, as `of_pairs` makes them
        padded = torch.nn.functional.pad(whole.edges, (0, 2), value=kit.documents().numel())
        whole = Documents(kit.documents(), edges=padded)
    pairs = whole.of_pairs()
    shorter = pairs.before(kit.LENGTH - 1), whole.before(1), whole.before(kit.LENGTH - 3)
    for documents in (whole, pairs, *shorter):
        expected = Documents(documents.numbers_BS)
        assert documents.lengths == expected.lengths
        assert documents.edges.unique_consecutive().tolist() == expected.edges.tolist()
