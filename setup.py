from pathlib import Path

from setuptools import find_packages, setup

EXAMPLES = [
    # gluoncv asks for no upper bounds, and what pip would choose today does not work with MXNet's numpy < 1.24.
    "gluoncv==0.10.5.post0",
    "matplotlib<3.8",
    "opencv-python<4.10",
    "pandas<2.1",
    "pillow",
    "scikit-learn<1.4",
    "scipy<1.12",
    "tqdm",
]

setup(
    name="gluon_syncbn",
    version="0.1.0",
    description="Synchronized Batch Normalization for MXNet Gluon",
    long_description=(Path(__file__).parent / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    packages=find_packages(include=["gluon_syncbn", "gluon_syncbn.*"]),
    python_requires=">=3.8,<3.12",
    # Not mxnet itself: it would overwrite an installed mxnet-cu. The extras choose one.
    install_requires=["numpy<1.24"],
    extras_require={
        "cpu": ["mxnet==1.9.1"],
        "cu112": ["mxnet-cu112==1.9.1"],
        "cu117": ["mxnet-cu117==1.9.1"],
        "examples": EXAMPLES,
        "test": [*EXAMPLES, "psutil", "pytest", "pytest-timeout", "ruff==0.15.*"],
    },
    classifiers=[
        "Programming Language :: Python :: 3.8",
        "Programming Language :: Python :: 3.9",
        "Programming Language :: Python :: 3.10",
        "Programming Language :: Python :: 3.11",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
