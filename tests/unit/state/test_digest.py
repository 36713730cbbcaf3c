import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fthsdp.digest import digest

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool, torch.complex64]


def flip(tensor, bit):
    """Flip one bit in place."""
    tensor.view(-1).view(torch.uint8)[bit // 8] ^= 1 << bit % 8


@given(
    sizes=st.lists(st.integers(0, 5000), min_size=1, max_size=4),
    data=st.data(),
)
@settings(max_examples=200, deadline=None)
def test_any_single_flipped_bit_is_found(sizes, data):
    kinds = data.draw(st.lists(st.sampled_from(DTYPES[:5]), min_size=len(sizes), max_size=len(sizes)))
    tensors = [torch.randint(0, 99, (size,)).to(kind) for size, kind in zip(sizes, kinds, strict=True)]
    bits = [tensor.nbytes * 8 for tensor in tensors]
    if sum(bits) == 0:
        return
    before = digest(tensors)
    bit = data.draw(st.integers(0, sum(bits) - 1))
    for tensor, size in zip(tensors, bits, strict=True):
        if bit < size:
            flip(tensor, bit)
            break
        bit -= size
    assert digest(tensors) != before


def test_any_bit_of_a_large_tensor_counts_in_the_low_bits_of_the_digest_too():
    tensor = torch.randn(150_001)  # more than one block, a part of one, a part of a row, half a word
    before = digest([tensor])
    for element in (0, 1, 77_777, 131_071, 131_072, 149_900, 149_999, 150_000):
        for bit in range(32):
            flip(tensor, element * 32 + bit)
            assert (digest([tensor]) ^ before) & (1 << 52) - 1
            flip(tensor, element * 32 + bit)


def test_every_bit_of_a_tensor_counts():
    tensor = torch.randn(67)  # no whole number of words
    tensors = [tensor, torch.randn(3)]
    before = digest(tensors)
    for owner in tensors:
        for bit in range(owner.nbytes * 8):
            flip(owner, bit)
            assert digest(tensors) != before
            flip(owner, bit)


def test_the_digest_of_a_state_finds_a_flipped_bit_in_each_of_its_tensors(make, optimizer):
    job = make(optimizer, "none")
    job.step(0)
    before = job.state.digest()
    for tensor in job.state.snapshot().tensors:
        if tensor.numel():
            flip(tensor, 13 % (tensor.nbytes * 8))
            assert job.state.digest() != before
            flip(tensor, 13 % (tensor.nbytes * 8))
    assert job.state.digest() == before


def test_a_learning_rate_that_differs_is_found(make):
    job = make("adamw", "none")
    before = job.state.digest()
    job.state.optimizer.param_groups[1]["lr"] *= 1 + 1e-12
    assert job.state.digest() != before


def test_a_digest_begun_in_another_thread_is_the_same(make, optimizer):
    job = make(optimizer)
    for step in range(3):
        job.step(step)
        now = job.state.digest()
        job.state.begin_digest()
        job.gradients(step + 1)  # a forward and a backward beside it
        assert job.state.digest() == now


def test_a_digest_begun_before_the_state_changed_is_forgotten(make):
    job = make()
    before = job.state.digest()
    job.state.begin_digest()
    job.step(0)
    assert job.state.digest() != before
    job.state.begin_digest()
    job.state.restore(make().state.snapshot())
    assert job.state.digest() == before


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_has_a_digest_of_64_bits(dtype):
    assert 0 <= digest([torch.ones(7, dtype=dtype)]) < 1 << 64


def test_equal_bits_have_equal_digests_wherever_they_lie():
    tensor = torch.randn(5000)
    shifted = torch.cat([torch.zeros(3), tensor])[3:]
    transposed = tensor.view(50, 100).t().contiguous().t()
    assert digest([tensor]) == digest([shifted]) == digest([transposed])


def test_the_order_of_tensors_and_of_elements_counts():
    a, b = torch.randn(10), torch.randn(10)
    assert digest([a, b]) != digest([b, a])
    assert digest([a]) != digest([a.flip(0)])


def test_not_a_number_and_minus_zero_have_bits_too():
    assert digest([torch.tensor([float("nan")])]) == digest([torch.tensor([float("nan")])])
    assert digest([torch.tensor([0.0])]) != digest([torch.tensor([-0.0])])


def test_the_digest_never_changes_between_versions():
    assert digest([torch.arange(3000), torch.arange(5, dtype=torch.uint8), torch.zeros(0)]) == 505253082221363585
