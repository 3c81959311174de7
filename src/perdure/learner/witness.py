"""What an engine should have said: the learner's log-probabilities of the tokens it sampled.

Legend as in ``batch.py``; V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from perdure.algorithms.divergences import kl_estimate
from perdure.algorithms.truncation import left_out
from perdure.learner.batch import Piece


@dataclass(frozen=True, slots=True)
class Truncation:
    """What the engines leave out before they draw a token.

    Attributes:
        top_k: They keep the k most likely tokens; 0 keeps all.
        top_p: They keep the smallest set whose probability reaches p; 1 keeps all.
    """

    top_k: int = 0
    top_p: float = 1.0

    @property
    def cuts(self) -> bool:
        return self.top_k > 0 or self.top_p < 1


NO_TRUNCATION: Final = Truncation()


def truncated_logprobs(
    logprobs_KV: Tensor, targets_K: Tensor, truncation: Truncation
) -> tuple[Tensor, Tensor]:
    """Log-probabilities of the tokens in the distribution that is left after truncation.

    The token that was drawn belongs to what is left whatever this arithmetic says.

    Args:
        logprobs_KV: Log-probabilities after temperature.
        targets_K: The tokens that were drawn.
        truncation: What is left out.

    Returns:
        (K,) log-probabilities, and Bool (K,), whether the rule would have left the token out.
    """
    top_k = truncation.top_k or logprobs_KV.shape[1]
    out_KV = left_out(
        logprobs_KV,
        torch.tensor([[top_k]], device=logprobs_KV.device),
        torch.tensor([[truncation.top_p]], dtype=torch.float64, device=logprobs_KV.device),
    )
    cut_K = out_KV.gather(1, targets_K[:, None]).squeeze(1)
    out_KV = out_KV.scatter(1, targets_K[:, None], value=False)
    total_K = logprobs_KV.masked_fill(out_KV, -torch.inf).logsumexp(-1)
    return logprobs_KV.gather(1, targets_K[:, None]).squeeze(1) - total_K, cut_K


class Witness:
    """Collects, in the passes made anyway, what is compared with the engines' log-probabilities.

    Like is compared with like: engines that draw from a truncated distribution are compared with
    the learner's distribution truncated in the same way.
    """

    def __init__(self, tokens: int, truncation: Truncation, device: torch.device) -> None:
        self.waits = True
        """No pass was made for it: it is to see the actor's before the first optimizer step."""
        self._truncation = truncation
        self._logprobs_M = torch.zeros(tokens, device=device)
        self._seen_M = torch.zeros(tokens, dtype=torch.bool, device=device)
        self._cut_M = torch.zeros(tokens, dtype=torch.bool, device=device)

    def see(self, piece: Piece, logprobs_K: Tensor, logprobs_KV: Tensor) -> None:
        """Take down a piece's log-probabilities, of the chosen tokens and of all in their place."""
        index_K = piece.index_K
        with torch.no_grad():
            if self._truncation.cuts:
                found_K, cut_K = truncated_logprobs(
                    logprobs_KV.detach(), piece.targets_K, self._truncation
                )
                self._logprobs_M[index_K], self._cut_M[index_K] = found_K, cut_K
            else:
                self._logprobs_M[index_K] = logprobs_K.detach()
            self._seen_M[index_K] = True

    def metrics(self, rollout_M: Tensor, same_M: Tensor) -> dict[str, float]:
        """How far the engines' log-probabilities are from these.

        Args:
            rollout_M: As the engines logged them.
            same_M: Bool, true where the token was sampled with the weights that were evaluated
                here. There any distance is a mismatch of two implementations; elsewhere it is how
                far the policy has moved.
        """
        same_M = same_M & self._seen_M
        other_M = ~same_M & self._seen_M
        found = self._mismatch(rollout_M, same_M)
        if bool(other_M.any()):
            distance = rollout_M[other_M] - self._logprobs_M[other_M]
            found |= {
                "off_policy_tokens": float(distance.numel()),
                "off_policy_ratio": float(torch.exp(-distance).mean()),
                "off_policy_kl": _k3(rollout_M[other_M], self._logprobs_M[other_M]),
            }
        return found

    def _mismatch(self, rollout_M: Tensor, same_M: Tensor) -> dict[str, float]:
        tokens = float(same_M.sum())
        if not tokens:
            return {}
        finite_M = same_M & rollout_M.isfinite() & self._logprobs_M.isfinite()
        found = {"mismatch_tokens": tokens, "mismatch_not_finite": tokens - float(finite_M.sum())}
        if self._truncation.cuts:
            found["mismatch_cut"] = float((same_M & self._cut_M).sum())
        if not bool(finite_M.any()):
            return found
        engine, learner = rollout_M[finite_M], self._logprobs_M[finite_M]
        distance = (engine - learner).abs()
        return found | {
            "mismatch_mean": float(distance.mean()),
            "mismatch_max": float(distance.max()),
            "mismatch_k1": float((engine - learner).mean()),
            "mismatch_kl": _k3(engine, learner),
        }


def _k3(engine: Tensor, learner: Tensor) -> float:
    """The k3 estimate of KL(engine ‖ learner); the tokens were drawn by the engine."""
    return float(kl_estimate(engine, learner, "k3").mean())
