"""Parameters of requests that several routes take."""

from typing import Annotated, Any, Literal

from fastapi import Path, Query

from streamer.admin.mapping import api_models

Number = Annotated[int, Path(ge=1, le=api_models.ID_MAX)]
PageNumber = Annotated[int, Query(ge=1, le=1_000_000, description="Counted from 1.")]
PerPage = Annotated[int, Query(ge=1, le=500)]
Order = Annotated[Literal["asc", "desc"], Query()]
Sort = Annotated[str, Query(max_length=100, description="A field of the rows.")]
Search = Annotated[
    str | None, Query(max_length=200, description="Text that any field of a row contains.")
]
Text = Annotated[str | None, Query(max_length=300)]
IdFilter = Annotated[int | None, Query(ge=1, le=api_models.ID_MAX)]


def given_fields(body: Any) -> dict[str, Any]:
    """Return the fields that a request contains, without defaults for missing fields."""
    fields: dict[str, Any] = body.model_dump(mode="json", by_alias=True, exclude_unset=True)
    return fields
