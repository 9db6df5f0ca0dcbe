"""Weights that are not trained and wait in the host's memory between uses: version 0 as the reference policy of the KL
term, or a teacher."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor
from transformers import PreTrainedModel

from etude.errors import UserError
from etude.trainer.sharding import local, own_rows, reshard


class Reference:
    """The present weights of `model`, or `others` of the same names and shapes. A second model would take its size
    again of the device's memory; here the two change places for a pass, tensor by tensor, over the bus. With several
    ranks, each holds its rows of both. Raises UserError for weights of another model."""

    def __init__(self, model: PreTrainedModel, others: Mapping[str, Tensor] | None = None) -> None:
        self._model = model
        reshard(model)
        own = dict(model.named_parameters())
        theirs = own if others is None else others
        if {n: p.shape for n, p in own.items()} != {n: p.shape for n, p in theirs.items()}:
            raise UserError("distill.teacher has other tensors than the model that learns: give an earlier checkpoint")
        self._there = {
            name: torch.empty_like(local(p), device="cpu", pin_memory=p.device.type == "cuda").copy_(
                own_rows(p, theirs[name].detach())
            )
            for name, p in own.items()
        }

    @contextmanager
    def weights(self) -> Iterator[PreTrainedModel]:
        """A context in which the model has the reference's weights; afterwards it has its own again, bit for bit."""
        self._change_places()
        try:
            yield self._model
        finally:
            self._change_places()

    @torch.no_grad()
    def _change_places(self) -> None:
        reshard(self._model)
        for name, parameter in self._model.named_parameters():
            rows = local(parameter.detach())
            own = rows.to("cpu", copy=True)
            rows.copy_(self._there[name])
            self._there[name].copy_(own)
