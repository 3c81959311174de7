"""Which groups a configuration trains on."""

from __future__ import annotations

from perdure.experience import AgePolicy, SamplingRules
from perdure.trainers.config import RunConfig


def sampling_rules(config: RunConfig) -> SamplingRules:
    """The limits of a configuration; an on-policy mode has none."""
    sampler = config.sampler
    if config.mode == "sync":
        return SamplingRules(dynamic_filter=sampler.dynamic_filter)
    return SamplingRules(
        AgePolicy(sampler.age_policy),
        sampler.max_prompt_age,
        max_version_span=sampler.max_version_span,
        max_version_lag=sampler.max_version_lag,
        dynamic_filter=sampler.dynamic_filter,
    )
