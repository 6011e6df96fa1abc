"""Rows of the engine graph by the product's measuring code, in one process without Ray.

    python -m benchmarks.card.decoding MODEL OUT [SECONDS]

MODEL is a checkpoint's directory, OUT a folder. Each precision runs at four batch sizes (128 tokens
in, 128 out); its logits, forced along one fp32 text, are compared with those of transformers in
fp32. Cells that would begin after SECONDS (default 600) are left out.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, GenerationConfig

from workloads import text_generation
from workloads.base import JobContext, MeasureSettings, Request
from workloads.bench.collective import OneCard
from workloads.devices import device_for

PROMPT, TOKENS, LENGTH = 100, 48, 256


class Bench:
    """The card, what is loaded on it, and the rows."""

    def __init__(self, model: str, out: Path) -> None:
        self.model = model
        self.device = device_for("cuda")
        self.loaded: dict[str, Any] = {}
        self.rows = (out / "decoding_rows.jsonl").open("a", encoding="utf-8")
        self.began = time.perf_counter()
        draw = torch.Generator().manual_seed(7)
        self.prompts = torch.randint(300, 4000, (4, PROMPT), generator=draw)
        self.say(
            card=self.device.device_name(),
            driver=self.device.driver_version(),
            torch=torch.__version__,
            transformers=transformers.__version__,
            date=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            settings=dict(self.device.configure()),
        )

    def say(self, **row: Any) -> None:
        row["at_s"] = round(self.elapsed(), 1)
        text = json.dumps(row)
        print(text, flush=True)
        self.rows.write(text + "\n")
        self.rows.flush()

    def elapsed(self) -> float:
        return time.perf_counter() - self.began

    def resident(self, key: str, loader: Callable[[], Any]) -> Any:
        if key not in self.loaded:
            self.loaded.clear()
            torch._dynamo.reset()
            self.device.release_memory()
            self.loaded[key] = loader()
        return self.loaded[key]

    def cell(self, precision: str, batch: int) -> None:
        """One job of text generation, as a worker would run it."""
        context = JobContext(
            device=self.device,
            rank=0,
            world_size=1,
            collective=OneCard(),
            enter_phase=lambda phase: None,
            resident=self.resident,
            clock=time.perf_counter,
            cpu_clock=time.process_time,
        )
        request = Request(
            workload="text-generation",
            model=self.model,
            dataset="advertisegen-synthetic",
            precision=precision,
            batch_size=batch,
            engine="graph",
            residency_key=precision,
            parameters={
                "output_tokens": 128,
                "input_tokens": 128,
                "ignore_eos": True,
                "prompts": batch,
                "keep_texts": 0,
            },
            measure=MeasureSettings(
                warmup=1, min_repeats=3, max_repeats=4, time_limit_s=8, relative_half_width=0.02
            ),
        )
        self.device.reset_peak_memory()
        result = text_generation.run(request, context)
        timed = [sample for sample in result.samples if not sample.warmup]
        rates = sorted(sample.output_tokens / sample.wall_s for sample in timed)
        steps = [
            (item.latency_s - (item.ttft_s or 0.0)) / (item.output_tokens - 1)
            for item in result.items
        ]
        step_s = sum(steps) / len(steps)
        self.say(
            row=1,
            engine="graph",
            precision=precision,
            batch=batch,
            tokens_per_s=round(rates[len(rates) // 2], 1),
            all=[round(rate, 1) for rate in rates],
            ttft_ms=round(1e3 * sum(sample.ttft_s or 0.0 for sample in timed) / len(timed), 2),
            decode_tokens_per_s=round(batch / step_s, 1),
            step_ms=round(1e3 * step_s, 3),
            load_s=round(result.load_s, 2),
            warmup_s=round(result.warmup_s, 2),
            weight_gb=round((result.weight_bytes or 0) / 1e9, 3),
            peak_gb=round((result.peak_device_memory_bytes or 0) / 1e9, 2),
            stop=result.stop_reason,
            detail=result.precision_detail,
        )

    def reference(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens that transformers chooses in fp32, and its logits along them."""
        model = AutoModelForCausalLM.from_pretrained(
            self.model,
            dtype=torch.float32,
            attn_implementation="sdpa",
            device_map={"": self.device.torch_device},
        ).eval()
        ids = self.prompts.to(self.device.torch_device)
        with torch.inference_mode():
            text = model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                generation_config=GenerationConfig(
                    max_new_tokens=TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0
                ),
            )
            logits = model(input_ids=text[:, :-1]).logits[:, PROMPT - 1 :].float().cpu()
        tokens = text[:, PROMPT:].cpu()
        del model
        gc.collect()
        self.device.release_memory()
        return tokens, logits

    @torch.inference_mode()
    def distance(self, precision: str, tokens: torch.Tensor, reference: torch.Tensor) -> None:
        """Logits of the loaded engine along the reference's tokens, for one row and for four."""
        generator = next(iter(self.loaded.values())).engine.generator
        for rows in (1, 4):
            prompts = generator.prepare(self.prompts[:rows].tolist())
            forced = tokens[:rows].to(self.device.torch_device)
            state = generator._ready(rows, PROMPT + TOKENS)
            state.set_ends(())
            read = generator._read(state, prompts)
            step = generator._launch(state, LENGTH, 1)
            state.done.zero_()
            read()
            found = [state.logits.clone()]
            for index in range(TOKENS - 1):
                state.hidden.copy_(generator.decoder.embedding[forced[:, index]])
                state.token.copy_(forced[:, index])
                step()
                found.append(state.logits.clone())
            mine, theirs = torch.stack(found, 1).float().cpu(), reference[:rows]
            best = theirs.topk(2, -1).values
            other = mine.argmax(-1) != tokens[:rows]
            margin = (best[..., 0] - best[..., 1])[other]
            self.say(
                distance=precision,
                rows=rows,
                relative=round(float((mine - theirs).norm() / theirs.norm()), 5),
                largest=round(float((mine - theirs).abs().max()), 4),
                spread=round(float(theirs.std()), 4),
                steps=int(other.numel()),
                other_choice=int(other.sum()),
                largest_margin_of_other_choice=round(float(margin.max()), 4) if len(margin) else 0,
            )


def main(model: str, out: str, seconds: str = "600") -> None:
    """All precisions, the fastest and the plainest first."""
    bench = Bench(model, Path(out))
    tokens, logits = bench.reference()
    for precision in ("bf16", "int4", "fp8", "int8", "fp32", "fp16"):
        for batch in (1, 8, 32, 128):
            if bench.elapsed() > float(seconds):
                return
            bench.cell(precision, batch)
            if batch == 8:
                bench.distance(precision, tokens, logits)


if __name__ == "__main__":
    main(*sys.argv[1:])
