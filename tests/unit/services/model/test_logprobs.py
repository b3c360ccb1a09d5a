"""Log-probabilities in chunks: the same numbers and gradients as from all logits at once, for every architecture."""

from __future__ import annotations

import copy
import weakref
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from services.model.layout import PackedLayout
from services.model.load import packed_logits
from tests.architectures import PACKABLE, VOCABULARY, build, own_attention, sequences
from tests.trainers import policy_of

POSITIONS = torch.tensor([1, 3, 4, 6, 7, 8, 10])  # of sequences of 5 and 6 tokens
TEMPERATURE = 0.7


def row() -> tuple[torch.Tensor, PackedLayout]:
    return torch.cat(sequences(5, 6)), PackedLayout.of([5, 6])


def plain(model: PreTrainedModel) -> tuple[torch.Tensor, torch.Tensor]:
    """All logits at once, written out."""
    token_ids, layout = row()
    logits = packed_logits(model, token_ids, layout, POSITIONS - 1) / TEMPERATURE
    probs = logits.softmax(-1)
    logprobs = torch.log(probs[torch.arange(len(POSITIONS)), token_ids[POSITIONS]])
    return logprobs, -(probs * probs.log()).sum(-1)


def gradients(model: PreTrainedModel, numbers: tuple[torch.Tensor, torch.Tensor]) -> dict[str, torch.Tensor]:
    model.zero_grad()
    weights = torch.linspace(-1, 1, len(POSITIONS), dtype=numbers[0].dtype)
    ((numbers[0] * weights).sum() - 0.3 * numbers[1].square().sum()).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", PACKABLE)
@pytest.mark.parametrize("chunk", [1, 3, 100])
def test_any_chunk_gives_the_numbers_and_gradients_of_the_plain_form(name: str, chunk: int, tmp_path: Path) -> None:
    model, tolerance = build(tmp_path, name), 1e-5
    if "moe" not in name:  # the experts' grouped product knows no f64
        model, tolerance = model.double(), 1e-10
    head = policy_of(model, chunk_elements=chunk * VOCABULARY)
    assert head.is_chunked
    expected = plain(model)
    found = head(*row(), POSITIONS, temperature=TEMPERATURE, entropy_gradient=True)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=tolerance, rtol=0)
    one, other = gradients(model, found), gradients(model, expected)
    assert one.keys() == other.keys()
    for key, gradient in one.items():
        assert float((gradient - other[key]).norm()) <= tolerance * max(float(other[key].norm()), 1e-3), key


@pytest.mark.parametrize("name", ["gemma2", "qwen3", "granite"])
def test_in_f32_the_numbers_are_those_of_the_architecture_s_own_attention(name: str, tmp_path: Path) -> None:
    """Each sequence alone, through the whole model: soft cap (gemma2) and scale (granite) included."""
    model = build(tmp_path, name)
    twin = own_attention(model, tmp_path)
    logprobs, entropies = policy_of(model, chunk_elements=2 * VOCABULARY)(*row(), POSITIONS, temperature=TEMPERATURE)
    rows = []
    with torch.no_grad():
        for ids in sequences(5, 6):
            logits = twin(input_ids=ids[None], use_cache=False).logits[0, :-1].double() / TEMPERATURE
            own = logits.log_softmax(-1)
            rows.append(torch.stack([own.gather(1, ids[1:, None])[:, 0], -(own.exp() * own).sum(-1)]))
    expected = torch.cat([torch.cat([torch.zeros(2, 1), part], dim=1) for part in rows], dim=1)[:, POSITIONS]
    torch.testing.assert_close(torch.stack([logprobs, entropies]).detach().double(), expected, atol=2e-5, rtol=0)


def test_entropy_carries_a_gradient_only_where_asked(tmp_path: Path) -> None:
    head = policy_of(build(tmp_path, "llama"), chunk_elements=2 * VOCABULARY)
    assert not head(*row(), POSITIONS, temperature=1.0)[1].requires_grad
    assert head(*row(), POSITIONS, temperature=1.0, entropy_gradient=True)[1].requires_grad


def test_without_gradients_the_numbers_are_the_same_ones(tmp_path: Path) -> None:
    """As for a reference policy and for recomputed old log-probabilities, whose ratio must be exactly 1."""
    head = policy_of(build(tmp_path, "llama"), chunk_elements=2 * VOCABULARY)
    with torch.no_grad():
        still = head(*row(), POSITIONS, temperature=TEMPERATURE)[0]
    moving = head(*row(), POSITIONS, temperature=TEMPERATURE)[0]
    assert moving.requires_grad and not still.requires_grad and torch.equal(still, moving)


class LargestLive(TorchDispatchMode):
    """Elements of tensors `[*, VOCABULARY]` that live at the same time, at most; weights, also turned, do not count."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self._shapes = {shape for p in model.parameters() for shape in (p.shape, p.shape[::-1])}
        self._live: dict[int, int] = {}
        self.most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if not isinstance(tensor, torch.Tensor) or tensor.dim() == 0 or tensor.shape in self._shapes:
                continue
            if tensor.shape[-1] == VOCABULARY:
                key = tensor.untyped_storage().data_ptr()
                self._live[key] = tensor.numel()
                weakref.finalize(tensor.untyped_storage(), self._live.pop, key, None)
                self.most = max(self.most, sum(self._live.values()))
        return out


def most_live(model: PreTrainedModel, chunk: int) -> int:
    head = policy_of(model, chunk_elements=chunk * VOCABULARY)
    (ids,) = sequences(64)
    with LargestLive(model) as live:
        logprobs, _ = head(ids, PackedLayout.of([64]), torch.arange(1, 64), temperature=1.0)
        logprobs.sum().backward()
    return live.most // VOCABULARY


def test_no_tensor_of_all_positions_by_the_vocabulary_lives(tmp_path: Path) -> None:
    model = build(tmp_path, "llama")
    at_once, in_chunks = most_live(model, 64), most_live(model, 4)
    assert at_once >= 63 > 8 * 4 >= in_chunks


def test_the_model_itself_is_not_changed_and_weights_are_shared(tmp_path: Path) -> None:
    model = build(tmp_path, "gemma2")
    backbone, before = model.base_model, copy.deepcopy(model.state_dict())
    head = policy_of(model, chunk_elements=VOCABULARY)
    first = head(*row(), POSITIONS, temperature=1.0)[0]
    assert model.base_model is backbone and model.state_dict().keys() == before.keys()
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(0.5)
    assert not torch.allclose(first, head(*row(), POSITIONS, temperature=1.0)[0])


def test_an_architecture_that_looks_at_more_than_hidden_states_goes_the_plain_way(tmp_path: Path) -> None:
    """Scenario: a forward that adds something it gets from the ids. Result: found by the probe; same numbers."""
    model = build(tmp_path, "llama")
    own = type(model)

    class Biased(own):
        def forward(self, input_ids=None, **kwargs):
            out = super().forward(input_ids=input_ids, **kwargs)
            out.logits = out.logits * (2.0 if input_ids is not None else 1.0)
            return out

    class Demanding(own):
        def forward(self, input_ids=None, **kwargs):
            return super().forward(input_ids=input_ids.clone(), **kwargs)

    for kind in (Biased, Demanding):
        model.__class__ = kind
        head = policy_of(model, chunk_elements=VOCABULARY)
        assert not head.is_chunked
        found = head(*row(), POSITIONS, temperature=TEMPERATURE)
        torch.testing.assert_close(found, plain(model), atol=1e-5, rtol=0)
    model.__class__ = own
