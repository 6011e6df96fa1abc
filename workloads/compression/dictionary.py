"""Dictionary learning of kernels: weights as sparse sums of a few atoms of a shared dictionary.

A layer's weights are cut into vectors: the k x k kernels of a convolution, pieces of a linear
layer's rows. Each becomes a sum of ``terms`` atoms. All layers with vectors of one length share
a dictionary, which alternates between coding (orthogonal matching pursuit, Pati et al. 1993) and
least squares for the atoms (method of optimal directions, Engan et al. 1999). Products through
the dictionary multiply an input by every atom once and add up, as lookups do in LCNN (Bagherinezhad
et al. 2017).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import torch

from workloads.base import BadConfiguration, Unsupported
from workloads.models.precision import hidden_layers

#: Name of the coded file beside a saved model's weights; its content is in safetensors.
DICTIONARY_FILE = "layers.dictionary"

_ITERATIONS = 20
#: Vectors that a dictionary is learned from, and that are coded at once.
_VECTORS = 65_536
#: Added to the diagonal of normal equations: atoms may be alike, or unused.
_RIDGE = 1e-6
_SEED = 0


def pursue(
    vectors: torch.Tensor, atoms: torch.Tensor, terms: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Code vectors [number, length] by atoms of norm 1 [atoms, length]: orthogonal matching
    pursuit. Returns the numbers of atoms and their coefficients, each [number, terms]."""
    gram, wanted = atoms @ atoms.T, vectors @ atoms.T
    left, free = wanted, torch.ones_like(wanted, dtype=torch.bool)
    places = torch.empty(len(vectors), 0, dtype=torch.long)
    for _ in range(terms):
        best = (left.abs() * free).argmax(1, keepdim=True)
        free.scatter_(1, best, False)
        places = torch.cat([places, best], 1)
        chosen = gram[places[:, :, None], places[:, None, :]]
        chosen = chosen + _RIDGE * torch.eye(places.shape[1])
        values = torch.linalg.solve(chosen, wanted.gather(1, places))
        left = wanted - torch.einsum("nt,ntk->nk", values, gram[places])
    return places, values


def learn(vectors: torch.Tensor, count: int, terms: int) -> torch.Tensor:
    """Learn ``count`` atoms of norm 1 from vectors [number, length]."""
    vectors = vectors[vectors.square().sum(1) > 0]
    if len(vectors) < count:
        raise BadConfiguration(
            f"dictionary_atoms: {count} atoms for {len(vectors)} kernels of "
            f"{vectors.shape[1]} weights; write fewer"
        )
    drawn = torch.randperm(len(vectors), generator=torch.Generator().manual_seed(_SEED))
    vectors = vectors[drawn[:_VECTORS]]
    atoms = torch.nn.functional.normalize(vectors[:count], dim=1)
    for _ in range(_ITERATIONS):
        places, values = pursue(vectors, atoms, terms)
        codes = torch.zeros(len(vectors), count).scatter_(1, places, values)
        ridge = _RIDGE * len(vectors) / count * torch.eye(count)
        atoms = torch.linalg.solve(codes.T @ codes + ridge, codes.T @ vectors)
        unused = codes.count_nonzero(0) == 0
        errors = (vectors - codes @ atoms).square().sum(1)
        atoms[unused] = vectors[errors.topk(int(unused.sum())).indices]
        atoms = torch.nn.functional.normalize(atoms, dim=1)
    return atoms


def code(layers: Mapping[str, Any], count: int, terms: int, length: int) -> bytes:
    """Learn dictionaries for layers and code their weights as a file's content.

    Half precision for atoms and coefficients, one or two bytes for an atom's number.
    """
    from safetensors.torch import save

    by_length: dict[int, dict[str, torch.Tensor]] = {}
    scales: dict[str, torch.Tensor] = {}  # so that layers of small weights count as much
    for name, layer in layers.items():
        weight, size = layer.weight.detach(), layer.weight[0, 0].numel()
        if size == 1 and weight.shape[1] % length:
            raise Unsupported(
                f"dictionary_length: the {weight.shape[1]} inputs of {name} are no multiple of "
                f"{length}"
            )
        # Kernels of a convolution, pieces of a linear layer's rows.
        vectors = weight.float().cpu().reshape(-1, size if size > 1 else length)
        scales[name] = vectors.square().mean().sqrt().clamp(min=torch.finfo(torch.float32).tiny)
        by_length.setdefault(vectors.shape[1], {})[name] = vectors / scales[name]
    tensors: dict[str, torch.Tensor] = {}
    for size, parts in by_length.items():
        atoms = learn(torch.cat(list(parts.values())), count, terms)
        tensors[f"atoms.{size}"] = atoms.half().contiguous()
        for name, vectors in parts.items():
            coded = [pursue(part, atoms, terms) for part in vectors.split(_VECTORS)]
            places = torch.cat([place for place, _ in coded])
            values = torch.cat([value for _, value in coded]) * scales[name]
            kind = torch.uint8 if count <= 256 else torch.int16
            tensors[f"places.{size}.{name}"] = places.to(kind)
            tensors[f"values.{size}.{name}"] = values.half()
            if not bool(values.half().isfinite().all()):
                raise BadConfiguration(f"dictionary_atoms: {name} has weights that are no numbers")
    return bytes(save(tensors))


#: A layer's code: atoms [atoms, length], their numbers and coefficients, each [vectors, terms].
Code: TypeAlias = "tuple[torch.Tensor, torch.Tensor, torch.Tensor]"


def read_codes(data: bytes) -> dict[str, Code]:
    """Open a coded file's content: codes by layer, in int32 and float32.

    Raises BadConfiguration if it is another file, or truncated.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        tensors = load(data)
        codes = {}
        for key, places in tensors.items():
            kind, size, *name = key.split(".", 2)
            if kind == "places":
                atoms, values = tensors[f"atoms.{size}"], tensors[f"values.{size}.{name[0]}"]
                codes[name[0]] = (atoms.float(), places.int(), values.float())
        return codes
    except (SafetensorError, LookupError, ValueError) as error:
        raise BadConfiguration(f"this is no file of layers by a dictionary: {error}") from error


def expand(layer_code: Code, shape: torch.Size) -> torch.Tensor:
    """Sum a layer's atoms into its weights, in float32."""
    atoms, places, values = layer_code
    parts = zip(places.split(_VECTORS), values.split(_VECTORS), strict=True)
    sums = [torch.einsum("nt,ntl->nl", value, atoms[place]) for place, value in parts]
    return torch.cat(sums).view(shape)


def replace_weights(layers: Mapping[str, Any], data: bytes) -> float:
    """Give layers the weights of a coded file; return the error: the norm of all differences over
    the norm of all weights."""
    lost = whole = 0.0
    for name, layer_code in read_codes(data).items():
        weight = layers[name].weight.data
        new = expand(layer_code, weight.shape).to(weight)
        lost += float((new.float() - weight.float()).square().sum())
        whole += float(weight.float().square().sum())
        weight.copy_(new)
    return (lost / whole) ** 0.5 if whole else 0.0


class DictionaryLinear(torch.nn.Module):
    """A linear layer that multiplies its input by the atoms, and sums products by its code."""

    atoms: torch.Tensor  # [atoms, length]
    places: torch.Tensor  # of products, as ``values`` [outputs, pieces x terms]
    values: torch.Tensor

    def __init__(self, layer: torch.nn.Linear, layer_code: Code) -> None:
        super().__init__()
        atoms, places, values = (part.to(layer.weight.device) for part in layer_code)
        self.out_features, self.in_features = layer.weight.shape
        pieces = self.in_features // atoms.shape[1]
        first = len(atoms) * torch.arange(pieces, dtype=torch.int32, device=places.device)
        places = places.view(self.out_features, pieces, -1) + first[:, None]
        self.register_buffer("atoms", atoms.to(layer.weight.dtype))
        self.register_buffer("places", places.flatten(1))  # of products [pieces x atoms, rows]
        self.register_buffer("values", values.view(places.shape).flatten(1).to(layer.weight.dtype))
        self.bias = layer.bias

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Compute [..., outputs] from [..., inputs]."""
        rows = inputs.reshape(-1, self.in_features)
        pieces = rows.view(len(rows), -1, self.atoms.shape[1])
        products = (pieces @ self.atoms.T).flatten(1).T.contiguous()
        sums = torch.nn.functional.embedding_bag(
            self.places, products, per_sample_weights=self.values, mode="sum"
        ).T
        if self.bias is not None:
            sums = sums + self.bias
        return sums.reshape(*inputs.shape[:-1], self.out_features)


def use_products(model: Any, data: bytes) -> int:
    """Replace a model's linear layers by those of a coded file, in place; return their number."""
    layers, replaced = hidden_layers(model), 0
    for name, layer_code in read_codes(data).items():
        if name in layers:
            model.set_submodule(name, DictionaryLinear(layers[name], layer_code))
            replaced += 1
    return replaced
