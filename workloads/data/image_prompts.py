"""Descriptions of pictures. The first is that of optimum-habana's example, by which others
measured; the rest were written for this project."""

from __future__ import annotations

PROMPTS: tuple[str, ...] = (
    "An image of a squirrel in Picasso style",
    "A lighthouse on a cliff at dusk, oil painting",
    "A bowl of lemons on a blue table, morning light",
    "A red bicycle leaning against a stone wall",
    "An old library with ladders and green lamps",
    "A fox asleep in deep snow, watercolour",
    "A small harbour in fog, seen from above",
    "A clockmaker at work, drawn with charcoal",
    "A field of sunflowers under a heavy sky",
    "A cat on a piano, black and white photograph",
    "A tram in the rain at night, reflections on the street",
    "A paper boat on a puddle, close up",
    "A mountain hut with lit windows, winter",
    "A glass greenhouse full of orchids",
    "A child flying a kite on a beach, woodcut",
    "A still life with bread, cheese and a copper jug",
)
