"""Models of strangers on which a reader without limits would hang, run out of memory or stumble."""

from __future__ import annotations

import json
from pathlib import Path

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 320,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
WORDS = {"type": "WordLevel", "vocab": {"a": 0, "[UNK]": 1}, "unk_token": "[UNK]"}
GROWING = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 50}
GROWN = {"type": "Sequence", "normalizers": [GROWING] * 20}
LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
DOUBLED = "{% set n = namespace(t='x') %}{% for i in range(60) %}{% set n.t = n.t + n.t %}"


def million_added() -> str:
    """A tokenizer.json of 45 MB."""
    added = [{"id": number, "content": f"<{number}>"} for number in range(1_000_000)]
    return json.dumps({"model": WORDS, "added_tokens": added})


#: Kind -> what a stranger's directory has beside or in place of a small model's configuration,
#: and words of the refusal.
ODD: dict[str, tuple[dict[str, object], str]] = {
    "layers": ({"config.json": LLAMA | {"num_hidden_layers": 10**12}}, "to 2,000"),
    "labels": ({"config.json": LLAMA | {"num_labels": 10**9}}, "up to 1,000,000"),
    "epsilon": ({"config.json": LLAMA | {"rms_norm_eps": 10**400}}, "rms_norm_eps"),
    "depth": ({"config.json": "[" * 100_000}, "cannot be read as JSON"),
    "added": ({"tokenizer.json": million_added}, "adds 1,000,000 tokens"),
    "growth": ({"tokenizer.json": {"model": WORDS, "normalizer": GROWN}}, "times as long"),
    "loop": ({"chat_template.jinja": LOOP}, r"the chat template in .* took more than \d+ s"),
    "gigabytes": ({"chat_template.jinja": "{{ 'x' * 10**10 }}"}, "1 GB of memory"),
    "doubled": ({"chat_template.jinja": DOUBLED + "{% endfor %}"}, "1 GB of memory"),
    "import": (
        {"chat_template.jinja": "{% import 'a' as b %}"},
        "chat_template.jinja: .*TypeError",
    ),
    "include": ({"chat_template.jinja": "{% include 'a' %}"}, "chat_template.jinja: .*TypeError"),
    "zero": ({"chat_template.jinja": "{{ 1 / 0 }}"}, "ZeroDivisionError"),
    "types": ({"chat_template.jinja": "{{ 1 + 'a' }}"}, "TypeError"),
}


def write_odd(directory: Path, kind: str) -> None:
    """Write the files of a kind; a directory without a configuration gets a small model's."""
    files, _ = ODD[kind]
    for name, content in files.items():
        content = content() if callable(content) else content
        text = content if isinstance(content, str) else json.dumps(content)
        (directory / name).write_text(text)
    if not (directory / "config.json").exists():
        (directory / "config.json").write_text(json.dumps(LLAMA))
