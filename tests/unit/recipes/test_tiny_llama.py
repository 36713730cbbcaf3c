import time

import pytest
import torch

from fthsdp.recipes.llama import SIZES, Llama, ModelSize
from fthsdp.recipes.tiny_llama import emulated_loss, learning_rate_factor, main, parse

torch.set_num_threads(1)


def test_without_arguments_it_trains_the_tiny_model_on_the_standard_library():
    options = parse([])
    assert (options.model, options.steps, options.data, options.emulate_compute) == (ModelSize.TINY, 60, None, None)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--steps", "0"], "--steps 0: at least 1 is needed"),
        (["--steps", "many"], "argument --steps: invalid int value: 'many'"),
        (["--model", "huge"], "argument --model: invalid choice: 'huge' (choose from "),
        (["--batch-size", "-4"], "--batch-size -4: at least 1 is needed"),
        (["--learning-rate", "nan"], "--learning-rate nan: a number above 0 is needed"),
        (["--clip-grad-norm", "0"], "--clip-grad-norm 0.0: a number above 0 is needed"),
        (["--lanes", "-1"], "--lanes -1: 0 or more is needed"),
        (["--seed", "-1"], "--seed -1: a whole number from 0"),
        (["--emulate-compute", "-0.5"], "--emulate-compute -0.5: seconds, 0 or more is needed"),
        (["--data"], "argument --data: expected at least one argument"),
        (["--data", "/nowhere/text"], "/nowhere/text: No such file or directory"),
        (["--colour", "red"], "unrecognized arguments: --colour red"),
    ],
)
def test_bad_arguments_get_one_sentence_and_exit_code_2(capsys, arguments, sentence):
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith(f"tiny_llama: {sentence}")


def test_outside_a_job_it_says_how_to_start_it(capsys, monkeypatch):
    monkeypatch.delenv("FTHSDP_JOB", raising=False)
    with pytest.raises(SystemExit, match="2"):
        main(["--steps", "1", "--data", __file__])
    assert "'fthsdp run'" in capsys.readouterr().err


def test_the_learning_rate_rises_and_then_falls_to_a_tenth():
    factors = [learning_rate_factor(step, 60) for step in range(61)]
    assert factors[:6] == sorted(factors[:6])
    assert factors[5] == factors[6] == 1.0
    assert factors[6:] == sorted(factors[6:], reverse=True)
    assert factors[60] == pytest.approx(0.1)
    assert learning_rate_factor(0, 1) == 1.0


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Llama(SIZES[ModelSize.TINY])


def gradient(model, windows):
    model.zero_grad()
    emulated_loss(model, windows, 0.0).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def test_emulated_gradients_follow_from_parameters_and_batch_alone(model):
    windows = torch.randint(0, 256, (4, 129))
    first = gradient(model, windows)
    assert first.equal(gradient(model, windows))
    for sample in range(4):
        other = windows.clone()
        other[sample, 3] = (other[sample, 3] + 1) % 256
        assert not first.equal(gradient(model, other))
    with torch.no_grad():
        model.norm.weight.mul_(2)
    assert not first.equal(gradient(model, windows))


def test_emulation_takes_the_time_it_was_told(model):
    before = time.perf_counter()
    emulated_loss(model, torch.randint(0, 256, (1, 129)), 0.2)
    assert time.perf_counter() - before >= 0.2
