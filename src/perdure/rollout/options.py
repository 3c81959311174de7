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
