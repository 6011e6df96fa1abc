"""C++ sources of machine code that is compiled on the node (``workloads.native_code``); no Python."""
