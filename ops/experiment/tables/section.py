"""The base class of all tables of an experiment, and the ranges that many settings share."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

AUTO = "auto"
"""The value of a setting that is found from the data."""

FILLED = ("traces", "code")
"""The fields of an experiment that are no settings. They are filled from what its settings name."""

Count = Annotated[int, Field(ge=1, le=2**31 - 1)]
Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
PositiveFloat32 = Annotated[float, Field(ge=1e-38, le=1e38)]
"""A number by which tensors of float32 are multiplied. They hold no larger one, and take a smaller one for 0."""
Rate = Annotated[float, Field(ge=0, le=1)]
Text = Annotated[str, StringConstraints(min_length=1, max_length=1024)]


class Section(BaseModel):
    """The base class of all tables: frozen, without unknown keys, silent conversions and infinite numbers."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)
