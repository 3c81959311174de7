"""Vectorized sampling against a plain one, row by row."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from perdure.rollout.sampling import RowSampling, sample

VOCABULARY = 7
rows = st.tuples(
    st.lists(st.floats(-9, 9, width=32), min_size=VOCABULARY, max_size=VOCABULARY),
    st.floats(0.05, 4.0),
    st.integers(1, VOCABULARY),
    st.floats(0.01, 1.0),
    st.booleans(),
    st.floats(0, 1, exclude_max=True),
)
Row = tuple[list[float], float, int, float, bool, float]


def batch(chosen: list[Row]) -> tuple[torch.Tensor, torch.Tensor, RowSampling]:
    logits, temperatures, top_k, top_p, greedy, uniforms = zip(*chosen, strict=True)
    plain = [k == VOCABULARY and p == 1 for k, p in zip(top_k, top_p, strict=True)]
    greedy_N = torch.tensor(greedy)
    # The engine gives greedy rows temperature 1 and no truncation.
    sampling = RowSampling(
        temperature_N=torch.tensor(temperatures).masked_fill(greedy_N, 1.0),
        top_k_N=torch.tensor(top_k).masked_fill(greedy_N, VOCABULARY),
        top_p_N=torch.tensor(top_p, dtype=torch.float64).masked_fill(greedy_N, 1.0),
        greedy_N=greedy_N,
        truncated_N=None if all(plain) else ~torch.tensor(plain) & ~greedy_N,
        some_greedy=any(greedy),
    )
    return torch.tensor(logits), torch.tensor(uniforms, dtype=torch.float64), sampling


def kept_probabilities(row: Row) -> np.ndarray:
    """Probability of every token after temperature and truncation, float64."""
    logits, temperature, top_k, top_p, _, _ = row
    scaled = np.array(logits, np.float32) / np.float32(temperature)
    probs = np.exp(scaled.astype(np.float64) - scaled.max())
    ranked = np.argsort(-scaled, kind="stable")[:top_k]
    shares = probs[ranked] / probs[ranked].sum()
    before = np.cumsum(shares) - shares
    kept = ranked[(before < top_p - 1e-6) | (ranked == ranked[0])] if top_p < 1 else ranked
    found = np.zeros(VOCABULARY)
    found[kept] = probs[kept] / probs[kept].sum()
    return found


@settings(max_examples=200, deadline=None, database=None)
@given(chosen=st.lists(rows, min_size=1, max_size=6))
def test_tokens_and_logprobs_equal_the_plain_computation(chosen: list[Row]) -> None:
    tokens, logprobs = sample(*batch(chosen))
    for row, token, logprob in zip(chosen, tokens.tolist(), logprobs.tolist(), strict=True):
        logits, _, _, top_p, greedy, uniform = row
        if greedy:
            assert logits[token] == max(logits)
            expected = torch.tensor(logits).log_softmax(0)[token].item()
            assert abs(logprob - expected) < 1e-5
            continue
        probs = kept_probabilities(row)
        cdf = np.cumsum(probs)
        below = cdf[token - 1] if token else 0.0
        # Where a threshold falls on an edge, float32 may choose either side; skip only those.
        if top_p < 1 and probs[token] == 0:
            continue
        assert below - 1e-5 <= uniform <= cdf[token] + 1e-5
        if top_p == 1:
            assert abs(np.exp(logprob) - probs[token]) < 1e-5


@settings(max_examples=100, deadline=None, database=None)
@given(chosen=st.lists(rows, min_size=2, max_size=6))
def test_a_row_does_not_see_the_others(chosen: list[Row]) -> None:
    tokens, logprobs = sample(*batch(chosen))
    for index, row in enumerate(chosen):
        token, logprob = sample(*batch([row]))
        assert int(token) == int(tokens[index])
        assert logprob.numpy().tobytes() == logprobs[index : index + 1].numpy().tobytes()
