raise ImportError("ONNX is left out of this process of a test: see run_python in tests/testing.py")
