"""A defect ends the work that met it, as an error that names the work."""

import pytest

from streamer.containment import contained
from streamer.errors import DefectError, TargetConnectionError


def test_a_defect_becomes_an_error_that_names_the_work() -> None:
    words = "internal error in planning: KeyError"
    with pytest.raises(DefectError, match=words) as caught, contained("planning"):
        raise KeyError("a value")
    assert isinstance(caught.value.__cause__, KeyError)
    assert "a value" not in str(caught.value)


def test_an_error_of_streamer_passes_as_it_is_also_out_of_a_group() -> None:
    error = TargetConnectionError("the target is away")
    with pytest.raises(TargetConnectionError) as caught, contained("planning"):
        raise error
    assert caught.value is error
    with pytest.raises(TargetConnectionError) as caught, contained("planning"):
        raise ExceptionGroup("tasks", [ExceptionGroup("tasks", [error])])
    assert caught.value is error
