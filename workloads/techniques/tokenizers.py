"""Tokenizers."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from workloads.base import Unsupported
from workloads.settings import setting
from workloads.techniques.base import Loading, Technique


class TokenizerKind(Technique):
    """Tokenizers: fast ones are written in Rust, slow ones in Python.

    Both give the same ids for ordinary text. Tokenizing happens once, before training, and is timed
    in every row (``tokenization_s``). Newer checkpoints bring a fast tokenizer only, and
    transformers ignores the wish for a slow one there; here the job then says so.
    """

    name: ClassVar[str] = "tokenizers"
    title: ClassVar[str] = "fast and slow tokenizers"
    order: ClassVar[int] = 10

    tokenizer: Literal["auto", "fast", "slow"] = setting(
        "auto",
        role="choice",
        loads=True,
        always_in_id=True,
        description="fast is the tokenizer in Rust, slow the one in Python, auto the fast one "
        "where the checkpoint has it. The row has the time for all samples (tokenization_s).",
    )

    def before_load(self, loading: Loading) -> None:
        if self.tokenizer != "auto":
            loading.tokenizer_arguments["use_fast"] = self.tokenizer == "fast"

        def check(model: Any, tokenizer: Any) -> None:
            found = "fast" if getattr(tokenizer, "is_fast", False) else "slow"
            loading.details["tokenizer"] = f"{found} ({type(tokenizer).__name__})"
            if self.tokenizer not in ("auto", found):
                import transformers

                raise Unsupported(
                    f"the checkpoint has no {self.tokenizer} tokenizer that transformers "
                    f"{transformers.__version__} loads, only a {found} one "
                    f"({type(tokenizer).__name__})"
                )

        loading.checks.append(check)


SPECS = (TokenizerKind,)
