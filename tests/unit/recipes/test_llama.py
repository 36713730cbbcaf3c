import math

import pytest
import torch

from fthsdp.errors import ConfigError
from fthsdp.recipes.llama import SIZES, Llama, LlamaConfig, ModelSize, next_token_loss

torch.set_num_threads(1)
SMALLEST = LlamaConfig(num_layers=2, width=32, num_heads=4, num_kv_heads=2, hidden_width=48)


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Llama(SMALLEST)


@pytest.mark.parametrize(("size", "millions"), [("tiny", 0.95), ("small", 14), ("medium", 110.5)])
def test_sizes_have_the_parameters_their_names_promise(size, millions):
    with torch.device("meta"):
        model = Llama(SIZES[ModelSize(size)])
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(millions * 1e6, rel=0.01)


def test_a_fresh_model_knows_nothing(model):
    windows = torch.randint(0, 256, (4, 33))
    assert next_token_loss(model, windows).item() == pytest.approx(math.log(256), abs=0.1)


def test_no_position_sees_what_follows(model):
    tokens = torch.randint(0, 256, (1, 16))
    changed = tokens.clone()
    changed[0, 10] += 1
    before, after = model(tokens), model(changed % 256)
    assert before[0, :10].equal(after[0, :10])
    assert not before[0, 10].equal(after[0, 10])


def test_positions_matter(model):
    tokens = torch.tensor([[1, 2, 3, 3]])
    swapped = torch.tensor([[2, 1, 3, 3]])
    assert not torch.allclose(model(tokens)[0, -1], model(swapped)[0, -1], atol=1e-6)


def test_every_parameter_is_trained(model):
    next_token_loss(model, torch.randint(0, 256, (2, 9))).backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())


def test_it_learns_a_short_text_by_heart(model):
    windows = torch.tensor([list(b"to be, or not to be: that is the question")])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(60):
        loss = next_token_loss(model, windows)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert loss.item() < 0.2


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"num_layers": 0}, "num_layers=0 is not at least 1"),
        ({"width": 36}, "width=36 is no multiple of twice num_heads=4"),
        ({"num_kv_heads": 3}, "num_heads=4 is no multiple of num_kv_heads=3"),
    ],
)
def test_a_shape_that_cannot_be_built_is_named(options, sentence):
    valid = {"num_layers": 2, "width": 32, "num_heads": 4, "num_kv_heads": 2, "hidden_width": 48}
    with pytest.raises(ConfigError, match=sentence):
        LlamaConfig(**(valid | options))
