"""Frozen configuration sections, recipes in YAML, ``key=value`` overrides, four-part errors."""

from perdure.config.load import config_from_text, load_config
from perdure.config.reference import explained, sections
from perdure.config.section import (
    OPERATIONAL,
    DigestedAs,
    Problem,
    Section,
    config_digest,
    render_yaml,
)
from perdure.core.names import nearest

__all__ = [
    "OPERATIONAL",
    "DigestedAs",
    "Problem",
    "Section",
    "config_digest",
    "config_from_text",
    "explained",
    "load_config",
    "nearest",
    "render_yaml",
    "sections",
]
