"""Settings of the embedded engine."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class EngineOptions(BaseModel):
    """How many requests, how long, and whether bits may depend on company."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    slots: int = Field(default=64, ge=1, description="Requests decoded at once.")
    max_tokens: int = Field(ge=2, description="Longest prompt + response of one request.")
    chunk_tokens: int = Field(default=16, ge=1, description="Tokens per streamed chunk.")
    deterministic: bool = Field(
        default=False,
        description="Constant shapes: a request's bits do not depend on what else is running.",
    )
    device: str = Field(default="cpu", description="Torch device of weights and cache.")
    dtype: Literal["float32", "bfloat16"] = Field(
        default="float32", description="Of weights and cache; weights must be given in it."
    )


class PoolOptions(BaseModel):
    """How long a pool waits for what, and how often it tries."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    no_engine_timeout_s: float = Field(
        default=120.0, gt=0, description="Longest wait of a request while no engine serves."
    )
    door_timeout_s: float = Field(
        default=3600.0, gt=0, description="Longest wait of a request at the pool's paused door."
    )
    silence_timeout_s: float = Field(
        default=60.0,
        gt=0,
        description="An engine with requests in flight that gives no token for so long is lost.",
    )
    verb_timeout_s: float = Field(
        default=60.0,
        gt=0,
        description="An engine that does not answer pause, abort, sleep and the like is lost.",
    )
    max_setbacks: int = Field(
        default=8,
        ge=1,
        description="Engine deaths and idle turns of one request before it is given up.",
    )
    sticky_requests: int = Field(
        default=10_000, ge=1, description="Request ids whose last engine is remembered."
    )


class ProcessOptions(BaseModel):
    """How an engine's process is started, and when it counts as dead."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    threads: int = Field(default=1, ge=1, description="Threads that torch computes with.")
    start_timeout_s: float = Field(
        default=120.0, gt=0, description="Longest time until it answers for the first time."
    )
    heartbeat_s: float = Field(default=1.0, gt=0, description="Between two signs of life.")
    silence_timeout_s: float = Field(
        default=8.0,
        gt=0,
        description="Without a sign of life for so long (and a tenth more) it is killed. Its event "
        "loop gives them: nothing it does at a stretch, such as loading weights, may take longer.",
    )


class ReplacementOptions(BaseModel):
    """How often lost engines are replaced."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_replacements: int = Field(
        default=5, ge=0, description="Of one engine within the window; then it stays lost."
    )
    window_s: float = Field(default=3600.0, gt=0, description="In which replacements are counted.")
    backoff_s: float = Field(
        default=1.0, ge=0, description="Before the second replacement; doubled for each further."
    )
    max_backoff_s: float = Field(default=60.0, ge=0, description="Longest back-off.")
