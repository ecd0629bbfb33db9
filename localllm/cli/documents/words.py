"""Types that several documents share."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field
from typing_extensions import TypedDict

Count = Annotated[int, Field(ge=0)]
Words = Annotated[str, Field(min_length=1)]
CheckId = Annotated[str, Field(pattern=r"^[a-z0-9_]+(\.[a-z0-9_]+)?$")]
RuleId = Annotated[str, Field(pattern="^[RG][0-9]+$")]
ErrorCode = Annotated[str, Field(pattern="^E[0-9]{3,5}$")]
Variable = Annotated[str, Field(pattern="^LOCALLLM_")]


class Fix(TypedDict):
    """A command that may help."""

    cmd: Words
    note: str
