"""C++ of ours, which ``workloads.native_code`` has compiled on the node; no Python."""
