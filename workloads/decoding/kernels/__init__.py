"""Triton kernels of a decoding step; imported only where Triton is.

At batch 1 a step is the reading of all weights, and everything between two products costs more in
launching than in work. So what surrounds a product is done by the product's own kernel: the norm
before it (the sum of squares runs along with the dot products), the bias, the activation of a
gated layer, the residual after it. That makes five kernels a layer.

    numbers     values in 8 and 4 bits as float32
    one_row     (norm +) matrix times row (+ bias, gate, residual)
    many_rows   matrix times several rows, by the card's matrix units; values written out
    attention   rotary positions, the new key and value into the cache, attention; choice of token

With ``EARLY`` a kernel may be started before the one before it has ended (programmatic dependent
launch): it fetches its first weights, which nobody writes, and then waits.
"""

#: Numbers of the formats within kernels.
KINDS = {"": 0, "int8": 1, "fp8": 2, "int4": 3}
