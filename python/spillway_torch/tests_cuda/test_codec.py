# SPDX-License-Identifier: Apache-2.0
"""Codecs of CUDA tensors, which take fewer bytes while they are away."""
import pytest
import torch

import spillway_torch


@pytest.fixture(autouse=True)
def codecs():
    """Skips the tests if the module was built without nvcc, and so has no codecs for CUDA tensors."""
    try:
        spillway_torch.set_codec("lossless")
    except NotImplementedError as error:
        pytest.skip(str(error))
    spillway_torch.set_codec(None)
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
        torch.cuda.synchronize()
        return spillway_torch.memory_stats()


@pytest.mark.parametrize("n", [1 << 18, (1 << 18) + 13])
def test_lossless_is_bitwise_and_shorter(lms, n):
    host = torch.relu(torch.randn(n, generator=torch.Generator().manual_seed(3)))
    counted = Counted()
    x = host.cuda()
    spillway_torch.set_codec("lossless", for_=x)
    for _ in range(3):
        x.copy_(host)
        lms.evict()
        assert lms.is_away(x)
        assert torch.equal(x.cpu(), host)
    assert counted("encoded_raw_bytes") >= 3 * 4 * n
    assert counted("encoded_stored_bytes") < 0.6 * counted("encoded_raw_bytes")


def test_lossless_for_all_that_is_made(lms):
    counted = Counted()
    spillway_torch.set_codec("lossless")
    hosts = [torch.relu(torch.randn(900_001 + i)) for i in range(12)]  # 43 MB, under a limit of 32 MiB
    tensors = [host.cuda() for host in hosts]
    for _ in range(2):
        for x, host in zip(tensors, hosts):
            assert torch.equal(x.cpu(), host)
    assert counted("encoded_raw_bytes") > 12 << 20


def test_bfloat16_rounds_what_is_away(lms):
    host = torch.randn(1 << 18)
    x, y = host.cuda(), host.cuda()
    spillway_torch.set_codec("bfloat16", for_=[x])
    counted = Counted()
    lms.evict()
    assert torch.equal(x.cpu(), host.to(torch.bfloat16).float())
    assert torch.equal(y.cpu(), host)
    assert counted("encoded_stored_bytes") < 0.6 * counted("encoded_raw_bytes")
    with pytest.raises(ValueError, match="only memory of float32"):
        spillway_torch.set_codec("bfloat16", for_=torch.zeros(1 << 18, dtype=torch.int32).cuda())
