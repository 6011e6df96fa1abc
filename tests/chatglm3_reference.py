"""ChatGLM3 as it was published, for tests: a checkpoint writer and a forward pass of its own.

Written from the published description, sharing no code with the product: fused query-key-value,
interleaved rotary pairs on the first half of each head, [gate; up] SwiGLU, two key/value groups.
Weights are random; a test that compares logits with the native class checks names, row order,
rotary pairs, epsilon and gate order at once.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch

CONFIG = {
    "model_type": "chatglm",
    "architectures": ["ChatGLMModel"],
    "hidden_size": 64,
    "num_layers": 3,
    "num_attention_heads": 4,
    "kv_channels": 16,
    "multi_query_attention": True,
    "multi_query_group_num": 2,
    "ffn_hidden_size": 96,
    "padded_vocab_size": 640,
    "layernorm_epsilon": 1e-5,
    "seq_length": 512,
    "rmsnorm": True,
    "add_qkv_bias": True,
    "add_bias_linear": False,
    "post_layer_norm": True,
    "apply_residual_connection_post_layernorm": False,
    "apply_query_key_layer_scaling": True,
    "tie_word_embeddings": False,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "torch_dtype": "float16",
}


def random_state(config: dict = CONFIG, seed: int = 0) -> dict[str, torch.Tensor]:
    """Random weights under the published names, large enough that every part shows in logits."""
    generator = torch.Generator().manual_seed(seed)
    hidden, inner = config["hidden_size"], config["ffn_hidden_size"]
    rows = config["num_attention_heads"] * config["kv_channels"]
    fused = rows + 2 * config["multi_query_group_num"] * config["kv_channels"]

    def normal(*shape: int, scale: float) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * scale

    vocabulary = config["padded_vocab_size"]
    # Small embeddings, so that the epsilon of the norms shows too.
    state = {"embedding.word_embeddings.weight": normal(vocabulary, hidden, scale=0.03)}
    for layer in range(config["num_layers"]):
        at = f"encoder.layers.{layer}."
        state[at + "input_layernorm.weight"] = 1 + normal(hidden, scale=0.1)
        state[at + "self_attention.query_key_value.weight"] = normal(fused, hidden, scale=0.2)
        state[at + "self_attention.query_key_value.bias"] = normal(fused, scale=0.2)
        state[at + "self_attention.dense.weight"] = normal(hidden, rows, scale=0.05)
        state[at + "post_attention_layernorm.weight"] = 1 + normal(hidden, scale=0.1)
        state[at + "mlp.dense_h_to_4h.weight"] = normal(2 * inner, hidden, scale=0.2)
        state[at + "mlp.dense_4h_to_h.weight"] = normal(hidden, inner, scale=0.05)
    state["encoder.final_layernorm.weight"] = 1 + normal(hidden, scale=0.1)
    state["output_layer.weight"] = normal(vocabulary, hidden, scale=0.2)
    state["rotary_pos_emb.inv_freq"] = torch.ones(4)
    return {f"transformer.{name}": tensor for name, tensor in state.items()}


def logits(
    state: dict[str, torch.Tensor], ids: torch.Tensor, config: dict = CONFIG
) -> torch.Tensor:
    """[batch, length] token ids -> [batch, length, vocabulary] logits, in float32."""
    w = {name.removeprefix("transformer."): tensor.float() for name, tensor in state.items()}
    x = w["embedding.word_embeddings.weight"][ids]
    for layer in range(config["num_layers"]):
        at = f"encoder.layers.{layer}."
        normed = _norm(x, w[at + "input_layernorm.weight"], config)
        x = x + _attention(normed, w, at + "self_attention.", config)
        normed = _norm(x, w[at + "post_attention_layernorm.weight"], config)
        gate, up = (normed @ w[at + "mlp.dense_h_to_4h.weight"].T).chunk(2, dim=-1)
        x = x + (torch.nn.functional.silu(gate) * up) @ w[at + "mlp.dense_4h_to_h.weight"].T
    return _norm(x, w["encoder.final_layernorm.weight"], config) @ w["output_layer.weight"].T


def _norm(x: torch.Tensor, weight: torch.Tensor, config: dict) -> torch.Tensor:
    return weight * x / (x.pow(2).mean(-1, keepdim=True) + config["layernorm_epsilon"]).sqrt()


def _attention(x: torch.Tensor, w: dict, at: str, config: dict) -> torch.Tensor:
    heads, groups = config["num_attention_heads"], config["multi_query_group_num"]
    size = config["kv_channels"]
    batch, length, _ = x.shape
    mixed = x @ w[at + "query_key_value.weight"].T + w[at + "query_key_value.bias"]
    q, k, v = mixed.split([heads * size, groups * size, groups * size], dim=-1)
    q = _rotate(q.view(batch, length, heads, size), config)
    k = _rotate(k.view(batch, length, groups, size), config)
    v = v.view(batch, length, groups, size)
    k = k.repeat_interleave(heads // groups, dim=2)
    v = v.repeat_interleave(heads // groups, dim=2)
    scores = torch.einsum("bihd,bjhd->bhij", q, k) / size**0.5
    future = torch.ones(length, length, dtype=torch.bool).triu(1)
    attended = scores.masked_fill(future, float("-inf")).softmax(-1)
    mixed = torch.einsum("bhij,bjhd->bihd", attended, v).reshape(batch, length, heads * size)
    return mixed @ w[at + "dense.weight"].T


def _rotate(x: torch.Tensor, config: dict) -> torch.Tensor:
    """Turn neighbouring pairs of the first half of the channels by position × frequency."""
    half = x.shape[-1] // 2
    base = 10000 * config.get("rope_ratio", 1)
    frequency = base ** -(torch.arange(0, half, 2).float() / half)
    angle = torch.arange(x.shape[1]).float()[:, None] * frequency  # [length, half/2]
    cos, sin = angle.cos()[:, None, :], angle.sin()[:, None, :]
    even, odd = x[..., 0:half:2], x[..., 1:half:2]
    turned = torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1).flatten(-2)
    return torch.cat((turned, x[..., half:]), dim=-1)


def write_checkpoint(
    directory: Path,
    state: dict[str, torch.Tensor],
    *,
    config: dict = CONFIG,
    form: str = "bin",
    shards: int = 1,
    index: bool = True,
) -> Path:
    """Write a checkpoint in the original layout; layers may span shards, as in the published."""
    from safetensors.torch import save_file

    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    stem, suffix = ("pytorch_model", ".bin") if form == "bin" else ("model", ".safetensors")
    names = list(state)
    weight_map = {}
    for number in range(shards):
        part = names[len(names) * number // shards : len(names) * (number + 1) // shards]
        name = (
            f"{stem}{suffix}" if shards == 1 else f"{stem}-{number + 1:05}-of-{shards:05}{suffix}"
        )
        tensors = {key: state[key].clone() for key in part}
        if form == "bin":
            torch.save(tensors, directory / name)
        else:
            save_file(tensors, directory / name)
        weight_map |= dict.fromkeys(part, name)
    if shards > 1 and index:
        text = json.dumps({"metadata": {"total_size": 0}, "weight_map": weight_map})
        (directory / f"{stem}{suffix}.index.json").write_text(text)
    return directory


def write_sentencepiece(directory: Path) -> Path:
    """Train a tokenizer.model of ChatGLM3's kind on a few lines; 256 bytes among its 380 pieces."""
    import sentencepiece

    corpus = ["类型#裙子*版型#显瘦*风格#复古", "这款连衣裙采用纯棉面料，柔软舒适。", "你好，世界"]
    corpus += ["the quick brown fox jumps over the lazy dog", "systems stop on sop and eop  twice"]
    text = directory / "corpus.txt"
    text.write_text("\n".join(corpus * 20), encoding="utf-8")
    sentencepiece.SentencePieceTrainer.train(
        input=str(text),
        model_prefix=str(directory / "tokenizer"),
        model_type="bpe",
        vocab_size=380,
        byte_fallback=True,
        normalization_rule_name="identity",
        add_dummy_prefix=True,
        remove_extra_whitespaces=False,
        split_by_whitespace=True,
        unk_id=0,
        bos_id=1,
        eos_id=2,
        pad_id=-1,
        minloglevel=2,
    )
    text.unlink()
    return directory / "tokenizer.model"
