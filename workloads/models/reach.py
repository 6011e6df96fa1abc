"""Parts of decoders whose work depends on a text's length: sliding windows, rotary positions.

Engines that make a graph or a cache of their own read them here, since what they make is the same
for every length: attention to all that stands before, and one table of angles.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

#: Kinds of rotary positions whose angles do not depend on the text's length.
_STEADY = {"default", "linear", "llama3", "yarn"}
#: Kinds of layers that see a part of the text, with the name of their number of positions.
_SEEN = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}


def narrow_layers(config: Any) -> dict[str, int]:
    """Kinds of layers that see a part of the text only, with the positions of which a token sees
    all that stand before it; 0 where the kind has no such number. Of transformers' config, or of
    config.json, which may leave out what the model's class adds."""
    if isinstance(config, Mapping):
        said = config.get("text_config") or config
    else:
        said = config.get_text_config(decoder=True).to_dict()
    kinds = set(said.get("layer_types") or ()) - {"full_attention"}
    if said.get("use_sliding_window", True) and said.get("sliding_window"):
        kinds.add("sliding_attention")
    sizes = {kind: said.get(_SEEN.get(kind, "")) for kind in kinds}
    return {kind: int(sizes[kind] or 0) for kind in sorted(kinds)}


def moving_rotation(model: Any) -> str | None:
    """A kind of rotary positions in the model that depends on the text's length; None: it has
    none."""
    for part in model.modules():
        kinds = getattr(part, "rope_type", None) or ()
        each = kinds.values() if isinstance(kinds, Mapping) else [kinds] if kinds else []
        if moving := set(each) - _STEADY:
            return min(moving)
    return None
