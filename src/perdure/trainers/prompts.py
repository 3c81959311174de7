"""The next prompts of the data order as records."""

from __future__ import annotations

from perdure.core.experience_records import Submitted
from perdure.core.ids import GlobalStep, GroupId
from perdure.trainers.context import TrainContext

MAX_REFILL_ROUNDS = 10
"""How often a step replaces a batch of groups before it gives up."""


def next_prompts(ctx: TrainContext, step: GlobalStep, *, count: int) -> list[Submitted]:
    """The ``count`` prompts behind all that were submitted before, as of ``step``."""
    table = ctx.store.state.table
    group, index = table.next_group, table.next_data_index
    prompts = [ctx.task.prompt(index + offset) for offset in range(count)]
    return [
        Submitted(
            group=GroupId(group + offset),
            submitted_step=step,
            sessions=ctx.config.rollout.sessions_per_group,
            prompt_ids=prompt.prompt_ids,
            task=prompt.task,
            answer=prompt.answer,
            dataset_digest=ctx.task.dataset_digest,
            data_index=prompt.data_index,
        )
        for offset, prompt in enumerate(prompts)
    ]
