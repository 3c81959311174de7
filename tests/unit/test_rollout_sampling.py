import numpy as np
import pytest
import torch

from perdure.core.keyed_random import generator
from perdure.rollout.sampling import RowSampling, sample


def sampling(
    rows: int, *, top_k: int = 4, top_p: float = 1.0, temperature: float = 1.0, greedy: bool = False
) -> RowSampling:
    truncated = top_k < 4 or top_p < 1
    return RowSampling(
        temperature_N=torch.full((rows,), temperature),
        top_k_N=torch.full((rows,), top_k),
        top_p_N=torch.full((rows,), top_p, dtype=torch.float64),
        greedy_N=torch.full((rows,), greedy),
        truncated_N=torch.full((rows,), True) if truncated else None,
        some_greedy=greedy,
    )


LOGITS = torch.tensor([0.1, 0.4, 0.2, 0.3]).log()


@pytest.mark.parametrize(
    ("uniform", "token"),
    [(0.0, 0), (0.0999, 0), (0.1001, 1), (0.4999, 1), (0.5001, 2), (0.7001, 3), (1 - 2**-53, 3)],
)
def test_the_cumulative_distribution_is_inverted_in_token_order(uniform: float, token: int) -> None:
    uniforms = torch.tensor([uniform], dtype=torch.float64)
    found, logprob = sample(LOGITS[None], uniforms, sampling(1))
    assert int(found) == token
    assert float(logprob) == pytest.approx(float(LOGITS[token]), abs=1e-6)


@pytest.mark.parametrize(
    ("changed", "kept"),
    [
        ({"top_k": 1}, {1: 1.0}),
        ({"top_k": 2}, {1: 4 / 7, 3: 3 / 7}),
        ({"top_p": 0.01}, {1: 1.0}),
        ({"top_p": 0.5}, {1: 4 / 7, 3: 3 / 7}),
        ({"top_p": 0.75}, {1: 4 / 9, 2: 2 / 9, 3: 3 / 9}),
        ({"top_k": 3, "top_p": 0.5}, {1: 4 / 7, 3: 3 / 7}),
        ({"top_k": 2, "top_p": 0.5}, {1: 1.0}),
        ({"temperature": 0.5}, {0: 1 / 30, 1: 16 / 30, 2: 4 / 30, 3: 9 / 30}),
    ],
)
def test_frequencies_are_those_of_the_kept_distribution(
    changed: dict[str, float], kept: dict[int, float]
) -> None:
    draws = torch.from_numpy(generator(1, "test").random(20_000))
    tokens, logprobs = sample(
        LOGITS.expand(20_000, 4),
        draws,
        sampling(20_000, **changed),  # type: ignore[arg-type]
    )
    shares = np.bincount(tokens.numpy(), minlength=4) / 20_000
    expected = np.array([kept.get(token, 0.0) for token in range(4)])
    np.testing.assert_allclose(shares, expected, atol=0.015)
    assert set(np.flatnonzero(shares).tolist()) <= set(kept)
    np.testing.assert_allclose(logprobs.exp(), expected[tokens.numpy()], atol=1e-5)


def test_equal_logits_rank_by_token_id() -> None:
    tokens, _ = sample(
        torch.zeros(9, 4), torch.linspace(0, 0.99, 9, dtype=torch.float64), sampling(9, top_k=2)
    )
    assert set(tokens.tolist()) == {0, 1}


def test_an_impossible_last_token_is_never_drawn() -> None:
    logits = torch.tensor([[0.0, 1.0, -torch.inf, -torch.inf]])
    uniform = torch.tensor([1 - 2**-53], dtype=torch.float64)
    assert int(sample(logits, uniform, sampling(1))[0]) == 1


def test_greedy_reports_the_temperature_1_distribution() -> None:
    token, logprob = sample(LOGITS[None], torch.zeros(1).double(), sampling(1, greedy=True))
    assert int(token) == 1
    assert float(logprob) == pytest.approx(np.log(0.4), abs=1e-6)
