"""The choice of kernels on a machine without Triton."""

import sys

import pytest
import torch

import etude.weights
from etude.errors import UserError
from etude.weights.snapshots import HeldPart, Snapshots
from etude.weights.ulpd import kernels
from etude.weights.ulpd.chunk_grid import Spec
from etude.weights.ulpd.digest import digest_part


def test_a_gpu_without_triton_is_one_sentence(monkeypatch) -> None:
    monkeypatch.setattr(kernels, "on_gpu", lambda tensor: True)
    monkeypatch.setitem(sys.modules, "triton", None)  # as if it were not installed
    monkeypatch.delitem(sys.modules, "etude.weights.ulpd.triton_kernels", raising=False)
    monkeypatch.delattr(etude.weights, "triton_kernels", raising=False)
    spec, sentence = Spec("x", "float32", (3,)), "Triton, which is not installed; pip install triton"
    with pytest.raises(kernels.TritonMissing, match=sentence):
        digest_part(spec, torch.zeros(3))
    snapshots = Snapshots()
    snapshots.take([HeldPart(spec, torch.zeros(3))])()
    with pytest.raises(UserError, match=sentence):
        snapshots.take([HeldPart(spec, torch.ones(3))])


def test_a_host_tensor_needs_no_triton(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    spec, part = Spec("x", "float32", (6,)), torch.arange(6.0)
    halves = digest_part(spec, part[:2]) + digest_part(spec, part[2:], 2)
    assert digest_part(spec, part) == halves % (1 << 64)
