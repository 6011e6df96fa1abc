"""The grid file: strict YAML with positions, its fields and axes, and the jobs it stands for."""
