"""The replay reads tables as they come, and its figures are those of the cells in them."""

from __future__ import annotations

from pathlib import Path

from benchmarks import search_replay

HEAD = "engine,image,model,system,precision,input_tokens,output_tokens,cards,concurrency"


def table(path: Path) -> Path:
    lines = [f"{HEAD},measured_on,ttft_s,tpot_s,more"]
    for model, speed in (("m1", 1.0), ("m2", 2.0)):
        for cards in (1, 2, 4):
            for load in (1, 4, 16, 64, 256):
                for tokens in (128, 1024):
                    each = speed * (0.005 + (0.02 + load * (2e-4 + 2e-8 * tokens)) / cards)
                    settings = f"e,i{load % 2}={load},{model},card,bf16,{tokens},128,{cards},{load}"
                    lines.append(f"{settings},2026-01-02,{each * 20},{each},x")
                    lines.append(f"{settings},2026-01-01,1.0,9.9,x")  # older
    lines += ["e,i,m1,card,bf16,128,128,1,1,2026-01-03,,,", "e,i,m1,card,bf16,?,128,1,1,,1,nan,"]
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def test_the_newest_row_of_a_cell_counts_and_bad_rows_are_left_out(tmp_path: Path) -> None:
    groups = search_replay.read_groups(table(tmp_path / "t.csv"))
    assert [group.name for group in groups] == ["m1 card bf16 e", "m2 card bf16 e"]
    assert [group.space.size for group in groups] == [30, 30]
    assert groups[0].per_user.min() > 1 / 9.9
    half, quarter = groups[0].limits()
    assert (groups[0].per_user >= half).sum() == 15
    assert half < quarter
