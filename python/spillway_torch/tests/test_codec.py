# SPDX-License-Identifier: Apache-2.0
"""Codecs: tensors that take fewer bytes while they are away."""
import pytest
import torch
import torch.nn.functional as F

import spillway_torch


@pytest.fixture(autouse=True)
def no_codec():
    yield
    spillway_torch.set_codec(None)


class Counted:
    """Growth of the statistics of codecs since this object was made."""

    def __init__(self):
        self.before = self.stats()

    def __call__(self, key):
        return self.stats()[f"host.{key}"] - self.before[f"host.{key}"]

    @staticmethod
    def stats():
        spillway_torch.park()  # waits until all swap-outs have been encoded
        return spillway_torch.memory_stats()


def bits_of(tensor):
    return tensor.clone().view(torch.uint8).numpy().tobytes()


DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.int64, torch.int8, torch.bool]
CASES = [(dtype, zeros) for zeros in (0.0, 0.7, 1.0) for dtype in DTYPES]


@pytest.mark.parametrize("case", range(len(CASES)))
def test_lossless_is_bitwise(lms, case):
    dtype, zeros = CASES[case]
    # Each case uses another size, since a codec may be given up for all tensors of a size. No size is a multiple of the
    # words of a bitmap.
    n = (((8 + case % 8) << (10 + case // 8)) + 3 * 8) // dtype.itemsize
    spillway_torch.set_codec("lossless")
    counted = Counted()
    x = ((torch.rand(n) >= zeros) * torch.randint(1, 100, (n,))).to(dtype)
    expected = bits_of(x)
    for _ in range(3):
        x.logical_or_(x) if dtype is torch.bool else x.add_(0)
        lms.evict()
        assert lms.is_away(x)
        assert bits_of(x) == expected
    assert counted("encoded_raw_bytes") > 0


def test_negative_zeros_and_nans_come_back(lms):
    x = torch.tensor([0.0, -0.0, float("nan"), float("inf"), 1e-42]).repeat(4096)
    spillway_torch.set_codec("lossless", for_=x)
    expected = bits_of(x)
    lms.evict()
    assert lms.is_away(x)
    assert bits_of(x) == expected


def test_what_relu_makes_takes_fewer_bytes(lms):
    counted = Counted()
    spillway_torch.set_codec("lossless")
    y = F.relu(torch.randn(1 << 18))
    lms.evict()
    assert lms.is_away(y)
    assert counted("encoded_raw_bytes") >= 1 << 20
    assert counted("encoded_stored_bytes") < 0.6 * counted("encoded_raw_bytes")
    assert counted("pinned_bytes") < 0.6 * (1 << 20)
    assert "written by a codec so far" in spillway_torch.memory_summary()


def test_what_does_not_become_smaller_is_soon_left_alone(lms):
    counted = Counted()
    spillway_torch.set_codec("lossless")
    pile = [torch.rand(123_457) + 1 for _ in range(8)]
    for x in pile:
        spillway_torch.park()  # so that the pool knows how well each codec has done before the next swap-out
        x.add_(1)
    lms.evict()
    assert counted("codecs_given_up") == 1
    assert 0 < counted("encoded_raw_bytes") <= 8 * 4 * 123_457  # at most 8 of the 16 swap-outs
    for x in pile:
        assert x.min() >= 1


def test_tensors_from_before_are_copied_until_they_are_named(lms):
    x, y = torch.zeros(1 << 16), torch.zeros(1 << 16)
    counted = Counted()
    x.add_(0), y.add_(0)
    spillway_torch.set_codec("lossless")
    spillway_torch.set_codec("lossless", for_=y)
    lms.evict()
    assert counted("encoded_raw_bytes") == 4 << 16
    y.add_(0)
    spillway_torch.set_codec(None, for_=[x, y])
    lms.evict()
    assert counted("encoded_raw_bytes") == 4 << 16


def test_bfloat16_rounds_what_was_named_and_nothing_else(lms):
    counted = Counted()
    x, y = torch.randn(300, 301), torch.randn(300, 301)
    named, other = x.to(torch.bfloat16).to(torch.float32).tolist(), y.tolist()
    spillway_torch.set_codec("bfloat16", for_=(one for one in [x]))
    for _ in range(2):  # a second round trip does not change the values
        x.mul_(1)
        lms.evict()
        assert lms.is_away(x) and lms.is_away(y)
        assert x.clone().tolist() == named and y.clone().tolist() == other
    assert counted("encoded_raw_bytes") >= 2 * 4 * 300 * 301
    assert 0.5 * counted("encoded_raw_bytes") <= counted("encoded_stored_bytes") < 0.51 * counted("encoded_raw_bytes")


def test_bfloat16_has_to_be_asked_for_by_tensor():
    with pytest.raises(ValueError, match="loses bits.*by tensor"):
        spillway_torch.set_codec("bfloat16")


@pytest.mark.parametrize("codec", ["zstd", "", "Lossless", torch.bfloat16, 16])
def test_other_codecs_are_refused(codec):
    for tensors in (None, torch.ones(4096)):
        with pytest.raises(ValueError, match='"lossless", "bfloat16" or None'):
            spillway_torch.set_codec(codec, for_=tensors)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.int32, torch.complex64])
def test_bfloat16_is_for_float32_only(lms, dtype):
    counted = Counted()
    x, y = torch.ones(1 << 14), torch.ones(1 << 14, dtype=dtype)
    with pytest.raises(ValueError, match="float32"):
        spillway_torch.set_codec("bfloat16", for_=[x, y])
    lms.evict()
    assert counted("encoded_raw_bytes") == 0  # then no tensor of the list gets the codec


def test_memory_that_was_first_used_as_another_type_is_not_rounded(lms):
    x = torch.ones(1 << 14, dtype=torch.int32)
    with pytest.raises(ValueError, match="Int"):
        spillway_torch.set_codec("bfloat16", for_=x.view(torch.float32))
    with pytest.raises(ValueError, match="Int"):
        spillway_torch.set_codec("bfloat16", for_=x[1:].view(torch.float32))


def test_a_codec_is_one_of_the_whole_memory(lms):
    x = torch.randn(64, 1024)
    expected = x.to(torch.bfloat16).to(torch.float32).tolist()
    spillway_torch.set_codec("bfloat16", for_=x[3])
    lms.evict()
    assert x.clone().tolist() == expected


def test_tensors_can_have_codecs_after_install_only(script):
    assert "install" in script("""
import torch, spillway_torch
try:
    spillway_torch.set_codec("lossless", for_=torch.zeros(3))
except RuntimeError as error:
    print(error)
""")


def test_what_never_leaves_is_ignored():
    spillway_torch.set_codec("lossless", for_=[torch.empty(0), torch.empty(4, device="meta")])
    spillway_torch.set_codec("lossless", for_=[])


TRAINING = """
import hashlib
import torch, torch.nn as nn, spillway_torch
torch.set_num_threads(1)
spillway_torch.install(device="cpu", limit=LIMIT)
spillway_torch.set_enabled_lms(True)
CODEC
torch.manual_seed(3)
layers = [nn.Linear(256, 256)]
for _ in range(10):
    layers += [nn.ReLU(), nn.Linear(256, 256)]
model = nn.Sequential(*layers)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for _ in range(3):
    optimizer.zero_grad()
    loss = model(torch.randn(1024, 256)).square().mean()
    loss.backward()
    optimizer.step()
state = hashlib.sha256()
for parameter in model.parameters():
    state.update(bytes(parameter.detach().clone().view(torch.uint8).flatten().tolist()))
print(loss.item().hex(), state.hexdigest())
now = spillway_torch.memory_stats()
print(now["swap_outs"] > 0, 0 < now["host.encoded_stored_bytes"] < now["host.encoded_raw_bytes"])
"""


def test_training_under_a_limit_is_bitwise_the_same_with_lossless(script):
    def run(limit, codec):
        return script(TRAINING.replace("LIMIT", str(limit)).replace("CODEC", codec)).splitlines()
    free = run(512 << 20, "")
    tight = run(16 << 20, 'spillway_torch.set_codec("lossless")')
    assert free[0] == tight[0]
    assert free[1] == "False False" and tight[1] == "True True"
