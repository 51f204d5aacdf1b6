"""A module and its flat vector: nothing is lost on the way there and back."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedsieve.errors import InvalidSetting
from fedsieve.models import build
from fedsieve.randomness import torch_draws
from fedsieve.threads import single_thread
from fedsieve.vector import Layout, Vectors

CASES = [("mlp", (1, 8, 8)), ("cnn", (1, 8, 8)), ("vgg11-bn", (3, 32, 32))]
every_model = pytest.mark.parametrize(("name", "shape"), CASES)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    with single_thread():
        yield


def made(name: str, shape: tuple[int, ...], seed: int = 0) -> nn.Module:
    with torch_draws(seed, "test"):
        module = build(name, shape, 10)
        for buffer_name, buffer in module.named_buffers():  # as after some training
            buffer.copy_(torch.tensor(7) if "num_batches" in buffer_name else torch.rand(buffer.shape) + 0.5)
    return module


def images(shape: tuple[int, ...]) -> Tensor:
    return torch.randn(3, *shape, generator=torch.Generator().manual_seed(1))


def same_state(one: nn.Module, other: nn.Module) -> bool:
    first, second = one.state_dict(), other.state_dict()
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@every_model
def test_the_vector_is_every_parameter_then_every_buffer(name: str, shape: tuple[int, ...]) -> None:
    module = made(name, shape)
    layout = Layout.of(module)
    parameters = torch.cat([tensor.detach().flatten() for tensor in module.parameters()])
    buffers = [tensor.flatten().float() for tensor in module.buffers()]
    vector = layout.read(module)
    assert vector.shape == (layout.size,)
    assert layout.parameters == len(parameters)
    assert torch.equal(vector, torch.cat([parameters, *buffers]))


def test_batch_norm_counts_are_in_the_vector() -> None:
    module = made("vgg11-bn", (3, 32, 32))
    layout = Layout.of(module)
    values = layout.tensors(layout.read(module))
    counts = [value.item() for name, value in values.items() if name.endswith("num_batches_tracked")]
    assert counts == [7.0] * 8  # one batch norm per convolution


@every_model
def test_reading_and_writing_back_loses_nothing(name: str, shape: tuple[int, ...]) -> None:
    module, other = made(name, shape), made(name, shape, seed=1)
    layout = Layout.of(module)
    assert not same_state(module, other)
    layout.write(layout.read(module), other)
    assert same_state(module, other)
    assert torch.equal(module.eval()(images(shape)), other.eval()(images(shape)))


@every_model
def test_pieces_by_name_make_a_functional_call_equal_to_the_module(name: str, shape: tuple[int, ...]) -> None:
    module, other = made(name, shape).eval(), made(name, shape, seed=1).eval()
    layout = Layout.of(module)
    pieces = layout.tensors(layout.read(module))
    assert {name: tensor.shape for name, tensor in pieces.items()} == {
        name: tensor.shape for name, tensor in module.state_dict().items()
    }
    assert torch.equal(functional_call(other, pieces, (images(shape),)), module(images(shape)))


@every_model
def test_a_bound_module_is_its_vector(name: str, shape: tuple[int, ...]) -> None:
    module, plain = made(name, shape).eval(), made(name, shape).eval()
    layout = Layout.of(module)
    vector, gradient = layout.read(module), torch.zeros(layout.parameters)
    layout.bind(vector, gradient, module)
    assert torch.equal(module(images(shape)), plain(images(shape)))

    module(images(shape)).square().mean().backward()
    plain(images(shape)).square().mean().backward()
    expected = torch.cat([parameter.grad.flatten() for parameter in plain.parameters() if parameter.grad is not None])
    assert torch.allclose(gradient, expected, atol=1e-6)
    assert gradient.abs().sum() > 0

    vector[: layout.parameters] *= 0.5
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.mul_(0.5)
    assert torch.equal(module(images(shape)), plain(images(shape)))
    assert torch.equal(layout.read(module), vector)


def test_what_is_read_is_a_copy() -> None:
    module = nn.Linear(3, 1, bias=False)  # a single piece, where a view would be easiest
    layout = Layout.of(module)
    vector = layout.read(module)
    before = vector.clone()
    with torch.no_grad():
        module.weight.zero_()
    assert torch.equal(vector, before)


def test_written_values_are_a_copy() -> None:
    module = nn.Linear(3, 1)
    layout = Layout.of(module)
    vector = torch.ones(4)
    layout.write(vector, module)
    vector.zero_()
    assert torch.equal(module.weight, torch.ones(1, 3))


def test_averaged_counts_are_rounded_to_whole_numbers() -> None:
    module = nn.BatchNorm1d(2)
    layout = Layout.of(module)
    vector = layout.read(module)
    vector[-1] = 4.6
    layout.write(vector, module)
    assert module.num_batches_tracked is not None
    assert module.num_batches_tracked.item() == 5
    assert module.num_batches_tracked.dtype == torch.int64


def test_shared_parameters_are_there_once() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(4, 4, bias=False)
            self.second = nn.Linear(4, 4, bias=False)
            self.second.weight = self.first.weight

        def forward(self, inputs: Tensor) -> Tensor:
            outputs: Tensor = self.second(torch.tanh(self.first(inputs)))
            return outputs

    module = Tied()
    layout = Layout.of(module)
    assert layout.size == 16
    other = copy.deepcopy(module)
    with torch.no_grad():
        other.first.weight += 1
    vector = layout.read(other)
    inputs = torch.randn(2, 4, generator=torch.Generator().manual_seed(0))
    assert torch.equal(functional_call(module, layout.tensors(vector), (inputs,)), other(inputs))
    layout.write(vector, module)
    assert torch.equal(module(inputs), other(inputs))


def test_buffers_that_are_not_saved_are_not_part_of_the_model() -> None:
    module = nn.Linear(2, 1)
    module.register_buffer("scratch", torch.zeros(100), persistent=False)
    module.register_buffer("scale", torch.ones(3))
    assert Layout.of(module).size == 3 + 3


def test_double_precision_stays_double() -> None:
    module = nn.Linear(2, 1).double()
    vector = Layout.of(module).read(module)
    assert vector.dtype == torch.float64
    assert torch.equal(vector[:2], module.weight.detach().flatten())


def test_parameters_of_several_types_are_refused() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double())
    with pytest.raises(InvalidSetting, match=r"^model: 'torch.float32, torch.float64' is not allowed"):
        Layout.of(module)


def test_a_module_without_parameters_is_refused() -> None:
    with pytest.raises(InvalidSetting, match=r"^model: 'Flatten' is not allowed"):
        Layout.of(nn.Flatten())


def test_what_is_not_trained_is_written_and_read_alone() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    module[0].weight.requires_grad_(False)
    layout = Layout.of(module)
    before = layout.read(module)
    vector = before + torch.arange(float(layout.size))
    layout.write_untrained(vector, module)
    expected = torch.cat([before[: layout.parameters], vector[layout.parameters :]])
    assert torch.equal(layout.read(module), expected)
    read = torch.zeros(layout.size)
    layout.read_untrained(module, read)
    expected[: layout.parameters] = 0
    assert torch.equal(read, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_copies_are_equal_and_apart(dtype: torch.dtype) -> None:
    vectors, original = Vectors(), torch.randn(50).to(dtype)
    copies = [vectors.copy(original) for _ in range(3)]
    copies[0].zero_()
    assert not copies[0].any()
    assert all(torch.equal(copy, original) and copy.dtype == dtype for copy in copies[1:])


def test_memory_is_taken_again_only_when_nobody_holds_it() -> None:
    vectors = Vectors()
    first = vectors.copy(torch.zeros(50))
    view, address = first[10:20], first.data_ptr()
    del first
    second = vectors.copy(torch.ones(50))
    assert not view.any() and second.data_ptr() != address
    del view
    third = vectors.copy(torch.full((50,), 2.0))
    assert third.data_ptr() == address and third.eq(2).all() and second.eq(1).all()


def test_copies_of_other_sizes_may_come() -> None:
    vectors = Vectors()
    vectors.copy(torch.zeros(50))
    assert torch.equal(vectors.copy(torch.arange(7.0)), torch.arange(7.0))
    assert torch.equal(vectors.copy(torch.arange(90.0)), torch.arange(90.0))


def with_buffer(buffer: Tensor) -> nn.Module:
    module = nn.Linear(2, 2)
    module.register_buffer("table", buffer)
    return module


@pytest.mark.parametrize("buffer", [torch.tensor([2**24 + 1]), torch.view_as_complex(torch.ones(3, 2))])
@pytest.mark.filterwarnings("ignore:Casting complex")
def test_buffers_that_would_lose_digits_are_refused(buffer: Tensor) -> None:
    with pytest.raises(
        InvalidSetting, match=r"^model: 'Linear' is not allowed; use a module whose buffers can be held"
    ):
        Layout.of(with_buffer(buffer))


@pytest.mark.parametrize(
    "buffer", [torch.arange(5000), torch.tensor([True, False]), torch.tensor([0.1], dtype=torch.float64)]
)
def test_whole_numbers_and_masks_that_fit_are_held(buffer: Tensor) -> None:
    module = with_buffer(buffer.clone())
    layout = Layout.of(module)
    layout.write(layout.read(module), module)
    assert torch.allclose(module.get_buffer("table").double(), buffer.double())


def test_a_module_that_knows_no_shapes_yet_is_refused_in_one_line() -> None:
    with pytest.raises(
        InvalidSetting, match=r"^model: 'LazyLinear' is not allowed; use a module that knows the shapes"
    ):
        Layout.of(nn.LazyLinear(3))
