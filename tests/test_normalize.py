"""Running statistics inside the model. Shapes: F features."""

import torch
from isaaclab_rnn_ppo.utils.normalize import NormalizedValue, RunningNormalizer
from tensordict import TensorDict
from torch import nn


def test_statistics_equal_those_of_everything_seen():
    generator = torch.Generator().manual_seed(0)
    # A large offset: sums of squares in float32 would lose the variance altogether.
    batches = [1e4 + 0.1 * torch.randn(n, 5, 3, generator=generator) for n in (7, 1, 30)]
    normalizer = RunningNormalizer(3)
    for batch in batches:
        normalizer.update(batch)
    data = torch.cat([b.flatten(0, 1) for b in batches]).double()
    assert normalizer.count == len(data) and normalizer.mean.dtype == torch.float64
    torch.testing.assert_close(normalizer.mean, data.mean(0), rtol=1e-12, atol=0)
    torch.testing.assert_close(normalizer.var, data.var(0, correction=0), rtol=1e-6, atol=0)
    out = normalizer(torch.cat(batches))
    assert out.dtype == torch.float32
    torch.testing.assert_close(out.flatten(0, 1).std(0, correction=0), torch.ones(3), rtol=0.01, atol=0)


def test_by_hand():
    normalizer = RunningNormalizer(1, clip=1.5)
    assert normalizer(torch.tensor([[1.25], [40.0]])).tolist() == [[1.25], [1.5]]  # untouched before any update
    normalizer.update(torch.tensor([[0.0], [4.0]]))
    assert (normalizer.mean.item(), normalizer.var.item()) == (2.0, 4.0)
    normalizer.update(torch.tensor([[8.0], [8.0]]))
    assert (normalizer.mean.item(), normalizer.var.item()) == (5.0, 11.0)  # of 0, 4, 8, 8
    normalizer.var.fill_(4.0)
    assert normalizer(torch.tensor([[7.0], [100.0], [-100.0]])).tolist() == [[1.0], [1.5], [-1.5]]


def test_a_feature_that_never_varies_becomes_zero():
    normalizer = RunningNormalizer(2)
    normalizer.update(torch.tensor([[3.0, 0.0], [3.0, 1.0]]))
    assert normalizer(torch.tensor([[3.0, 1.0]])).tolist() == [[0.0, 1.0]]


def test_non_finite_rows_are_left_out():
    normalizer, clean = RunningNormalizer(2), RunningNormalizer(2)
    data = torch.randn(6, 2)
    dirty = torch.cat([data, torch.tensor([[float("nan"), 0.0], [0.0, float("inf")]])])
    normalizer.update(dirty)
    clean.update(data)
    for name in ("mean", "var", "count"):
        torch.testing.assert_close(getattr(normalizer, name), getattr(clean, name))
    normalizer.update(torch.full((3, 2), float("nan")))
    assert normalizer.count == 6 and normalizer.var.isfinite().all()
    empty = RunningNormalizer(2)
    empty.update(torch.full((3, 2), float("nan")))
    assert empty.var.tolist() == [1.0, 1.0] and empty.mean.tolist() == [0.0, 0.0]


def test_an_update_changes_no_value_but_the_scale_it_is_learnt_in():
    torch.manual_seed(0)
    value = NormalizedValue(nn.Sequential(nn.Linear(4, 8), nn.ELU(), nn.Linear(8, 1))).double()
    features, targets = torch.randn(20, 4).double(), 50 + 7 * torch.randn(20, 5, 1).double()
    for scale in (1.0, 3.0):
        before = value(features)
        value.update(targets * scale)
        torch.testing.assert_close(value(features), before, rtol=1e-12, atol=1e-12)
    standardised = (targets - value.returns.mean) / value.returns.std
    raw = value.net(features)
    torch.testing.assert_close(value(features), raw * value.returns.std + value.returns.mean)
    assert standardised.abs().max() < 10


def test_statistics_travel_with_the_weights():
    source, copy = (
        nn.Sequential(RunningNormalizer(3), nn.Linear(3, 1)),
        nn.Sequential(RunningNormalizer(3), nn.Linear(3, 1)),
    )
    source[0].update(5 + torch.randn(10, 3))
    # What a weight push does on either side.
    weights = TensorDict.from_module(source).data.clone()
    TensorDict.from_module(copy).data.update_(weights)
    x = torch.randn(4, 3)
    assert torch.equal(source(x), copy(x))
    assert copy[0].mean.dtype == torch.float64 and torch.equal(copy[0].mean, source[0].mean)
    assert {"0.mean", "0.var", "0.count"} <= set(source.state_dict())
    assert not [n for n, _ in source.named_parameters() if n.startswith("0.")]
