"""Versions that are published from a device, and installed on one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from etude.audit.rescoring import set_weights
from etude.models.loading import load_model, named_tensors
from etude.store import open_store
from etude.weights.content import load
from etude.weights.publisher import Publisher
from tests.device.conftest import Device
from tests.helpers.tiny_models import save_random_model

pytestmark = pytest.mark.release  # with `make device`, in processes of its own


def test_published_from_a_device(device: Device, tmp_path: Path) -> None:
    """Two versions: an anchor, and a delta that is made on the device where it has a kernel for that."""
    model = load_model(save_random_model(tmp_path / "model", "moe"), device=device.name)
    publisher = Publisher(open_store(str(tmp_path / "weights")), 16)
    first = {name: t.detach().to(torch.bfloat16) for name, t in named_tensors(model).items()}
    second = {name: t + 0.01 * torch.ones_like(t) for name, t in first.items()}
    for version, tensors in enumerate((first, second)):
        publisher.publish(version, tensors, (), {})
    publisher.finish_anchor()
    for version, tensors in enumerate((first, second)):
        _, found = load(open_store(str(tmp_path / "weights")), version)
        assert found.keys() == tensors.keys()
        assert all(torch.equal(found[name], t.to("cpu")) for name, t in tensors.items())
    set_weights(model, {name: tensor.to(device.name) for name, tensor in found.items()})
    assert all(torch.equal(t.detach().to("cpu").bfloat16(), found[name]) for name, t in named_tensors(model).items())
