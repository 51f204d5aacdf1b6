"""Fewer passes over what convolutions put out, where Triton is there."""

from __future__ import annotations

import copy

from torch import nn


def fuse_where_possible(module: nn.Module) -> None:
    """Put fused layers in the place of those they can stand for."""
    try:
        from fedsieve.engines.fused_layers import fuse
    except ImportError:  # no Triton here
        return
    fuse(module)


def fused_twin(module: nn.Module) -> nn.Module:
    """A module with the same parameters and buffers, and fused layers."""
    same = {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}
    twin = copy.deepcopy(module, same)
    fuse_where_possible(twin)
    return twin
