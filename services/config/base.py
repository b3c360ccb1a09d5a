"""What every configuration section has in common.

Notable:
- Sections are frozen pydantic models that forbid unknown keys and non-finite numbers (TOML can say `nan`).
- Nothing here mutates: shared values are filled in by `services.config.resolve`, once, before validation.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """Base of all sections."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)
