# mypy: disable-error-code="no-untyped-def"
"""A single row's decoding step as Triton kernels on the slots' tensors: products, attention over
the cache, choice of tokens.

Small operations cost more to launch than to run, so the product's kernel also does the norm before
it, bias, gate and residual: five kernels a layer. With ``EARLY`` a kernel starts before the
previous one ends (programmatic dependent launch), fetches its first weights, and waits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from workloads.engines.graph.layers import Decoder, Matrix

if TYPE_CHECKING:
    from workloads.engines.graph.decoder import Slots

#: Format codes in kernels.
KINDS = {"": 0, "int8": 1, "fp8": 2, "int4": 3}


#: Triton's interpreter has no assembler.
_ASSEMBLER = tl.constexpr(not triton.knobs.runtime.interpret)


@triton.jit
def raised(words, INDEX: tl.constexpr):
    """Nibble ``INDEX`` of each word as the float32 8 + nibble / 16 (128 + for 1, 3 and 5), by
    placing its bits in the fraction instead of converting."""
    if INDEX == 0:
        moved = words << 16
    elif INDEX < 3:
        moved = words << 8
    elif INDEX < 5:
        moved = words
    elif INDEX < 7:
        moved = words >> 8
    else:
        moved = words >> 12
    ODD: tl.constexpr = INDEX == 1 or INDEX == 3 or INDEX == 5
    if _ASSEMBLER:
        # One instruction for mask and base; the compiler makes two of "& |".
        code: tl.constexpr = (
            "lop3.b32 $0, $1, 0x0000F000, 0x43000000, 0xEA;"
            if ODD
            else "lop3.b32 $0, $1, 0x000F0000, 0x41000000, 0xEA;"
        )
        return tl.inline_asm_elementwise(
            code, "=r,r", [moved], dtype=tl.float32, is_pure=True, pack=1
        )
    nibble: tl.constexpr = 0x0000F000 if ODD else 0x000F0000
    base: tl.constexpr = 0x43000000 if ODD else 0x41000000
    return ((moved & nibble) | base).to(tl.float32, bitcast=True)


@triton.jit
def middle(INDEX: tl.constexpr):
    """Result of ``raised`` for zero, a nibble of 8."""
    return 128.5 if INDEX == 1 or INDEX == 3 or INDEX == 5 else 8.5


@triton.jit
def fp8_byte(words, INDEX: tl.constexpr):
    """Byte ``INDEX`` of each word, in fp8, as float32 / 2 ** 120, by moving its bits; the card's
    conversion is far slower."""
    moved = words if INDEX == 3 else words << (24 - 8 * INDEX)
    return ((moved >> 4) & -0x78100000).to(tl.float32, bitcast=True)


@triton.jit
def _weights(at, mask):
    """Weights or words, read once and so not to be kept in the cache."""
    return tl.load(at, mask=mask, other=0, eviction_policy="evict_first")


@triton.jit
def multiply(
    x_ptr,
    w_ptr,
    scale_ptr,
    bias_ptr,
    residual_ptr,
    gain_ptr,
    out_ptr,
    eps,
    ROWS: tl.constexpr,  # of the result
    COLUMNS: tl.constexpr,
    KIND: tl.constexpr,
    NORM: tl.constexpr,
    GATED: tl.constexpr,  # the matrix has 2 x ROWS rows: gates, then ups
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    EARLY: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One row times a matrix of plain or int8 values, or of words of four fp8 or eight int4 values
    (``layers``)."""
    PARTS: tl.constexpr = 8 if KIND == 3 else 4 if KIND == 2 else 1  # values of a word
    BLOCK_W: tl.constexpr = BLOCK_K // PARTS
    WORDS: tl.constexpr = COLUMNS // PARTS
    # int4: a scale covers 8 words and multiplies sums of 4, those of a thread.
    SUMS: tl.constexpr = BLOCK_W // 4 if KIND == 3 else BLOCK_W
    SCALES: tl.constexpr = WORDS // 8
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = rows < ROWS
    ws = tl.arange(0, BLOCK_W)
    long_rows = rows.to(tl.int64)[:, None]
    if PARTS == 1:
        # Load the matrix in the row's pieces (16 bytes), so that both have one layout.
        w_at = w_ptr + long_rows * WORDS + tl.max_contiguous(ws, 8)[None, :]
    else:
        w_at = w_ptr + long_rows * WORDS + ws[None, :]
    if KIND == 3:
        cs = tl.arange(0, BLOCK_W // 4)
        s_at = scale_ptr + long_rows * SCALES + cs[None, :] // 2
    first = inside[:, None] & (ws < WORDS)[None, :]
    w = _weights(w_at, first)
    up = w
    if GATED:
        up = _weights(w_at + ROWS * WORDS, first)
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    total = tl.zeros((BLOCK_N, SUMS), tl.float32)
    total_up = tl.zeros((BLOCK_N, SUMS), tl.float32)
    squares = tl.zeros((BLOCK_W,), tl.float32)
    for w0 in tl.range(0, WORDS, BLOCK_W, num_stages=1):
        # Prefetch the next block.
        here = w0 + ws
        reach = inside[:, None] & (here + BLOCK_W < WORDS)[None, :]
        next_w = _weights(w_at + w0 + BLOCK_W, reach)
        if GATED:
            next_up = _weights(w_at + ROWS * WORDS + w0 + BLOCK_W, reach)
        if KIND == 3:
            near = inside[:, None] & (w0 + cs * 4 < WORDS)[None, :]
            scale = tl.load(s_at + w0 // 8, mask=near, other=0.0)
            if GATED:
                scale_up = tl.load(s_at + ROWS * SCALES + w0 // 8, mask=near, other=0.0)
            nothing = tl.zeros((BLOCK_W,), tl.float32)
        if PARTS == 1:
            part, part_up = total, total_up
        else:
            part = tl.zeros((BLOCK_N, BLOCK_W), tl.float32)
            part_up = tl.zeros((BLOCK_N, BLOCK_W), tl.float32)
        for index in tl.static_range(PARTS):
            at = here
            if PARTS > 1:
                at = w0 * PARTS + ws // 4 * (4 * PARTS) + index * 4 + ws % 4
            x = tl.load(x_ptr + at, mask=here < WORDS, other=0.0).to(tl.float32)
            if NORM:
                squares += x * x
                x *= tl.load(gain_ptr + at, mask=here < WORDS, other=0.0).to(tl.float32)
            if KIND == 3:
                nothing += middle(index) * x
            part += _value(w, index, KIND) * x[None, :]
            if GATED:
                part_up += _value(up, index, KIND) * x[None, :]
        if KIND == 3:
            part -= nothing[None, :]  # now 1/16 of the nibbles' values
            total += tl.sum(part.reshape(BLOCK_N, SUMS, 4), axis=2) * scale
            if GATED:
                part_up -= nothing[None, :]
                total_up += tl.sum(part_up.reshape(BLOCK_N, SUMS, 4), axis=2) * scale_up
        elif PARTS == 1:
            total, total_up = part, part_up
        else:
            total += part
            if GATED:
                total_up += part_up
        w = next_w
        if GATED:
            up = next_up
    y = tl.sum(total, axis=1)
    y_up = tl.sum(total_up, axis=1) if GATED else y
    if KIND == 3:
        y *= 16.0
        y_up *= 16.0
    elif KIND > 0:
        exponent: tl.constexpr = 2.0**120 if KIND == 2 else 1.0
        y *= exponent * tl.load(scale_ptr + rows, mask=inside, other=0.0)
        if GATED:
            y_up *= exponent * tl.load(scale_ptr + ROWS + rows, mask=inside, other=0.0)
    if NORM:
        shrink = tl.rsqrt(tl.sum(squares) / COLUMNS + eps)
        y *= shrink
        y_up *= shrink
    if BIAS:
        y += tl.load(bias_ptr + rows, mask=inside, other=0.0).to(tl.float32)
    if GATED:
        y = y * tl.sigmoid(y) * y_up
    if RESIDUAL:
        y += tl.load(residual_ptr + rows, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + rows, y.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _value(words, INDEX: tl.constexpr, KIND: tl.constexpr):
    if KIND == 3:
        return raised(words, INDEX)
    return fp8_byte(words, INDEX) if KIND == 2 else words.to(tl.float32)


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


_WIDE = 8192  # columns from which a matrix is wide
#: (format, gated, wide) -> (rows, columns, warps, registers per thread); tuned on an H100 with
#: ChatGLM3-6B.
BLOCKS: dict[tuple[str, bool, bool], tuple[int, int, int, int | None]] = {
    ("", False, False): (2, 2048, 8, None),
    ("", False, True): (4, 2048, 8, None),
    ("", True, False): (2, 1024, 4, None),
    ("int8", False, False): (4, 1024, 4, None),
    ("int8", False, True): (4, 1024, 4, None),
    ("int8", True, False): (2, 2048, 8, None),
    ("fp8", False, False): (4, 2048, 4, None),
    ("fp8", False, True): (4, 2048, 4, None),
    ("fp8", True, False): (4, 4096, 8, None),
    ("int4", False, False): (8, 4096, 4, None),
    ("int4", False, True): (4, 2048, 2, 128),
    ("int4", True, False): (8, 4096, 4, None),
}


_SPLITS = 16  # most programs that share attention's positions
_BLOCK_T = 32  # positions of a block


class SingleRow:
    """A callable that does one step: five kernels a layer."""

    def __init__(
        self, decoder: Decoder, state: Slots, *, pad: int, length: int, early: bool
    ) -> None:
        self._decoder = decoder
        self._state = state
        self._pad = pad
        self._early = early
        self._splits = min(_SPLITS, triton.cdiv(length, _BLOCK_T))
        blocks = triton.cdiv(length, _BLOCK_T * self._splits)
        self._length = blocks * _BLOCK_T  # of a split
        layer = decoder.layers[0]
        card, dtype = decoder.embedding.device, decoder.dtype

        def row(size: int, kind: torch.dtype = dtype) -> torch.Tensor:
            return torch.empty(size, dtype=kind, device=card)

        self._qkv = row(layer.qkv.rows)
        self._attended = row(layer.out.columns)
        self._gated = row(layer.down.columns)
        self._arrived = torch.zeros(decoder.kv_heads, dtype=torch.int32, device=card)
        self._partial = row(decoder.heads * self._splits * (decoder.width + 2), torch.float32)

    def __call__(self) -> None:
        decoder, state = self._decoder, self._state
        hidden = state.hidden
        for layer, keys, values in zip(decoder.layers, state.keys, state.values, strict=True):
            self._multiply(hidden, layer.qkv, self._qkv, gain=layer.before)
            self._attend(layer.q_gain, layer.k_gain, keys, values)
            self._multiply(self._attended, layer.out, hidden, residual=hidden)
            self._multiply(hidden, layer.gate_up, self._gated, gain=layer.between, gated=True)
            self._multiply(self._gated, layer.down, hidden, residual=hidden)
        self._multiply(hidden, decoder.head, state.logits, gain=decoder.norm)
        self._launch(
            choose,
            (state.rows,),
            state.logits,
            state.token,
            state.position,
            state.done,
            state.cursor,
            state.chosen,
            state.ends,
            decoder.embedding,
            hidden,
            self._pad,
            state.capacity - 1,
            ROWS=state.chosen.shape[1],
            ENDS=state.ends.numel(),
            VOCABULARY=decoder.head.rows,
            HIDDEN=decoder.embedding.shape[1],
            BLOCK=16384,
            num_warps=32,
        )

    def _multiply(
        self,
        x: torch.Tensor,
        matrix: Matrix,
        out: torch.Tensor,
        *,
        gain: torch.Tensor | None = None,
        residual: torch.Tensor | None = None,
        gated: bool = False,
    ) -> None:
        wide = matrix.columns >= _WIDE and not gated
        block_n, block_k, warps, registers = BLOCKS[matrix.kind, gated, wide]
        rows = matrix.rows // 2 if gated else matrix.rows
        words = matrix.kind in ("fp8", "int4")
        self._launch(
            multiply,
            (triton.cdiv(rows, block_n),),
            x,
            matrix.values.view(torch.int32) if words else matrix.values,
            matrix.scales,
            matrix.bias,
            residual,
            gain,
            out,
            self._decoder.eps,
            ROWS=rows,
            COLUMNS=matrix.columns,
            KIND=KINDS[matrix.kind],
            NORM=gain is not None,
            GATED=gated,
            BIAS=matrix.bias is not None,
            RESIDUAL=residual is not None,
            BLOCK_N=block_n,
            BLOCK_K=block_k,
            num_warps=warps,
            maxnreg=registers,
        )

    def _attend(
        self,
        q_gain: torch.Tensor | None,
        k_gain: torch.Tensor | None,
        keys: torch.Tensor,
        values: torch.Tensor,
    ) -> None:
        decoder, state = self._decoder, self._state
        block_d = triton.next_power_of_2(decoder.width)
        self._launch(
            attend,
            (state.rows, decoder.kv_heads, self._splits),
            self._qkv,
            decoder.cos,
            decoder.sin,
            state.position,
            q_gain,
            k_gain,
            keys,
            values,
            self._attended,
            self._partial,
            self._arrived,
            decoder.eps,
            decoder.scaling,
            HEADS=decoder.heads,
            KV_HEADS=decoder.kv_heads,
            WIDTH=decoder.width,
            ROTARY=decoder.rotary,
            PAIRS=decoder.pairs,
            HEAD_NORM=q_gain is not None,
            CAPACITY=state.capacity,
            SPLITS=self._splits,
            LENGTH=self._length,
            BLOCK_G=max(16, triton.next_power_of_2(decoder.group)),
            BLOCK_D=max(16, block_d),
            BLOCK_T=_BLOCK_T,
            num_warps=4,
            num_stages=2,
        )

    def _launch(self, kernel: Any, grid: tuple[int, ...], *given: Any, **named: Any) -> None:
        if self._early:
            named["launch_pdl"] = True
        kernel[grid](*given, EARLY=self._early, **named)
