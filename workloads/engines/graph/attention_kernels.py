# mypy: disable-error-code="no-untyped-def"
"""Attention of new tokens over the cache, and the choice of the next ones."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def _turned(
    at,  # [heads, 1]: where each head begins
    known,  # [heads, 1]
    d,
    cos_ptr,
    sin_ptr,
    gain_ptr,
    position,
    eps,
    WIDTH: tl.constexpr,
    ROTARY: tl.constexpr,
    PAIRS: tl.constexpr,
    HEAD_NORM: tl.constexpr,
):
    """Heads with rotary positions (and, if ``HEAD_NORM``, normalised first), float32."""
    HALF: tl.constexpr = ROTARY // 2
    turns = d < ROTARY
    if PAIRS:
        partner = d ^ 1
        which = d // 2
        sign = tl.where(d % 2 == 0, -1.0, 1.0)
    else:
        low = d < HALF
        partner = tl.where(low, d + HALF, d - HALF)
        which = tl.where(low, d, d - HALF)
        sign = tl.where(low, -1.0, 1.0)
    x = tl.load(at + d[None, :], mask=known & (d < WIDTH)[None, :], other=0.0).to(tl.float32)
    y = tl.load(at + partner[None, :], mask=known & turns[None, :], other=0.0).to(tl.float32)
    if HEAD_NORM:
        shrink = tl.rsqrt(tl.sum(x * x, axis=1) / WIDTH + eps)[:, None]
        x *= shrink * tl.load(gain_ptr + d, mask=d < WIDTH, other=0.0).to(tl.float32)[None, :]
        y *= shrink * tl.load(gain_ptr + partner, mask=turns, other=0.0).to(tl.float32)[None, :]
    cos = tl.load(cos_ptr + position * HALF + which, mask=turns, other=1.0)
    sin = tl.load(sin_ptr + position * HALF + which, mask=turns, other=0.0)
    return x * cos[None, :] + sign[None, :] * y * sin[None, :]


@triton.jit
def attend(
    qkv_ptr,
    cos_ptr,
    sin_ptr,
    position_ptr,
    q_gain_ptr,
    k_gain_ptr,
    keys_ptr,
    values_ptr,
    out_ptr,
    partial_ptr,
    arrived_ptr,
    eps,
    scaling,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROTARY: tl.constexpr,
    PAIRS: tl.constexpr,
    HEAD_NORM: tl.constexpr,
    CAPACITY: tl.constexpr,
    SPLITS: tl.constexpr,
    LENGTH: tl.constexpr,  # positions of a split
    EARLY: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """Attention of a row's new token, for one key head and one split of the positions; the split
    with the new position writes its key and value."""
    row = tl.program_id(0)
    kv = tl.program_id(1)
    split = tl.program_id(2)
    GROUP: tl.constexpr = HEADS // KV_HEADS
    d = tl.arange(0, BLOCK_D)
    g = tl.arange(0, BLOCK_G)
    one = tl.arange(0, 1)
    within = d < WIDTH
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    position = tl.load(position_ptr + row)
    kind = out_ptr.dtype.element_ty
    start = qkv_ptr + row * (HEADS + 2 * KV_HEADS) * WIDTH
    q = _turned(
        start + (kv * GROUP + g)[:, None] * WIDTH, (g < GROUP)[:, None], d, cos_ptr, sin_ptr,
        q_gain_ptr, position, eps, WIDTH, ROTARY, PAIRS, HEAD_NORM,
    ).to(kind)  # fmt: skip
    new_k = _turned(
        start + (HEADS + kv + one)[:, None] * WIDTH, (one < 1)[:, None], d, cos_ptr, sin_ptr,
        k_gain_ptr, position, eps, WIDTH, ROTARY, PAIRS, HEAD_NORM,
    ).to(kind)  # fmt: skip
    new_v = tl.load(
        start + (HEADS + KV_HEADS + kv + one)[:, None] * WIDTH + d[None, :],
        mask=within[None, :],
        other=0.0,
    )
    base = (row * KV_HEADS + kv).to(tl.int64) * CAPACITY * WIDTH
    begin = split * LENGTH
    if (begin <= position) & (position < begin + LENGTH):
        last = base + position * WIDTH + d[None, :]
        tl.store(keys_ptr + last, new_k, mask=within[None, :])
        tl.store(values_ptr + last, new_v, mask=within[None, :])
    best = tl.full((BLOCK_G,), float("-inf"), tl.float32)
    weight = tl.zeros((BLOCK_G,), tl.float32)
    found = tl.zeros((BLOCK_G, BLOCK_D), tl.float32)
    for t0 in range(begin, tl.minimum(begin + LENGTH, position + 1), BLOCK_T):
        t = t0 + tl.arange(0, BLOCK_T)
        at = base + t[:, None] * WIDTH + d[None, :]
        kept = (t < position)[:, None] & within[None, :]
        newest = (t == position)[:, None]
        k = tl.load(keys_ptr + at, mask=kept, other=0.0)
        v = tl.load(values_ptr + at, mask=kept, other=0.0)
        k = tl.where(newest, new_k, k)
        v = tl.where(newest, new_v, v)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scaling
        scores = tl.where((t <= position)[None, :], scores, float("-inf"))
        higher = tl.maximum(best, tl.max(scores, axis=1))
        shares = tl.exp(scores - higher[:, None])
        fade = tl.exp(best - higher)
        weight = weight * fade + tl.sum(shares, axis=1)
        found = found * fade[:, None]
        found = tl.dot(shares.to(kind), v, found, input_precision="ieee")
        best = higher
    head = row * HEADS + kv * GROUP + g
    mask = (g < GROUP)[:, None] & within[None, :]
    out_at = out_ptr + head[:, None] * WIDTH + d[None, :]
    if SPLITS == 1:
        tl.store(out_at, (found / weight[:, None]).to(kind), mask=mask)
    else:
        part = partial_ptr + (head * SPLITS + split) * (WIDTH + 2)
        tl.store(part[:, None] + d[None, :], found, mask=mask)
        tl.store(part + WIDTH, best, mask=g < GROUP)
        tl.store(part + WIDTH + 1, weight, mask=g < GROUP)
        # The last program combines the splits and resets the counter.
        tl.debug_barrier()
        counter = arrived_ptr + row * KV_HEADS + kv
        if tl.atomic_add(counter, 1, sem="acq_rel") == SPLITS - 1:
            tl.store(counter, 0)
            best = tl.full((BLOCK_G,), float("-inf"), tl.float32)
            weight = tl.zeros((BLOCK_G,), tl.float32)
            found = tl.zeros((BLOCK_G, BLOCK_D), tl.float32)
            parts = position // LENGTH + 1  # further splits are empty
            for other in range(parts):
                part = partial_ptr + (head * SPLITS + other) * (WIDTH + 2)
                theirs = tl.load(part + WIDTH, mask=g < GROUP, other=0.0, cache_modifier=".cg")
                share = tl.load(part + WIDTH + 1, mask=g < GROUP, other=1.0, cache_modifier=".cg")
                summand = tl.load(
                    part[:, None] + d[None, :], mask=mask, other=0.0, cache_modifier=".cg"
                )
                higher = tl.maximum(best, theirs)
                fade, rise = tl.exp(best - higher), tl.exp(theirs - higher)
                weight = weight * fade + share * rise
                found = found * fade[:, None] + summand * rise[:, None]
                best = higher
            tl.store(out_at, (found / weight[:, None]).to(kind), mask=mask)


@triton.jit
def choose(
    logits_ptr,
    token_ptr,
    position_ptr,
    done_ptr,
    cursor_ptr,
    chosen_ptr,
    ends_ptr,
    table_ptr,
    hidden_ptr,
    pad,
    last_position,
    ROWS: tl.constexpr,  # of the buffer of chosen tokens
    ENDS: tl.constexpr,
    VOCABULARY: tl.constexpr,
    HIDDEN: tl.constexpr,
    EARLY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Choose each row's best token, update the row's state, and write its embedding."""
    row = tl.program_id(0)
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    where = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, VOCABULARY, BLOCK):
        at = start + tl.arange(0, BLOCK)
        logits = tl.load(
            logits_ptr + row * VOCABULARY + at, mask=at < VOCABULARY, other=float("-inf")
        ).to(tl.float32)
        better = logits > best
        best = tl.where(better, logits, best)
        where = tl.where(better, at, where)
    first = tl.where(best == tl.max(best, axis=0), where, VOCABULARY - 1)
    token = tl.min(first, axis=0).to(tl.int64)
    done = tl.load(done_ptr + row)
    token = tl.where(done != 0, pad, token)
    cursor = tl.load(cursor_ptr + row)
    position = tl.load(position_ptr + row)
    tl.store(chosen_ptr + cursor * ROWS + row, token)
    tl.store(cursor_ptr + row, tl.minimum(cursor + 1, last_position))
    tl.store(token_ptr + row, token)
    for index in tl.static_range(ENDS):
        done = tl.where(token == tl.load(ends_ptr + index), 1, done)
    tl.store(done_ptr + row, done)
    tl.store(position_ptr + row, tl.minimum(position + 1, last_position))
    for start in range(0, HIDDEN, BLOCK):
        at = start + tl.arange(0, BLOCK)
        hidden = tl.load(table_ptr + token * HIDDEN + at, mask=at < HIDDEN, other=0.0)
        tl.store(hidden_ptr + row * HIDDEN + at, hidden, mask=at < HIDDEN)
