"""Decoding with buffers that never move: one step that can be recorded once and replayed.

description   a decoder's matrices and constants, read off a model of transformers
packing       matrices in 8 and 4 bits
layers        the layers in plain torch: reading prompts, and one token for each row
kernels       the same for a single row as five Triton kernels a layer
slots         keys, values and the state of each row; choice of sizes
continuous    slots that take the next prompt when a text has ended
decoder       prefill, recorded steps and their launching
"""
