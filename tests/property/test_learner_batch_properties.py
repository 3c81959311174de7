from __future__ import annotations

from random import Random

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from perdure.learner.batch import TokenBatch

Row = tuple[list[int], list[tuple[int, int]]]

tokens = st.integers(1, 50)
row = st.tuples(
    st.lists(tokens, min_size=1, max_size=6),
    st.lists(st.tuples(tokens, st.integers(0, 1)), max_size=6),
)


@given(
    st.lists(row, min_size=1, max_size=12), st.integers(1, 60), st.randoms(use_true_random=False)
)
def test_pieces_hold_every_chosen_token_once_behind_its_own_past(
    rows: list[Row], limit: int, random: Random
) -> None:
    batch = TokenBatch.build(
        [prompt for prompt, _ in rows],
        [[token for token, _ in response] for _, response in rows],
        [[chosen for _, chosen in response] for _, response in rows],
    )
    order = list(range(len(rows)))
    random.shuffle(order)
    pieces = list(batch.pieces(np.array(order), limit=limit, device=torch.device("cpu")))

    pasts = [
        (prompt + [token for token, _ in response[:t]], token)
        for prompt, response in rows
        for t, (token, chosen) in enumerate(response)
        if chosen
    ]
    seen: list[int] = []
    for piece in pieces:
        height, width = piece.tokens_BT.shape
        assert height == 1 or height * (width + 1) <= limit
        for position, target, index in zip(
            piece.positions_K.tolist(),
            piece.targets_K.tolist(),
            piece.index_K.tolist(),
            strict=True,
        ):
            row_tokens = piece.tokens_BT[position // width].tolist()
            assert (row_tokens[: position % width + 1], target) == pasts[index]
            seen.append(index)
    assert sorted(seen) == list(range(batch.chosen)) == list(range(len(pasts)))

    again = batch.pieces(np.array(sorted(order)), limit=limit, device=torch.device("cpu"))
    for piece, other in zip(pieces, again, strict=True):
        assert torch.equal(piece.tokens_BT, other.tokens_BT)
        assert torch.equal(piece.index_K, other.index_K)
