"""A NanTensorHook that watches a result of an EvaluationHook."""

from __future__ import annotations

import math

from torchhooks import EvaluationHook, MonitoredLoop, NanTensorHook


def test_a_result_is_no_nan_before_the_first_evaluation() -> None:
    results = [0.5, math.nan]
    evaluation = EvaluationHook(lambda: {"loss": results.pop(0)}, every_n_steps=3)
    hooks = [evaluation, NanTensorHook(evaluation["loss"], fail_on_nan_loss=False)]
    with MonitoredLoop(bool, hooks=hooks) as loop:
        for _ in loop.until_stop(range(10)):
            loop.run()
    assert loop.stop_reason == "NanTensorHook: evaluation['loss'] is NaN at step 6"
