"""Replacement of a model's linear layers by ones with weights in a CPU's own layout, at loading.

The plain matrix is given up for the packed one, so that memory stays. The last layer's matrix that
is also the embeddings' cannot be given up, and stays plain.

A model in int8 multiplies in int8: activations are brought to 8 bits, with a scale for each row,
just before. A gated feed-forward layer (SwiGLU) is three products; the first two also compute the
activation and the gate, where they would have gone through memory twice more. A decoder layer with
known parts is computed in few calls (``packed_layer``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from workloads.errors import Unsupported
from workloads.generation import packed_layer
from workloads.generation.native.products import (
    PANEL,
    NativeEmbedding,
    NativeHead,
    code,
    format_of,
)
from workloads.generation.packed_products import (
    GatedProduct,
    Int8Linear,
    LeftLinear,
    PackedLinear,
    Rows8,
    alike,
    gate_up_down,
    is_int8,
    is_plain,
)
from workloads.models import reach


def pack(model: torch.nn.Module, *, continuous: bool = False) -> str:
    """Replace a model's linear layers, one after the other; what was done, for the row.

    Those whose matrix the model needs elsewhere as well keep it.

    Args:
        model: loaded, on a CPU.
        continuous: it generates in continuous batches, whose passes machine code of ours takes,
            where there is some; static batches have oneDNN, made for products of many rows.

    Raises:
        Unsupported: this torch has no oneDNN, or the model no linear layer that can be packed, or
            its products in int8 would be wrong on this processor.
    """
    if not torch.backends.mkldnn.is_available():
        raise Unsupported("packed_weights: this build of PyTorch comes without oneDNN")
    if not multiplies_int8(torch.cpu.get_capabilities()) and _has_int8(model):
        raise Unsupported(
            "packed_weights in int8: this processor has no VNNI, without which oneDNN's sums of"
            " 8-bit products overflow; take another precision, or int8 without packed_weights"
        )
    holders = Counter(
        id(matrix) for module in model.modules() for matrix in module.parameters(recurse=False)
    )
    with torch.no_grad():
        fused, lacking = _pack_layers(model, continuous)
        tied = bool(fused) and fused[0].native is not None and _pack_tied(model, holders)
        done = _pack_children(model, holders)
    whole, int8 = len(fused), sum(layer.int8 for layer in fused)
    done[Int8Linear] += 7 * int8
    done[GatedProduct] += whole - int8
    layers = tied + done[PackedLinear] + done[LeftLinear] + done[Int8Linear] + 4 * (whole - int8)
    if not done.total():
        raise Unsupported("packed_weights: the model has no plain linear layer on a CPU")
    parts = [f"{layers + 3 * done[GatedProduct]} layers"]
    if done[Int8Linear]:
        parts.append(f"{done[Int8Linear]} with activations in int8, a scale for each row")
    if done[GatedProduct]:
        parts.append(f"{done[GatedProduct]} gated feed-forward layers in one piece")
    if whole:
        parts.append(f"{whole} decoder layers in few calls")
        if continuous:
            parts += _told_of_code(fused, lacking)
    return ", ".join(parts)


def _told_of_code(fused: Sequence[packed_layer.PackedLayer], lacking: str) -> Iterator[str]:
    """The words of a row on machine code."""
    in_code = [layer.native for layer in fused if layer.native is not None]
    if not in_code:
        yield f"none in machine code ({lacking or 'it computed something else'})"
        return
    name, kernel = in_code[0].format, in_code[0].kernel
    yield f"{len(in_code)} in one call of machine code in {name} in continuous batches"
    if kernel == "bf16_pairs":
        yield "multiplied by pairs (VDPBF16PS)"
    if compiled := code().compiled:
        yield compiled


def multiplies_int8(capabilities: Mapping[str, Any]) -> bool:
    """Tell if a processor's 8-bit products are exact: an x86 without VNNI sums pairs of them in 16
    bits, which overflow (oneDNN's documentation, "Nuances of int8 computations").

    Args:
        capabilities: of ``torch.cpu.get_capabilities()``.
    """
    is_x86 = str(capabilities.get("architecture", "")).startswith("x86")
    return not is_x86 or any(capabilities.get(name) for name in ("avx512_vnni", "avx_vnni"))


def _has_int8(model: torch.nn.Module) -> bool:
    """Tell if any linear layer's weights are kept in int8."""
    return any(type(each) is torch.nn.Linear and is_int8(each) for each in model.modules())


def _pack_layers(model: Any, continuous: bool) -> tuple[list[packed_layer.PackedLayer], str]:
    """Have decoder layers of known parts computed in few calls; which, and why none of them is
    machine code, if so."""
    inner = getattr(model, "model", None)
    layers, rotary = (getattr(inner, name, None) for name in ("layers", "rotary_emb"))
    if not isinstance(layers, torch.nn.ModuleList) or rotary is None:
        return [], ""
    if reach.narrow_layers(model.config):
        return [], ""
    lacking = packed_layer.lacking(layers) if continuous else ""
    return packed_layer.fuse(layers, rotary, continuous and not lacking), lacking


def _pack_tied(model: Any, holders: Mapping[int, int]) -> bool:
    """Have an output layer and the embeddings share a matrix in machine code's panels; tell if."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if type(head) is not torch.nn.Linear or type(embedding) is not torch.nn.Embedding:
        return False
    if head.weight is not embedding.weight or holders[id(head.weight)] != 2:
        return False
    if head.out_features % PANEL or head.bias is not None or embedding.max_norm is not None:
        return False
    if format_of([head]) is None:
        return False
    packed = NativeHead(head)
    model.set_output_embeddings(packed)
    model.set_input_embeddings(NativeEmbedding(packed))
    return True


def _pack_children(module: torch.nn.Module, holders: Mapping[int, int]) -> Counter[type]:
    """Replace what can be packed within a module; how many of each kind.

    Goes by names and keeps no list of modules, so that each matrix is freed when it is packed.

    Args:
        module: whose children are replaced, and theirs.
        holders: of each matrix, by id, how many modules have it.
    """
    done, rows = Counter[type](), Rows8()
    for name in [name for name, _ in module.named_children()]:
        child = module.get_submodule(name)
        layer: torch.nn.Module | None
        if type(child) is not torch.nn.Linear:
            layer = _fused(child)
        elif child.weight.device.type != "cpu":
            layer = None
        elif is_plain(child):
            layer = (LeftLinear if holders[id(child.weight)] > 1 else PackedLinear)(child)
        else:
            layer = Int8Linear([child], rows) if is_int8(child) else None
        if layer is None:
            done += _pack_children(child, holders)
        else:
            setattr(module, name, layer)
            done[type(layer)] += 1
    return done


def _fused(module: torch.nn.Module) -> GatedProduct | None:
    """A layer in one piece that computes the same as a gated feed-forward module, if it is one.

    Its layers have the names that most models give them, and what comes out must be
    alike: a model may compute something else with layers of these names, from other inputs too.
    """
    layers = gate_up_down(module)
    if layers is None or any(each.weight.device.type != "cpu" for each in layers):
        return None
    width = layers[0].in_features
    inputs = torch.arange(4 * width).sin().view(4, width).to(layers[0].weight.dtype)
    try:
        expected, fused = module(inputs), GatedProduct(*layers)
        return fused if alike(fused(inputs), expected) else None
    except Exception:  # whatever a forward of another kind makes of these inputs
        return None
