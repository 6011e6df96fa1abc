"""optimum-habana on Gaudi cards: generation, training, and the two passes of fp8."""
