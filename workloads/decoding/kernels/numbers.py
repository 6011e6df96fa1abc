# mypy: disable-error-code="no-untyped-def"
"""Values in 8 and 4 bits as float32, by as few instructions as they take."""

from __future__ import annotations

import triton
import triton.language as tl

#: False where Triton's interpreter runs the kernels, which knows no assembler.
_ASSEMBLER = tl.constexpr(not triton.knobs.runtime.interpret)


@triton.jit
def raised(words, INDEX: tl.constexpr):
    """Nibble ``INDEX`` of each word as 8 or 128 + nibble / 16: left where float32 numbers of
    that size have just these bits, which takes no conversion, and a shift for two nibbles."""
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
    # Mask and base in one instruction: of "& |" the compiler makes two.
    if INDEX == 1 or INDEX == 3 or INDEX == 5:
        if _ASSEMBLER:
            return tl.inline_asm_elementwise(
                "lop3.b32 $0, $1, 0x0000F000, 0x43000000, 0xEA;",
                "=r,r",
                [moved],
                dtype=tl.float32,
                is_pure=True,
                pack=1,
            )
        return ((moved & 0x0000F000) | 0x43000000).to(tl.float32, bitcast=True)
    if _ASSEMBLER:
        return tl.inline_asm_elementwise(
            "lop3.b32 $0, $1, 0x000F0000, 0x41000000, 0xEA;",
            "=r,r",
            [moved],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    return ((moved & 0x000F0000) | 0x41000000).to(tl.float32, bitcast=True)


@triton.jit
def middle(INDEX: tl.constexpr):
    """Result of ``raised`` for a nibble of 8, which stands for zero."""
    return 128.5 if INDEX == 1 or INDEX == 3 or INDEX == 5 else 8.5


@triton.jit
def fp8_byte(words, INDEX: tl.constexpr):
    """Byte ``INDEX`` of each word, an fp8 number, as float32 too small by 2 ** 120: its bits are
    put where float32 has sign, exponent and fraction. The card's conversion is far slower."""
    moved = words if INDEX == 3 else words << (24 - 8 * INDEX)
    return ((moved >> 4) & -0x78100000).to(tl.float32, bitcast=True)
