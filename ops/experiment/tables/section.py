"""The base of all tables of an experiment, and the ranges that many of their settings share."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

AUTO = "auto"
"""Stands for a column or a value that is found from the data."""

Count = Annotated[int, Field(ge=1, le=2**31 - 1)]
Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Rate = Annotated[float, Field(ge=0, le=1)]
Text = Annotated[str, StringConstraints(min_length=1, max_length=1024)]


class Section(BaseModel):
    """Base of all tables: frozen, no unknown keys, no silent conversion, only finite numbers."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)
