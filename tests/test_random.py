"""Random numbers: the formula, what they look like, and that they do not depend on the mesh."""

from __future__ import annotations

import itertools
import math

import pytest
import rank_jobs
import torch
import torch.nn.functional as F
from torch import nn

import meshstep as ms
from meshstep.ir import random


def key(seed: int = 123, step: int = 0) -> torch.Tensor:
    return torch.tensor([seed, step])


def draw(op, *shape, seed=123, step=0, stream=0, dtype=torch.float64):
    return op(key(seed, step), [None] * len(shape), stream, list(shape), list(shape), dtype)


@pytest.mark.parametrize(
    ("counter", "secret", "words"),
    [  # known answers published with Random123
        ((0,) * 4, (0,) * 2, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_known_answers(counter, secret, words):
    found = random.philox(tuple(map(torch.tensor, counter)), tuple(map(torch.tensor, secret)))
    assert tuple(int(word) for word in found) == words


def test_a_part_is_the_part_of_the_whole():
    whole = draw(random.uniform, 8, 6, 4)
    assert not torch.equal(*whole.chunk(2))
    for rows, columns in itertools.product(range(2), range(3)):
        start = [torch.tensor(rows * 4), torch.tensor(columns * 2), None]
        part = random.uniform(key(), start, 0, [4, 2, 4], [8, 6, 4], torch.float64)
        assert torch.equal(part, whole[rows * 4 : rows * 4 + 4, columns * 2 : columns * 2 + 2])


def test_large_tensors_are_made_in_pieces_and_are_the_same():
    shape = [3, random.CHUNK]
    want = random.random_tensor(random.to_normal, key(), [None, None], 5, shape, shape, torch.float32)
    assert torch.equal(draw(random.normal, *shape, stream=5, dtype=torch.float32), want)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_uniform_numbers_have_the_moments_and_never_reach_one(dtype):
    x = draw(random.uniform, 400_000, dtype=dtype).double()
    assert 0 <= x.min() < 1e-2
    assert x.max() < 1
    n = x.numel()
    coarse = 2.0**-8 if dtype == torch.bfloat16 else 0.0  # cut off, not rounded
    assert abs(x.mean() - (0.5 - coarse / 2)) < 5 / math.sqrt(12 * n)
    assert abs(x.var() - 1 / 12) < 5 * math.sqrt(1 / 180 / n)
    counts = torch.histc(x, 64, 0, 1)
    assert ((counts - n / 64) ** 2 / (n / 64)).sum() < 64 + 5 * math.sqrt(128)  # chi-squared, 63 degrees of freedom


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_normal_numbers_have_the_moments(dtype):
    x = draw(random.normal, 400_000, dtype=dtype).double()
    n = x.numel()
    assert abs(x.mean()) < 5 / math.sqrt(n)
    assert abs(x.var() - 1) < 5 * math.sqrt(2 / n)
    assert abs((x**3).mean()) < 5 * math.sqrt(15 / n)
    assert abs((x**4).mean() - 3) < 5 * math.sqrt(96 / n)
    assert 4 < x.abs().max() < 7


def test_integers_have_all_their_bits():
    x = draw(random.integers, 100_000, dtype=torch.int64)
    assert x.min() >= 0
    for bit in range(63):
        assert abs((x >> bit & 1).double().mean() - 0.5) < 5 * 0.5 / math.sqrt(x.numel())


def test_rows_steps_streams_and_seeds_are_independent():
    n = 50_000
    rows = draw(random.uniform, 4, n) - 0.5
    others = [draw(random.uniform, 1, n, **{name: 1 + key().tolist()[0]}) - 0.5 for name in ("step", "stream", "seed")]
    every = torch.cat([rows, *others])
    correlations = (every @ every.T) / n * 12
    assert (correlations - torch.eye(len(every), dtype=torch.float64)).abs().max() < 5 / math.sqrt(n)


class Noisy(nn.Module):
    """A dropout, a noise and a random choice."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 16), nn.Linear(16, 3)

    def forward(self, x):
        h = F.dropout(F.relu(self.first(x)), 0.4, self.training)
        h = h + 0.1 * torch.randn_like(h) * torch.randint(3, h.shape[:1])[:, None]
        return self.second(F.dropout2d(h[..., None, None], 0.2, self.training)[..., 0, 0])


def train_step(model, optimizer, x, y):
    loss = F.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def noisy_arguments(i, model=None):
    model = model or Noisy()
    generator = torch.Generator().manual_seed(i)
    return model, torch.randn(8, 6, generator=generator), torch.randn(8, 3, generator=generator)


def losses(ranks: int, steps: int = 3) -> list[float]:
    torch.manual_seed(1)
    model = Noisy().double()
    optimizer = torch.optim.AdamW(model.parameters())
    step = ms.simulate(train_step, mesh=ms.Mesh(dp=ranks))
    torch.manual_seed(2)
    return [step(model, optimizer, *(t.double() for t in noisy_arguments(i)[1:])).item() for i in range(steps)]


def test_any_mesh_gives_the_numbers_of_one_rank():
    want = losses(1)
    assert len(set(want)) == 3
    for ranks in (2, 4, 8):
        assert losses(ranks) == pytest.approx(want, abs=1e-12)


def test_the_compiled_step_equals_the_plain_one_with_the_same_numbers():
    model = Noisy()
    optimizer = torch.optim.AdamW(model.parameters())

    def make_args(i):
        _, x, y = noisy_arguments(i, model)
        return (model, optimizer, x, y), {}

    found = ms.verify(train_step, make_args, mesh=ms.Mesh(dp=4))
    assert found.ok, found
    assert ms.simulate(train_step, mesh=ms.Mesh(dp=4)).lower(*make_args(0)[0]).fallbacks == ()


def test_halves_of_a_sharded_mask_differ_and_make_the_mask_of_one_rank():
    def dropped(x):
        return F.dropout(x, 0.5)

    torch.manual_seed(3)
    halves = ms.simulate(dropped, mesh=ms.Mesh(dp=2))(torch.ones(8, 32))
    whole = ms.simulate(dropped, mesh=ms.Mesh(dp=1))(torch.ones(8, 32))
    assert torch.equal(halves, whole)
    assert not torch.equal(halves[:4], halves[4:])
    assert sorted(set(halves.flatten().tolist())) == [0.0, 2.0]


def test_nothing_is_sent_for_a_mask_and_only_the_part_is_made():
    lowered = ms.compile(mesh=ms.Mesh(dp=4))(lambda x: F.dropout(x, 0.5)).lower(torch.ones(2, 32))
    assert lowered.communication == ()
    (call,) = (node for node in lowered.local_program.calls if node.target is random.uniform)
    assert call.meta["type"].shape == (2, 32)


def test_manual_seed_starts_the_numbers_anew_and_steps_differ():
    step = ms.simulate(lambda x: torch.rand_like(x), mesh=ms.Mesh(dp=2))
    x = torch.zeros(4)
    torch.manual_seed(5)
    first = [step(x) for _ in range(3)]
    assert not torch.equal(first[0], first[1])
    torch.manual_seed(6)
    assert not torch.equal(step(x), first[0])
    torch.manual_seed(5)
    again = [step(x) for _ in range(3)]
    assert all(map(torch.equal, first, again))
    assert step.cache_info().misses == 1


def test_the_users_generator_moves_once_for_a_seed_so_that_the_same_seed_again_is_seen():
    step = ms.simulate(lambda x: torch.rand_like(x), mesh=ms.Mesh(dp=2))
    x = torch.zeros(4)
    torch.manual_seed(9)
    fresh = torch.get_rng_state()
    first = step(x)
    moved = torch.get_rng_state()
    assert not torch.equal(moved, fresh)
    assert not torch.equal(step(x), first)
    assert torch.equal(torch.get_rng_state(), moved)
    torch.manual_seed(9)
    assert torch.equal(step(x), first)


def test_a_step_that_draws_nothing_leaves_the_generator_alone():
    before = torch.get_rng_state()
    ms.simulate(lambda x: x * 2, mesh=ms.Mesh(dp=2))(torch.zeros(4))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rare_dropout_is_rare_in_every_dtype(dtype):
    step = ms.simulate(lambda x: F.dropout(x, 0.001), mesh=ms.Mesh(dp=2))
    dropped = (step(torch.ones(400, 1000, dtype=dtype)) == 0).double().mean().item()
    assert dropped == pytest.approx(0.001, rel=0.25)


def test_steps_of_other_names_get_other_numbers():
    def one(x):
        return torch.rand_like(x)

    def two(x):
        return torch.rand_like(x)

    x = torch.zeros(16)
    assert not torch.equal(*(ms.simulate(f, mesh=ms.Mesh(dp=2))(x) for f in (one, two)))


RANDOM_OPS = {
    "rand": lambda x: torch.rand(x.shape),
    "randn": lambda x: torch.randn(x.shape, dtype=torch.float64),
    "randint": lambda x: torch.randint(-3, 9, x.shape).double(),
    "randperm": lambda x: torch.randperm(32).double(),
    "bernoulli": lambda x: torch.bernoulli(torch.full_like(x, 0.3)),
    "bernoulli_": lambda x: torch.empty_like(x).bernoulli_(0.3),
    "uniform_": lambda x: torch.empty_like(x).uniform_(-1, 2),
    "normal_": lambda x: torch.empty_like(x).normal_(1, 2),
    "normal": lambda x: torch.normal(x, 2.0),
    "exponential_": lambda x: torch.empty_like(x).exponential_(2.0),
    "cauchy_": lambda x: torch.empty_like(x).cauchy_(),
    "log_normal_": lambda x: torch.empty_like(x).log_normal_(),
    "geometric_": lambda x: torch.empty_like(x).geometric_(0.4),
    "random_": lambda x: torch.empty_like(x, dtype=torch.int64).random_(0, 7).double(),
    "rand_like": lambda x: torch.rand_like(x),
    "randn_like": lambda x: torch.randn_like(x),
    "randint_like": lambda x: torch.randint_like(x, 5),
    "dropout": lambda x: F.dropout(x, 0.25),
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.25),
    "multinomial_of_noise": lambda x: (x.softmax(-1) / torch.empty_like(x).exponential_()).argmax(-1).double(),
}


@pytest.mark.parametrize("name", RANDOM_OPS)
def test_every_random_op_is_the_same_on_any_mesh_and_in_the_plain_step(name):
    def step(x):
        return RANDOM_OPS[name](x)

    x = torch.randn(4, 8)
    found = ms.verify(step, lambda i: ((x,), {}), mesh=ms.Mesh(dp=2), steps=2)
    assert found.ok, found
    assert found.max_error == 0.0


def test_an_op_that_draws_in_another_way_is_refused():
    with pytest.raises(ms.CaptureError) as caught:
        ms.simulate(lambda x: torch.poisson(x), mesh=ms.Mesh(dp=2))(torch.ones(4))
    assert caught.value.what == "aten.poisson.default draws random numbers in a way that depends on the mesh"


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_real_ranks_draw_the_numbers_of_one_rank_whatever_their_own_seeds(pools, backend):
    found = pools(2).run(rank_jobs.dropout_losses, backend, timeout=300)
    assert found[0] == found[1]
    torch.manual_seed(11)
    assert found[0] == pytest.approx(rank_jobs.dropout_losses_of_one_rank(), abs=1e-12)
