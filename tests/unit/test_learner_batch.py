from __future__ import annotations

import numpy as np
import pytest
import torch
from learner_cases import make_model, random_groups, trajectory

from perdure.core.errors import TrainingError
from perdure.core.trajectories import RewardedGroup
from perdure.learner.batch import TokenBatch, UpdateBatch
from perdure.learner.passes import evaluate, policy_logprobs

CPU = torch.device("cpu")


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("limit", [1, 40, 10_000])
def test_log_probabilities_equal_those_of_each_trajectory_alone(limit: int, masked: bool) -> None:
    model, groups = make_model(), random_groups(masked=masked)
    batch = UpdateBatch.build(groups, CPU)
    found_M = evaluate(
        batch.tokens,
        lambda piece: policy_logprobs(model, piece, temperature=0.7)[0],
        limit=limit,
        device=CPU,
    )
    expected: list[torch.Tensor] = []
    for one in (one for group in groups for one in group.trajectories):
        tokens = torch.from_numpy(np.concatenate([one.prompt_ids_P, one.response_ids_T])).long()
        with torch.no_grad():
            logprobs = torch.log_softmax(model.logits(model(tokens[None]))[0] / 0.7, -1)
        start = len(one.prompt_ids_P)
        taken = logprobs[start - 1 : -1].gather(1, tokens[start:, None]).squeeze(1)
        expected.append(taken[torch.from_numpy(one.loss_mask_T).bool()])
    torch.testing.assert_close(found_M, torch.cat(expected), rtol=1e-5, atol=1e-5)


def test_a_quantity_is_spread_to_where_its_tokens_are() -> None:
    group = RewardedGroup(
        0,
        (trajectory(0, 0, [1], [2, 3, 4], mask=[1, 0, 1]), trajectory(0, 1, [1], [5])),
        (0.0, 1.0),
    )
    batch = UpdateBatch.build([group], CPU)
    assert batch.spread(torch.tensor([1.0, 2.0, 3.0])).tolist() == [[1, 0, 2], [3, 0, 0]]


def test_rows_without_a_chosen_token_make_no_piece() -> None:
    tokens = TokenBatch.build([[1], [1], [1]], [[2], [], [3]], [[1], [], [0]])
    pieces = list(tokens.pieces(np.arange(3), limit=100, device=CPU))
    assert [piece.targets_K.tolist() for piece in pieces] == [[2]]


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ([], "no token that the policy chose"),
        (
            [RewardedGroup(3, (trajectory(3, 0, [1], [2], mask=[0]),), (1.0,))],
            "no token that the policy chose",
        ),
        ([RewardedGroup(3, (trajectory(3, 0, [1], [2]),), (float("nan"),))], "prompt group 3"),
        ([RewardedGroup(3, (trajectory(3, 0, [], [2]),), (1.0,))], "a prompt has no tokens"),
    ],
)
def test_a_batch_that_cannot_be_trained_on_says_why(
    groups: list[RewardedGroup], message: str
) -> None:
    with pytest.raises(TrainingError, match=message):
        UpdateBatch.build(groups, CPU)
