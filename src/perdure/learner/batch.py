"""A batch as tensors, and how it is cut into pieces. Everything depends on the batch alone.

Legend: N trajectories, L tokens of the longest, R response tokens of the longest, M tokens chosen
by the policy in the whole batch (row by row); inside a piece B rows, T columns, K chosen tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from perdure.core.errors import TrainingError
from perdure.core.trajectories import Array, RewardedGroup, Trajectory

IntArray = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True, slots=True)
class Piece:
    """A micro-batch: rows of similar length, padded on the right.

    Attributes:
        tokens_BT: int64, without each row's last token (nothing is predicted from it).
        positions_K: int64, into the flattened (B·T): the state that predicts each chosen token.
        targets_K: int64, the chosen tokens.
        index_K: int64, where these tokens lie in the batch's (M,) tensors.
    """

    tokens_BT: Tensor
    positions_K: Tensor
    targets_K: Tensor
    index_K: Tensor


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """Prompts and responses side by side.

    Attributes:
        tokens_NL: int64, prompt then response, padded on the right with 0.
        lengths_N: int64, prompt plus response.
        prompts_N: int64, length of the prompt, at least 1.
        mask_NR: Bool, true where the policy chose the response token.
        index_NR: int64, position of each chosen token in (M,) order.
    """

    tokens_NL: IntArray
    lengths_N: IntArray
    prompts_N: IntArray
    mask_NR: np.ndarray[Any, np.dtype[np.bool_]]
    index_NR: IntArray

    @classmethod
    def build(
        cls,
        prompts: Sequence[Sequence[int] | Array],
        responses: Sequence[Sequence[int] | Array],
        masks: Sequence[Sequence[int] | Array],
    ) -> TokenBatch:
        """Lay out the batch.

        Raises:
            TrainingError: A prompt is empty.
        """
        prompts_N = np.array([len(prompt) for prompt in prompts], dtype=np.int64)
        responses_N = np.array([len(response) for response in responses], dtype=np.int64)
        if not prompts_N.all():
            raise TrainingError(
                "a prompt has no tokens",
                where=f"trajectory {int(prompts_N.argmin())} of the batch",
                rule="the first response token is predicted from the prompt",
                way_out="let the task give at least one prompt token, e.g. a start token",
            )
        lengths_N = prompts_N + responses_N
        tokens_NL = np.zeros((len(prompts), int(lengths_N.max())), dtype=np.int64)
        mask_NR = np.zeros((len(prompts), max(int(responses_N.max()), 1)), dtype=np.bool_)
        for row, (prompt, response, mask) in enumerate(zip(prompts, responses, masks, strict=True)):
            tokens_NL[row, : len(prompt)] = prompt
            tokens_NL[row, len(prompt) : lengths_N[row]] = response
            mask_NR[row, : len(response)] = mask
        index_NR = np.cumsum(mask_NR, dtype=np.int64).reshape(mask_NR.shape) - 1
        return cls(tokens_NL, lengths_N, prompts_N, mask_NR, index_NR)

    @property
    def rows(self) -> int:
        return len(self.lengths_N)

    @property
    def chosen(self) -> int:
        """M, the number of tokens the policy chose."""
        return int(self.mask_NR.sum())

    def pieces(self, rows: IntArray, *, limit: int, device: torch.device) -> Iterator[Piece]:
        """Cut ``rows`` into pieces of at most ``limit`` padded tokens, shortest rows first.

        A row that is longer than the limit is a piece of its own. Rows without a chosen token are
        left out.
        """
        rows = rows[self.mask_NR[rows].any(1)]
        rows = rows[np.lexsort((rows, self.lengths_N[rows]))]
        start = 0
        for end in range(1, len(rows) + 1):
            full = end < len(rows) and (end + 1 - start) * self.lengths_N[rows[end]] > limit
            if full or end == len(rows):
                yield self._piece(rows[start:end], device)
                start = end

    def _piece(self, rows: IntArray, device: torch.device) -> Piece:
        width = int(self.lengths_N[rows].max()) - 1
        chosen_BR = self.mask_NR[rows]
        row_K, response_K = chosen_BR.nonzero()
        before_K = self.prompts_N[rows][row_K] + response_K - 1
        arrays = (
            self.tokens_NL[rows, :width],
            row_K * width + before_K,
            self.tokens_NL[rows[row_K], before_K + 1],
            self.index_NR[rows][chosen_BR],
        )
        tensors = [torch.from_numpy(array).to(device) for array in arrays]
        return Piece(*tensors)


@dataclass(frozen=True, slots=True)
class UpdateBatch:
    """The groups of a local update, flattened in order.

    Attributes:
        tokens: Prompts and responses of all trajectories.
        mask_NR: Bool tensor of :attr:`TokenBatch.mask_NR`.
        rollout_logprobs_M: float32, as logged by the engine that sampled the tokens.
        versions_M: int64, policy version that each token was sampled with.
        rewards_N: float64.
        group_sizes: Trajectories of each group.
    """

    tokens: TokenBatch
    mask_NR: Tensor
    rollout_logprobs_M: Tensor
    versions_M: Tensor
    rewards_N: Tensor
    group_sizes: tuple[int, ...]

    @classmethod
    def build(cls, groups: Sequence[RewardedGroup], device: torch.device) -> UpdateBatch:
        """Lay out the groups.

        Raises:
            TrainingError: No group, a reward that is not finite, an empty prompt, or no token at
                all that the policy chose.
        """
        for group in groups:
            _check_group(group)
        trajectories = [one for group in groups for one in group.trajectories]
        tokens = _lay_out(trajectories)
        logprobs = [one.logprobs_T[one.loss_mask_T.astype(bool)] for one in trajectories]
        versions = [_versions(one)[one.loss_mask_T.astype(bool)] for one in trajectories]
        rewards = [reward for group in groups for reward in group.rewards]
        return cls(
            tokens=tokens,
            mask_NR=torch.from_numpy(tokens.mask_NR).to(device),
            rollout_logprobs_M=torch.from_numpy(np.concatenate(logprobs).astype(np.float32)).to(
                device
            ),
            versions_M=torch.from_numpy(np.concatenate(versions)).to(device),
            rewards_N=torch.tensor(rewards, dtype=torch.float64, device=device),
            group_sizes=tuple(len(group.trajectories) for group in groups),
        )

    def spread(self, values_M: Tensor) -> Tensor:
        """(M,) → (N, R), 0 where the policy did not choose."""
        values_NR = torch.zeros(self.mask_NR.shape, dtype=values_M.dtype, device=values_M.device)
        values_NR[self.mask_NR] = values_M
        return values_NR


def _lay_out(trajectories: Sequence[Trajectory]) -> TokenBatch:
    if not any(one.loss_mask_T.any() for one in trajectories):
        raise TrainingError(
            "the batch holds no token that the policy chose",
            where="local update",
            rule="at least one loss mask must be set",
            way_out="look at the engine's budget and stop tokens",
        )
    return TokenBatch.build(
        [one.prompt_ids_P for one in trajectories],
        [one.response_ids_T for one in trajectories],
        [one.loss_mask_T for one in trajectories],
    )


def _versions(trajectory: Trajectory) -> IntArray:
    """The policy version of each response token."""
    numbers = np.array([segment.version for segment in trajectory.segments], dtype=np.int64)
    return numbers.repeat([segment.end - segment.start for segment in trajectory.segments])


def _check_group(group: RewardedGroup) -> None:
    assert len(group.trajectories) == len(group.rewards) > 0
    if not np.isfinite(group.rewards).all():
        raise TrainingError(
            f"rewards {group.rewards} are not all finite",
            where=f"prompt group {group.group}",
            rule="a reward is a finite number",
            way_out="repair the reward function; the batch is in the log and is trained again",
        )
