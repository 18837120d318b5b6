"""What a recorder knows of models that train."""

from types import SimpleNamespace
from typing import Any

import torch

from undertow.buckets.recorder import Recorder
from undertow.device import device_of


def test_a_model_that_is_dropped_in_a_backward_is_not_in_one_any_more() -> None:
    group: Any = SimpleNamespace(rank=0, hardware=device_of(torch.device("cpu")))
    recorder = Recorder(group, level="off")
    key = id(recorder)
    recorder.backward_begins(generation=0)
    assert key in Recorder.in_backward
    del recorder
    assert key not in Recorder.in_backward
