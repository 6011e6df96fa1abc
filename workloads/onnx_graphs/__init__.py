"""Models as ONNX graphs: exported once into the node's cache, and run by ONNX Runtime."""
