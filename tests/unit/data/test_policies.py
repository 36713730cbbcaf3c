import math

import pytest

from fthsdp.data.policies import BatchPolicy, LrPolicy, Policies, lr_factor
from fthsdp.errors import ConfigError


@pytest.mark.parametrize(
    ("policy", "contributors", "wanted", "factor"),
    [
        (LrPolicy.NONE, 1, 4, 1.0),
        (LrPolicy.LINEAR, 3, 4, 0.75),
        (LrPolicy.SQRT, 1, 4, 0.5),
        (LrPolicy.SQRT, 1, 2, math.sqrt(0.5)),
        (LrPolicy.LINEAR, 4, 4, 1.0),
        (LrPolicy.LINEAR, 5, 4, 1.0),  # a replica that is on its way out
        (LrPolicy.SQRT, 5, 4, 1.0),
        (LrPolicy.LINEAR, 3, 0, 1.0),  # not known
    ],
)
def test_the_learning_rate_follows_the_batch(policy, contributors, wanted, factor):
    assert lr_factor(policy, contributors, wanted) == factor


def test_without_a_word_the_batch_shrinks_and_the_learning_rate_stays():
    assert Policies.from_environment({}) == Policies(batch=BatchPolicy.SHRINK, lr=LrPolicy.NONE)


def test_the_environment_names_the_policies():
    env = {"FTHSDP_BATCH_POLICY": "Shrink", "FTHSDP_LR_POLICY": "Sqrt"}
    assert Policies.from_environment(env) == Policies(lr=LrPolicy.SQRT)
    assert Policies.from_environment({"FTHSDP_BATCH_POLICY": "Constant"}) == Policies(batch=BatchPolicy.CONSTANT)


@pytest.mark.parametrize(
    ("env", "sentence"),
    [
        ({"FTHSDP_BATCH_POLICY": "constant"}, "FTHSDP_BATCH_POLICY=constant: known are Shrink, Constant"),
        ({"FTHSDP_LR_POLICY": ""}, "FTHSDP_LR_POLICY=: known are None, Linear, Sqrt"),
        ({"FTHSDP_BATCH_POLICY": "Constant", "FTHSDP_LR_POLICY": "Linear"}, "batchPolicy Constant keeps it whole"),
    ],
)
def test_policies_that_are_none_are_refused(env, sentence):
    with pytest.raises(ConfigError, match=sentence):
        Policies.from_environment(env)
