"""The first line of an error's message."""

import pytest
from torch import nn

from gputrain.errors import first_line


def test_the_first_line_says_what_is_wrong():
    with pytest.raises(RuntimeError) as error:
        nn.Linear(2, 3).load_state_dict(nn.Linear(2, 4).state_dict())
    assert "state_dict for Linear: size mismatch for weight" in first_line(error.value)
    assert "bias" not in first_line(error.value)
    assert first_line(ValueError("one:")) == "one:"
    assert first_line(ValueError("one\ntwo")) == "one"
    assert first_line(KeyError()) == "KeyError"
